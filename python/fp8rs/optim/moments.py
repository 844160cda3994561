"""Moments of AdamW in 8 bits: one byte per element, and a range per block of 128 elements.

A block is 128 consecutive elements along the last dimension of the whole parameter. Its range is
the largest and the smallest magnitude that its codes span. The codes of the first moment are a sign
and seven bits, those of the second moment eight bits. ``adamw_`` reads and writes both in one pass
(``src/format/moments.rs`` defines the bytes). The functions of this module convert whole moments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from fp8rs._torch import is_distributed, own_part
from fp8rs.model.handle import fp8_parameter_ids, local_of
from fp8rs.optim.optim_param import OptimParam

#: The number of elements of a block.
BLOCK = 128
#: The bytes per element of both moments: two codes, and two ranges of two fp32 per block.
BYTES_PER_ELEMENT = 2 + 16 / BLOCK
#: Smaller parameters have high-precision moments.
SMALLEST_NUMEL = 4096

#: The keys of the moments in a parameter's state, in high precision.
MOMENT_KEYS = ("exp_avg", "exp_avg_sq")
CODES = "_codes"
RANGE = "_range"
#: The keys in the state of a parameter whose moments are codes.
CODE_KEYS = tuple(name + suffix for name in MOMENT_KEYS for suffix in (CODES, RANGE))

#: Returns whether the moments of a parameter are stored in 8 bits.
StateFilter = Callable[[Tensor], bool]

_INF_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000
_BINADE = 1 << 23
#: Next to this number, float32 numbers are integers. Adding it rounds to the nearest integer.
_ROUNDING = 1.5 * 2**23


@dataclass(frozen=True)
class MomentFormat:
    """The format of a moment's codes.

    Attributes:
        top: the largest code of a magnitude.
        binades: the largest ratio of two magnitudes of a block that codes distinguish, as a power
            of two.
        is_signed: whether the highest bit of a code is a sign. Small magnitudes then become 0.
    """

    top: int
    binades: int
    is_signed: bool


#: The formats of the moments, by their key.
FORMATS = {
    "exp_avg": MomentFormat(top=127, binades=20, is_signed=True),
    "exp_avg_sq": MomentFormat(top=255, binades=40, is_signed=False),
}


# --- which parameters -----------------------------------------------------------------------------


def stores_8bit_moments_by_default(weight: Tensor) -> bool:
    """Return whether the moments of an FP8 layer's weight are stored in 8 bits by default."""
    return weight.numel() >= SMALLEST_NUMEL and has_whole_blocks(weight)


def default_filter() -> StateFilter:
    """Return a filter for the parameters of FP8 layers with at least 4096 elements."""
    ids_in_layers = fp8_parameter_ids()

    def state_filter(param: Tensor) -> bool:
        if not stores_8bit_moments_by_default(param):
            return False
        is_fp8_weight = OptimParam(param).weight is not None
        return is_fp8_weight or local_of(param) is not None or id(param) in ids_in_layers

    return state_filter


def has_whole_blocks(param: Tensor) -> bool:
    """Return whether no shard of a parameter splits a block of 128 elements of a row.

    All ranks get the same answer.
    """
    if param.dim() < 2 or not param.is_floating_point():
        return False
    shards = 1  # of the last dimension
    if is_distributed(param):
        distributed: Any = param
        for mesh_dim, placement in enumerate(distributed.placements):
            if getattr(placement, "dim", None) in (param.dim() - 1, -1):
                shards *= distributed.device_mesh.size(mesh_dim)
    return param.shape[-1] % (BLOCK * shards) == 0


# --- state ----------------------------------------------------------------------------------------


def new_codes(optim_param: OptimParam) -> dict[str, Tensor]:
    """Return the state of moments that are 0, distributed as the parameter is."""
    local = optim_param.local
    state = {}
    for name in MOMENT_KEYS:
        codes = torch.zeros(local.shape, dtype=torch.uint8, device=local.device)
        ranges = torch.zeros(range_shape(local.shape), dtype=torch.float32, device=local.device)
        state.update(_distributed(optim_param, name, codes, ranges))
    return state


def to_codes(optim_param: OptimParam, state: dict[str, Any]) -> None:
    """Replace the high-precision moments in a parameter's state by codes."""
    for name in MOMENT_KEYS:
        values = own_part(state.pop(name))
        codes, ranges = encode(values, FORMATS[name])
        state.update(_distributed(optim_param, name, codes, ranges))


def to_high_precision(optim_param: OptimParam, state: dict[str, Any]) -> None:
    """Replace the codes in a parameter's state by float32 moments."""
    for name in MOMENT_KEYS:
        codes = own_part(state.pop(name + CODES))
        ranges = own_part(state.pop(name + RANGE))
        state[name] = optim_param.like(decode(codes, ranges, FORMATS[name]))


def range_shape(shape: torch.Size) -> tuple[int, ...]:
    """Return the shape of the ranges of a moment: the largest and the smallest of each block."""
    return (*shape[:-1], shape[-1] // BLOCK, 2)


def _distributed(
    optim_param: OptimParam, name: str, codes: Tensor, ranges: Tensor
) -> dict[str, Tensor]:
    shape = optim_param.param.shape
    return {
        name + CODES: optim_param.like(codes, tuple(shape)),
        name + RANGE: optim_param.like(ranges, range_shape(shape)),
    }


# --- conversion -----------------------------------------------------------------------------------


def encode(values: Tensor, moment: MomentFormat) -> tuple[Tensor, Tensor]:
    """Return the codes (uint8) and ranges (float32) of values, with the bytes of ``adamw_``."""
    blocks = values.float().reshape((*range_shape(values.shape)[:-1], BLOCK))
    if not blocks.numel():
        codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
        return codes, blocks.new_zeros(range_shape(values.shape))
    bits = blocks.contiguous().view(torch.int32)
    magnitudes = bits & 0x7FFFFFFF

    largest = magnitudes.amax(-1, keepdim=True)
    smallest = magnitudes.where(magnitudes > 0, largest).amin(-1, keepdim=True)
    smallest = smallest.maximum(largest - moment.binades * _BINADE)
    is_finite = largest < _INF_BITS

    # Codes count down from the largest magnitude. Differences of the bits of float32 numbers are
    # nearly differences of their logarithms.
    distance = _code_distance(largest, smallest, moment)
    below_largest = (largest - magnitudes).float() * (1.0 / distance.float())
    rounded = (_ROUNDING + moment.top) - below_largest.clamp(max=moment.top - 1)
    codes = (rounded - _ROUNDING).int()

    # Code 0 is the value 0.
    smallest_nonzero = torch.ones_like(smallest)
    if moment.is_signed:
        smallest_nonzero = (smallest - _BINADE).clamp(min=1)
    codes = codes.where(magnitudes >= smallest_nonzero, 0)
    if moment.is_signed:
        codes |= (bits >> 24) & 0x80
    codes = codes.where(is_finite, moment.top)

    ranges = torch.cat((largest, smallest), -1).where(is_finite, _NAN_BITS)
    return codes.to(torch.uint8).view(values.shape), ranges.view(torch.float32)


def decode(codes: Tensor, ranges: Tensor, moment: MomentFormat) -> Tensor:
    """Return the values (float32) of codes and ranges."""
    blocks = codes.reshape((*ranges.shape[:-1], BLOCK)).int()
    largest, smallest = ranges.contiguous().view(torch.int32).split(1, -1)
    magnitudes = blocks & moment.top
    bits = largest - (moment.top - magnitudes) * _code_distance(largest, smallest, moment)
    bits = bits.where(magnitudes > 0, 0)
    values = bits.view(torch.float32)
    if moment.is_signed:
        values = values.where(blocks < 0x80, -values)
    return cast(Tensor, values.view(codes.shape))


def _code_distance(largest: Tensor, smallest: Tensor, moment: MomentFormat) -> Tensor:
    """Return the distance between the bits of adjacent codes."""
    return ((largest - smallest) // (moment.top - 1)).clamp(min=1)
