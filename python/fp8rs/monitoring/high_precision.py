"""GEMMs of layers in high precision, by name, while a run is debugged."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from torch import nn

from fp8rs.nn.debug import GEMMS, set_debug

from .layers import layers_of


def high_precision(
    model: nn.Module, patterns: str | Iterable[str], *, gemms: Iterable[str] = GEMMS
) -> list[str]:
    """Have layers run some of their GEMMs on high-precision operands, from their next forward on.

    To find out what a run suffers from, without converting it again: switch layers or single GEMMs
    to high precision, train on, switch them back with ``gemms=()``. Compiled layers follow: each
    choice of GEMMs is a graph of its own, which is made once.

    The operands of such a GEMM are not quantized. A weight that comes quantized, from an FP8 gather
    or as an FP8 weight, is dequantized: its GEMMs then have the values of its codes. To have a
    weight itself in high precision under FSDP2, convert with
    ``enable_fsdp_float8_all_gather=False``.

    Layers compute in the dtype of their output. Copies of a layer do not have the choice. Call it
    on every rank.

    Args:
        model: a converted model, or a part of one.
        patterns: of layers' names in ``model``, such as ``"layers.0.*"`` (`fnmatch`, where
            ``*`` takes dots too), one or several.
        gemms: which of "forward", "dgrad" and "wgrad" run in high precision, and no others; () for
            none.

    Returns:
        The names of the layers.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: ``gemms`` has another name, ``model`` has no FP8 layer, or a pattern matches
            none.
    """
    chosen = (gemms,) if isinstance(gemms, str) else tuple(gemms)
    if unknown := [gemm for gemm in chosen if gemm not in GEMMS]:
        raise ValueError(f"gemms must be among {', '.join(GEMMS)}, not {unknown[0]!r}")
    layers = layers_of(model)
    found: dict[str, None] = {}
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        names = [name for name in layers if fnmatchcase(name, pattern)]
        if not names:
            raise ValueError(
                f"patterns: {pattern!r} matches no FP8 layer; the first of {len(layers)} is "
                f"{next(iter(layers))!r}"
            )
        found.update(dict.fromkeys(names))
    forward, dgrad, wgrad = (gemm in chosen for gemm in GEMMS)
    for name in found:
        set_debug(layers[name], high_precision=(forward, dgrad, wgrad))
    return list(found)
