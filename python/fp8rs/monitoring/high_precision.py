"""Run GEMMs of selected layers in high precision, to debug training."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase

from torch import nn

from fp8rs.nn.debug import set_debug
from fp8rs.quantize.recipes import GEMMS, check_gemms

from .layers import fp8_operands


def high_precision(
    model: nn.Module, patterns: str | Iterable[str], *, gemms: Iterable[str] = GEMMS
) -> list[str]:
    """Run some GEMMs of layers on high-precision operands, from their next forward.

    This helps to find the layer or GEMM whose quantization affects training, without converting the
    model again. Switch back with ``gemms=()``. Compiled layers follow, with one graph per choice of
    GEMMs.

    The operands of such a GEMM are not quantized. A weight that is already quantized, by an FP8
    all-gather or as an FP8 weight, is dequantized. To gather high-precision weights under FSDP2,
    convert with ``enable_fsdp_float8_all_gather=False``.

    A layer whose GEMMs all run in high precision supports double backward if its input, weight and
    bias have the dtype of its output and the weight is not quantized. Other layers refuse it.

    Layers compute in the dtype of their output. Copies of a layer do not inherit the setting. Call
    this on every rank.

    Args:
        model: a converted model, or a part of one.
        patterns: one or several `fnmatch` patterns of layer names in ``model``, such as
            ``"layers.0.*"``. ``*`` also matches dots.
        gemms: the GEMMs that run in high precision, of "forward", "dgrad" and "wgrad". () for none
            but those of the recipe's ``high_precision_gemms``.

    Returns:
        The names of the layers.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: ``gemms`` has another name, ``model`` has no FP8 layer, or a pattern matches no
            layer.
    """
    chosen_gemms = check_gemms("gemms", gemms if isinstance(gemms, str) else tuple(gemms))
    if isinstance(patterns, str):
        patterns = (patterns,)

    layers, experts = fp8_operands(model)
    names: dict[str, None] = {}  # a set in the order of the patterns
    for pattern in patterns:
        matches = [name for name in layers if fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(f"patterns: {pattern!r} {_why_no_match(pattern, layers, experts)}")
        names.update(dict.fromkeys(matches))
    for name in names:
        set_debug(layers[name], high_precision=tuple(gemm in chosen_gemms for gemm in GEMMS))
    return list(names)


def _why_no_match(pattern: str, layers: Collection[str], experts: Collection[str]) -> str:
    """Return the end of the message for a pattern that matches no layer.

    Args:
        pattern: the pattern.
        layers: the names of the FP8 layers.
        experts: the names of the weights of experts.
    """
    for name in experts:
        if fnmatchcase(name, pattern):
            return (
                f"matches only weights of experts, such as {name!r}, whose GEMMs cannot be "
                "switched. Pass names of linear layers, or convert with experts='gather' or 'off'"
            )
    if not layers:
        return (
            f"matches no linear layer: {len(experts)} weights of experts are all that is "
            "converted, and their GEMMs cannot be switched"
        )
    return f"matches no FP8 layer. The first of {len(layers)} is {next(iter(layers))!r}"
