"""How long a step waits for its all-gathers: a model of time with one link and one GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from fp8rs.fsdp.sizes import Group

#: What the command line calls the figures of a link and a GPU.
FLAGS = {"link_bandwidth": "--link", "gpu_flops": "--tflops", "tokens": "--tokens"}


@dataclass(frozen=True)
class Gather:
    """When a smaller all-gather shortens a step: a model of time with one link and one GPU.

    Forward and backward each last as long as the longer of two: their GEMMs, and what goes over the
    link meanwhile. So it is a lower bound, and says from where on the link is hidden. GEMMs are
    those of linear layers: experts and attention are not among them.

    Attributes:
        hidden_high_precision: tokens a rank and step from which on the GEMMs hide the link, if
            weights are gathered in high precision. From there on the FP8 gather gains nothing.
        hidden_fp8: the same for the FP8 gather. Below it a step waits for the link all the same.
        seconds_high_precision, seconds_fp8: of a step of ``tokens``; None where these were not
            given.
    """

    hidden_high_precision: int
    hidden_fp8: int
    seconds_high_precision: float | None
    seconds_fp8: float | None


def gather_of(
    model: nn.Module,
    fp8: list[Group],
    plain: list[Group],
    reduce_dtype: torch.dtype | None,
    link_bandwidth: float | None,
    gpu_flops: float | None,
    tokens: int | None,
) -> Gather | None:
    """When the FP8 gather shortens a step; None without a link's and a GPU's figures.

    Args:
        model: the model, for its linear layers.
        fp8, plain: its groups, gathered with FP8 and without.
        reduce_dtype: the mixed-precision policy's.
        link_bandwidth, gpu_flops, tokens: as of ``report``.

    Raises:
        ValueError: a figure is not positive, or one of two is missing.
    """
    given = {"link_bandwidth": link_bandwidth, "gpu_flops": gpu_flops, "tokens": tokens}
    for name, value in given.items():
        if value is not None and not value > 0:
            raise ValueError(
                f"{name} must be positive, not {value!r} (on the command line {FLAGS[name]})"
            )
    if link_bandwidth is None or gpu_flops is None:
        if any(value is not None for value in given.values()):
            missing = [n for n in ("link_bandwidth", "gpu_flops") if given[n] is None]
            flags = " and ".join(FLAGS[n] for n in missing)
            raise ValueError(
                f"{' and '.join(missing)} must be given too (on the command line {flags}): times "
                "need both"
            )
        return None
    linears = {id(m.weight): m for m in model.modules() if isinstance(m, nn.Linear)}
    # A multiplication and an addition a token and element in the forward, twice that backward.
    forward = 2 * sum(m.weight.numel() for m in linears.values()) / gpu_flops
    backward = 2 * forward

    def links(groups: list[Group]) -> tuple[float, float]:
        """Seconds that the link takes in forward and backward. A rank's own part is not sent."""
        first = again = 0.0
        for group in groups:
            ranks = group.parameters[0].placement.ranks
            sent = (ranks - 1) / ranks / link_bandwidth
            first += group.gathered_bytes * sent
            again += (group.gathers - 1) * group.gathered_bytes * sent
            again += group.scattered_bytes(reduce_dtype) * sent
        return first, again

    def hidden(groups: list[Group]) -> int:
        first, again = links(groups)
        return round(max(first / forward, again / backward)) if forward else 0

    def seconds(groups: list[Group]) -> float | None:
        if tokens is None:
            return None
        first, again = links(groups)
        return max(first, tokens * forward) + max(again, tokens * backward)

    return Gather(hidden(plain), hidden(fp8), seconds(plain), seconds(fp8))
