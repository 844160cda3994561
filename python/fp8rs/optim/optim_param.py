"""One parameter of an optimizer, FP8 or plain, sharded or not.

Only `OptimParam` depends on how a parameter is distributed and where its codes are stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from fp8rs._torch import dtensor_like, is_distributed, is_traced, own_part
from fp8rs.quantize import formats
from fp8rs.quantize.formats import FP8_MAX
from fp8rs.quantize.planes import Plane
from fp8rs.tensor.plane_storage import Delayed
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.rounding import rounds_to_codes, stochastic_round

if TYPE_CHECKING:  # fsdp imports torch.distributed.tensor, which takes seconds
    from fp8rs.fsdp.float8_shard import Float8ParamHandle
    from fp8rs.fsdp.sharded_model import ShardedModel
    from fp8rs.nn.fp8_params import Float8Params

_random_uniform = torch.ops.fp8rs.random_uniform_.default

#: Integer dtypes by their size in bytes.
_INTEGER_DTYPES = {2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Formats whose scales ``adamw_`` computes in the pass that writes the codes.
BLOCK_SCALE_FORMATS = (formats.ROW, formats.BLOCK_128X128, formats.MX_32X32)


class UpdateKind(Enum):
    """How a step writes a parameter. All ranks that have a part of it choose the same kind."""

    PLAIN = auto()  #: not an FP8 weight
    DELAYED_SCALE = auto()  #: one scale, which delayed scaling computed before the step
    CURRENT_SCALE = auto()  #: one scale, from the maximum of the new values
    BLOCK_SCALES = auto()  #: a scale per row or block, computed in the same pass as the codes
    SEPARATE = auto()  #: quantized after the step


@dataclass(frozen=True, slots=True)
class Float8Write:
    """Identifies the last write to an FP8 weight.

    Attributes:
        writes: the number of writes that the weight's handle has counted.
        version: the version counter of the codes. None for a sharded weight, whose tensors FSDP2
            may replace.
    """

    writes: int
    version: int | None


@dataclass(eq=False, slots=True)
class PlainWrite:
    """Identifies the last write to a plain parameter.

    Attributes:
        bits: a copy of the local part, as integers.
        version: the version counter of the parameter.
    """

    bits: Tensor
    version: int


LastWrite = Float8Write | PlainWrite


class OptimParam:
    """A parameter at one step. FSDP2 may replace the local tensors between steps.

    Args:
        param: the parameter in the optimizer's group.

    Attributes:
        local: its local part.
        weight: the local part of an FP8 weight, else None.
        handle: the handle of a layer's FP8 weight, else None. A copy of the weight has none.
    """

    def __init__(self, param: Tensor) -> None:
        self.param = param
        self.local: Tensor = own_part(param)
        self.weight: QuantizedTensor | None = None
        self.handle: Float8ParamHandle | None = None
        if not isinstance(self.local, QuantizedTensor):
            return

        self.weight = self.local
        storage = self.local._storage
        handle: Any = storage.observer
        if handle is None:
            return  # no module has this weight

        # A copy of a module's weight refers to the same handle, which observes the weight alone. If
        # a parametrization has moved the weight to another name, the handle observes nothing.
        if not handle.has_parameter or handle.observes(storage):
            self.handle = handle

    # --- layout ----------------------------------------------------------------------------------

    @property
    def fp8_weight(self) -> QuantizedTensor:
        """The local part of a parameter that must be an FP8 weight."""
        assert self.weight is not None
        return self.weight

    @property
    def plain(self) -> Tensor:
        """The local part of a parameter that is not an FP8 weight, as a plain tensor."""
        high_precision: Tensor = getattr(self.local, "high_precision", self.local)
        return high_precision

    @cached_property
    def sharded_model(self) -> ShardedModel | None:
        """The sharded model that an FP8 weight belongs to. None if the weight is not sharded."""
        if self.handle is None:
            return None
        sharded_model: ShardedModel | None = self.handle.sharded_model
        return sharded_model

    @property
    def element_offsets(self) -> tuple[int, ...]:
        """The number of the first local element: see `ShardSpec.element_offsets`.

        A rank with some rows of each matrix of a batch has one number per matrix.
        """
        if self.handle is None or not is_distributed(self.param):
            return (0,)
        return self.handle.element_offsets

    @property
    def needs_master(self) -> bool:
        """Whether steps of the parameter would lose digits: it is FP8 or a 16-bit float."""
        return self.weight is not None or self.local.dtype in (torch.bfloat16, torch.float16)

    @cached_property
    def kind(self) -> UpdateKind:
        """How a step writes the parameter."""
        weight = self.weight
        if weight is None:
            return UpdateKind.PLAIN
        # All kinds except SEPARATE write a rowwise plane and its scale only. A second plane, or
        # elements outside of a view, would keep codes of the old scale. An empty shard is a view.
        has_all_elements = weight.is_whole or not weight.numel()
        if not has_all_elements or weight._storage.has_planes != (True, False):
            return UpdateKind.SEPARATE

        if weight.format.per_tensor:
            if weight._storage.batched:  # a scale for each matrix
                return UpdateKind.SEPARATE
            if self.delayed is not None:
                return UpdateKind.DELAYED_SCALE
            if weight.spec.group is not None:  # quantizing reduces amaxes over the group
                return UpdateKind.SEPARATE
            return UpdateKind.CURRENT_SCALE

        if weight.format not in BLOCK_SCALE_FORMATS:
            return UpdateKind.SEPARATE
        # A cloned shard keeps its block offset but has no handle, so check the storage too.
        if weight._storage.block_offset:
            return UpdateKind.SEPARATE
        if self.sharded_model is not None and self.handle is not None and self.handle.shares_scales:
            return UpdateKind.SEPARATE
        return UpdateKind.BLOCK_SCALES

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """The shape of an FP8 weight's local part: (rows, cols), or (E, rows, cols) for a batch."""
        batch, matrix = formats.split_batch(self.fp8_weight.shape, self.fp8_weight._storage.batched)
        return *batch, *matrix

    @cached_property
    def plane(self) -> Plane:
        """The plane of the local part, the rowwise one if it has two. It may be empty."""
        row = self.fp8_weight.rowwise
        return self.fp8_weight.any_plane() if row is None else row

    @cached_property
    def delayed(self) -> Delayed | None:
        """With delayed scaling, the next scale (0 if none yet) and the amax to raise."""
        weight = self.weight
        if weight is None or not weight.format.per_tensor:
            return None
        if weight._storage.delayed:
            return weight._storage.delayed
        return None if self.handle is None else self.handle.slots

    @property
    def has_next_scale(self) -> bool:
        """With delayed scaling, whether the host knows that the next scale is not 0."""
        if self.handle is None or self.fp8_weight._storage.delayed is not None:
            return False
        module = cast("Float8Params", self.handle.module)
        return module.fp8_ready[0]  # of the weight

    def like(self, local: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
        """Return a tensor with this local part that is distributed like the parameter.

        Args:
            local: the local part.
            shape: the whole shape, of a contiguous tensor. The default is the parameter's.
        """
        return dtensor_like(self.param, local, shape) if is_distributed(self.param) else local

    # --- masters ---------------------------------------------------------------------------------

    def new_master(self) -> Tensor:
        """Return a float32 copy of the values, or of the initial values if the handle has them."""
        init_value = None if self.handle is None else self.handle.init_value
        if init_value is not None:
            master = init_value.detach().to(self.local.device, torch.float32, copy=True)
            master = master.contiguous()
        elif self.weight is not None:
            master = self.weight.dequantize(torch.float32)
        else:
            master = torch.zeros_like(self.local, dtype=torch.float32).copy_(self.local)
        return self.like(master)

    @property
    def last_write(self) -> LastWrite:
        """A value that identifies the last write by any code.

        For a sharded FP8 weight, its handle counts writes. Version counters are not used, because
        FSDP2 may replace the tensors. For an unsharded weight, the version counter of its planes is
        used too, because the handle does not observe direct writes to planes.
        """
        if self.weight is None:
            return PlainWrite(bits_of(self.plain).clone(), self.param._version)
        writes = 0 if self.handle is None else self.handle.writes
        if is_distributed(self.param):
            return Float8Write(writes, None)
        return Float8Write(writes, self.weight._storage.any_plane.data._version)

    def is_rounded(self, master: Tensor) -> bool:
        """Return whether a plain parameter equals its rounded master. Synchronizes with a GPU."""
        return torch.equal(master.to(self.plain.dtype), self.plain)

    def read_plain(self, master: Tensor, write_at_load: PlainWrite | None) -> None:
        """Update a master by what other code has written to its plain parameter.

        An element that equals its rounded master was not written and keeps its master.

        Args:
            master: the master of the local part, fp32.
            write_at_load: the parameter's last write when a master that differs from it was loaded,
                or None. While the parameter was not written since, the master does not change.
        """
        values = self.plain
        # On the CPU, comparing is several times faster than selecting, and does not synchronize.
        if values.is_cpu and not is_traced(values) and self.is_rounded(master):
            return
        unwritten = master.to(values.dtype) == values
        if write_at_load is not None:
            # The version counter misses some writes, and bits miss writes of equal values.
            same_bits = (bits_of(values) == write_at_load.bits).all()
            unwritten |= same_bits & (write_at_load.version == self.param._version)
        if values.dtype == torch.float64:  # other dtypes are promoted
            values = values.float()
        torch.where(unwritten, master, values, out=master)

    def read_codes(self, master: Tensor, stochastic: bool, optimizer_scale: Tensor | None) -> None:
        """Update a master by what other code has written to its FP8 weight.

        An element whose master rounds to its code was not written and keeps its master.

        Args:
            master: the master of the local part, fp32.
            stochastic: whether the optimizer rounds codes stochastically.
            optimizer_scale: with delayed scaling, the scale that the optimizer last wrote codes
                with. While the weight has this scale, the largest code also stands for all larger
                values. With another scale, it stands only for values that round to it.
        """
        weight = self.fp8_weight
        if not weight.numel():
            return
        values = master.view(self.matrix_shape)
        if optimizer_scale is not None and self.delayed is not None:
            scale = self.plane.scale
            # Values of a full state dict were rounded to the model's dtype, which also rounds the
            # scale.
            scale_unchanged = torch.isclose(scale, optimizer_scale, rtol=2.0**-8, atol=0.0)
            largest = scale * (1.01 * FP8_MAX[weight.fp8_dtype])  # rounds to the largest code
            saturated = values.clamp(-largest, largest)
            values = torch.where(scale_unchanged, saturated, values)
        unwritten = rounds_to_codes(weight.planes, values, stochastic)
        unwritten = unwritten.reshape(master.shape)
        torch.where(unwritten, master, weight.dequantize(torch.float32), out=master)

    # --- codes -----------------------------------------------------------------------------------

    def round_(self, values: Tensor, seed: int, stream: int, step: Tensor) -> None:
        """Write the codes again, rounded stochastically at the weight's current scales.

        Args:
            values: the written values of the local part, fp32.
            seed: selects the random numbers, together with ``stream``, ``step`` and each element's
                number in the whole weight; 64 bits.
            stream: the number of the whole weight; 32 bits.
            step: the number of the optimizer's step; float32, one element, an integer.
        """
        weight = self.fp8_weight
        if not weight.numel():
            return
        values = values.view(self.matrix_shape)

        # The random numbers that `adamw_` rounds these elements with. All elements are numbered
        # from one offset on, or those of each matrix from an offset of its own.
        numbers = torch.empty(self.matrix_shape, dtype=torch.float32, device=values.device)
        offsets = self.element_offsets
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
    return x.view(_INTEGER_DTYPES[x.element_size()])
