"""One parameter of an optimizer, FP8 or plain, sharded or not.

Only `Param` depends on how a parameter is distributed and where its codes are stored.
"""

from __future__ import annotations

from enum import Enum, auto
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import dtensor_like, is_distributed, is_traced, own_part
from fp8rs.quantize import formats
from fp8rs.quantize.formats import FP8_MAX
from fp8rs.quantize.planes import Plane
from fp8rs.tensor.plane_storage import Delayed
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.rounding import rounds_to_codes, stochastic_round

_random_uniform = torch.ops.fp8rs.random_uniform_.default

#: Formats whose scales ``adamw_`` computes in the pass that writes the codes.
BLOCK_SCALE_FORMATS = (formats.ROW, formats.BLOCK_128X128, formats.MX_32X32)


class UpdateKind(Enum):
    """How a step writes a parameter. All ranks that have a part of it choose the same kind."""

    PLAIN = auto()  #: not an FP8 weight
    KNOWN_SCALE = auto()  #: one scale, known before the step (delayed scaling)
    CURRENT_SCALE = auto()  #: one scale, from the maximum of the new values
    OWN_SCALES = auto()  #: a scale per row or block, computed in the same pass as the codes
    SEPARATE = auto()  #: quantized after the step


#: Identifies the last write to a parameter. For an FP8 weight, it has counters. For a plain
#: parameter, it has a copy of its bits and its version counter.
LastWrite = tuple[Any, ...]


class Param:
    """A parameter at one step. FSDP2 may replace the local tensors between steps.

    Args:
        param: the parameter in the optimizer's group.

    Attributes:
        part: its local part.
        weight: the local part of an FP8 weight, else None.
        handle: the handle of a layer's FP8 weight (`fp8rs.fsdp.float8_shard`), else None. A copy of
            the weight has none.
    """

    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.part: Tensor = own_part(param)
        self.weight = self.part if isinstance(self.part, QuantizedTensor) else None
        self.handle: Any = None
        if self.weight is not None:
            storage = self.weight._storage
            observer: Any = storage.observer  # which copies share
            if observer is not None and (not observer.in_place or observer.observes(storage)):
                self.handle = observer

    # --- layout ----------------------------------------------------------------------------------

    @property
    def codes(self) -> QuantizedTensor:
        """The local part of a parameter, which must be an FP8 weight."""
        assert self.weight is not None
        return self.weight

    @property
    def plain(self) -> Tensor:
        """The local part of a parameter that is not an FP8 weight, as a plain tensor."""
        high_precision: Tensor = getattr(self.part, "high_precision", self.part)
        return high_precision

    @cached_property
    def sharded_model(self) -> Any:
        """The `fp8rs.fsdp.sharded_model.ShardedModel` of a sharded FP8 weight, or None."""
        return None if self.handle is None else self.handle.sharded_model

    @property
    def element_offsets(self) -> tuple[int, ...]:
        """The index of the first local element in the whole parameter.

        A rank with some rows of each matrix of a batch has one index per matrix.
        """
        if self.handle is None or not is_distributed(self.param):
            return (0,)
        offsets: tuple[int, ...] = self.handle.element_offsets
        return offsets

    @property
    def is_exact(self) -> bool:
        """Whether the parameter needs no master: it is neither FP8 nor a 16-bit float."""
        return self.weight is None and self.part.dtype not in (torch.bfloat16, torch.float16)

    @cached_property
    def kind(self) -> UpdateKind:
        """How a step writes the parameter."""
        weight = self.weight
        if weight is None:
            return UpdateKind.PLAIN
        # All kinds except SEPARATE write a rowwise plane and its scale only. A second plane, or
        # elements outside of a view, would keep codes of the old scale. An empty shard is a view.
        whole = weight.is_whole or not weight.numel()
        if not whole or weight._storage.has_planes != (True, False):
            return UpdateKind.SEPARATE
        if weight.format.per_tensor:
            if weight._storage.batched:  # a scale for each matrix
                return UpdateKind.SEPARATE
            if self.delayed is not None:
                return UpdateKind.KNOWN_SCALE
            # A spec with a group reduces amaxes as it quantizes.
            current = weight.spec.group is None
            return UpdateKind.CURRENT_SCALE if current else UpdateKind.SEPARATE
        # A copy of a shard has its blocks, and no handle.
        split = weight._storage.block_offset or (
            self.sharded_model is not None and self.handle.shares_scales
        )
        return (
            UpdateKind.OWN_SCALES
            if weight.format in BLOCK_SCALE_FORMATS and not split
            else UpdateKind.SEPARATE
        )

    @property
    def matrix(self) -> tuple[int, ...]:
        """The shape of an FP8 weight's local part: (rows, cols), or (E, rows, cols) for a batch."""
        batch, matrix = formats.split_batch(self.codes.shape, self.codes._storage.batched)
        return *batch, *matrix

    @cached_property
    def plane(self) -> Plane:
        """The plane of the local part, the rowwise one if it has two. It may be empty."""
        row = self.codes.rowwise
        return self.codes.any_plane() if row is None else row

    @cached_property
    def delayed(self) -> Delayed | None:
        """With delayed scaling, the next scale (0 if none yet) and the amax to raise."""
        weight = self.weight
        if weight is None or not weight.format.per_tensor:
            return None
        return weight._storage.delayed or (None if self.handle is None else self.handle.slots)

    @property
    def has_next_scale(self) -> bool:
        """With delayed scaling, whether the host knows that the next scale is not 0."""
        return bool(self.codes._storage.delayed is None and self.handle.module.fp8_ready[0])

    def like(self, part: Tensor) -> Tensor:
        """Return a tensor with this local part that is distributed like the parameter."""
        return dtensor_like(self.param, part) if is_distributed(self.param) else part

    # --- masters ---------------------------------------------------------------------------------

    def new_master(self) -> Tensor:
        """Return a float32 copy of the values, or of the initial values if they were kept."""
        kept = None if self.handle is None else self.handle.init_value
        if kept is not None:
            master = kept.detach().to(self.part.device, torch.float32, copy=True).contiguous()
        elif self.weight is not None:
            master = self.weight.dequantize(torch.float32)
        else:
            master = torch.zeros_like(self.part, dtype=torch.float32).copy_(self.part)
        return self.like(master)

    @property
    def last_write(self) -> LastWrite:
        """Identifies the last write by any code.

        For a sharded FP8 weight, its handle counts writes. Version counters are not used, because
        FSDP2 may replace the tensors. For an unsharded weight, the version counter of its planes is
        used too, because the handle does not observe direct writes to planes.
        """
        if self.weight is None:
            return bits_of(self.plain).clone(), self.param._version
        count = 0 if self.handle is None else self.handle.writes
        if is_distributed(self.param):
            return (count,)
        return count, self.weight._storage.any_plane.data._version

    def is_rounded(self, master: Tensor) -> bool:
        """Return whether a plain parameter equals its rounded master. Synchronizes with a GPU."""
        return torch.equal(master.to(self.plain.dtype), self.plain)

    def read_plain(self, master: Tensor, unread: LastWrite | None) -> None:
        """Update a master by what other code has written to its plain parameter.

        An element that equals its rounded master was not written and keeps its master.

        Args:
            master: the master of the local part, fp32.
            unread: the parameter's last write when a master that differs from it was loaded, or
                None. While the parameter was not written since, the master does not change.
        """
        part = self.plain
        # On the CPU, comparing is several times faster than selecting, and does not synchronize.
        if part.is_cpu and not is_traced(part) and self.is_rounded(master):
            return
        kept = master.to(part.dtype) == part
        if unread is not None:
            bits, version = unread
            # The version counter misses some writes, and bits miss writes of equal values.
            kept |= (bits_of(part) == bits).all() & (version == self.param._version)
        values = part.float() if part.dtype == torch.float64 else part  # others are promoted
        torch.where(kept, master, values, out=master)

    def read_codes(self, master: Tensor, stochastically: bool, written: Tensor | None) -> None:
        """Update a master by what other code has written to its FP8 weight.

        An element whose master rounds to its code was not written and keeps its master.

        Args:
            master: the master of the local part, fp32.
            stochastically: whether the optimizer rounds codes stochastically.
            written: with delayed scaling, the scale that the optimizer last wrote codes with. While
                the weight has this scale, the largest code also stands for all larger values. With
                another scale, it stands only for values that round to it.
        """
        weight = self.codes
        if not weight.numel():
            return
        values = master.view(self.matrix)
        if written is not None and self.delayed is not None:
            scale = self.plane.scale
            # Values of a full state dict were rounded to the model's dtype, which also rounds the
            # scale.
            unchanged = torch.isclose(scale, written, rtol=2.0**-8, atol=0.0)
            most = scale * (1.01 * FP8_MAX[weight.fp8_dtype])  # rounds to the largest code
            values = torch.where(unchanged, values.clamp(-most, most), values)
        unwritten = rounds_to_codes(weight.planes, values, stochastically)
        torch.where(
            unwritten.reshape(master.shape), master, weight.dequantize(torch.float32), out=master
        )

    # --- codes -----------------------------------------------------------------------------------

    def round_(self, values: Tensor, seed: int, stream: int, step: Tensor) -> None:
        """Write the codes again, rounded stochastically at the weight's current scales.

        Args:
            values: the written values of the local part, fp32.
            seed: selects the random numbers, together with ``stream``, ``step`` and each element's
                index in the whole weight; 64 bits.
            stream: the number of the whole weight; 32 bits.
            step: the number of the optimizer's step; float32, one element, an integer.
        """
        weight = self.codes
        if not weight.numel():
            return
        values, offsets = values.view(self.matrix), self.element_offsets
        # The numbers that `adamw_` rounds these elements with.
        numbers = torch.empty(self.matrix, dtype=torch.float32, device=values.device)
        parts = numbers if len(offsets) > 1 else numbers.unsqueeze(0)
        for part, offset in zip(parts, offsets, strict=True):
            _random_uniform(part, seed, offset, 0.0, 1.0, stream, step)
        row, col = weight.planes
        if row is not None:
            row.matrix.copy_(stochastic_round(row, values, numbers))
        if col is not None:
            col.matrix.copy_(stochastic_round(col, values.mT, numbers.mT))


def bits_of(x: Tensor) -> Tensor:
    """View a floating-point tensor as integers, so that NaNs with equal bits are equal."""
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
