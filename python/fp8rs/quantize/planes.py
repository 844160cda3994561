"""Planes: FP8 codes with their scales, which quantized tensors are made of.

A tensor of three or more dimensions is one matrix, whose leading dimensions are rows, or a batch of
matrices. An activation is one matrix. A batched weight (E, N, K) is E matrices, and its scales have
the batch dimension in front. The shape of the scales therefore says which of the two a plane is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from fp8rs import ops  # noqa: F401  (registers torch.ops.fp8rs)
from fp8rs.quantize import formats
from fp8rs.quantize.formats import BlockFormat, split_batch

#: A part of a matrix (rows, columns), or of a batch of matrices (matrices, rows, columns).
Box = tuple[slice, ...]

_T = TypeVar("_T")

_dequantize = torch.ops.fp8rs.dequantize.default
_transpose = torch.ops.fp8rs.transpose.default


@dataclass(slots=True, eq=False)
class Plane:
    """FP8 codes with their scales: ``data * scale`` is the value.

    Args:
        data: codes, torch.float8_e4m3fn or torch.float8_e5m2. Leading dimensions are rows of one
            matrix, except that the first dimension of a batch is the batch dimension.
        scale: one element for each block, of shape ``format.scale_shape(rows, cols)`` for one
            matrix and ``format.scale_shape(rows, cols, (batch,))`` for a batch.
        format: block shape and scale dtype.
        block_offset: number of rows and columns by which the first blocks begin before the data,
            for a shard that begins within a block. The shape of ``scale`` includes them.
    """

    data: Tensor
    scale: Tensor
    format: BlockFormat = formats.TENSOR
    block_offset: tuple[int, int] = (0, 0)

    @property
    def batched(self) -> bool:
        """Whether this is a batch of matrices, each with scales of its own."""
        scale_dims = 1 if self.format.per_tensor else 3
        return self.data.dim() > 2 and self.scale.dim() == scale_dims

    @property
    def matrix(self) -> Tensor:
        """The codes as (rows, cols), or as (batch, rows, cols)."""
        data = self.data
        dims = data.dim()
        if dims == 2:
            return data
        return data.view(1, -1) if dims < 2 else data.flatten(int(self.batched), -2)

    def __getitem__(self, index: slice | int) -> Plane:
        """Return some matrices of a batch, or one of them, over the same memory."""
        return Plane(self.data[index], self.scale[index], self.format, self.block_offset)

    def part(self, box: Box) -> Plane:
        """Return a part of the matrix or matrices over the same memory.

        The part may begin within a block.
        """
        batch, matrix = split_batch(self.data.shape, self.batched)
        shape = (*batch, *matrix)
        if all(span == slice(0, n) for span, n in zip(box, shape, strict=True)):
            return self
        # A reshape could copy, and a write to the part would be lost.
        codes = self.data.view(shape)[box]
        matrices = box[:-2]
        if self.format.per_tensor:
            scale = self.scale[matrices] if matrices else self.scale
            return Plane(codes, scale, self.format)
        block_rows, block_cols = self.format.block
        rows, row_offset = _blocks_of(box[-2], block_rows, self.block_offset[0])
        cols, col_offset = _blocks_of(box[-1], block_cols, self.block_offset[1])
        blocks = (*matrices, rows, cols)
        return Plane(codes, self.scale[blocks], self.format, (row_offset, col_offset))

    def map(
        self, fn: Callable[[Tensor], Tensor], scale: Callable[[Tensor], Tensor] | None = None
    ) -> Plane:
        """Return a plane of ``fn(data)`` and ``scale(scale)``, by default ``fn(scale)``."""
        return Plane(fn(self.data), (scale or fn)(self.scale), self.format, self.block_offset)

    def transposed(self, name: str, operation: str, after: Tensor | None = None) -> Plane:
        """Return the plane of the transposed matrix or matrices, as a new contiguous tensor.

        Args:
            name: the plane that the result is, "rowwise" or "columnwise", for the error message.
            operation: the operation that needs the plane, for the error message.
            after: a tensor that compiled code computes before this.

        Raises:
            ValueError: the format's blocks are not square, so the codes would differ.
        """
        if not self.format.square:
            other = "rowwise" if name == "columnwise" else "columnwise"
            raise ValueError(
                f"{operation} needs the {name} plane, which this tensor does not have, and which "
                f"the {other} plane does not give: the blocks of format {self.format.name!r} are "
                f"not square. Quantize with {name}=True"
            )
        scale = self.scale if self.format.per_tensor else self.scale.mT.contiguous()
        codes = _transpose(self.data, after, self.batched)
        return Plane(codes, scale, self.format, self.block_offset[::-1])

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Return ``data * scale`` in fp32, cast once to ``dtype``, in the shape of ``data``."""
        data = self.data
        batched = self.batched
        block = list(self.format.block)
        if self.block_offset == (0, 0):
            return cast(Tensor, _dequantize(data, self.scale, block, dtype, batched))

        # Pad the codes to whole blocks.
        block_row_offset, block_col_offset = self.block_offset
        codes = functional.pad(
            self.matrix.view(torch.uint8), (block_col_offset, 0, block_row_offset, 0)
        )
        padded = _dequantize(codes.view(data.dtype), self.scale, block, dtype, batched)
        # A view would keep the padded matrix alive.
        values = padded[..., block_row_offset:, block_col_offset:].clone(
            memory_format=torch.contiguous_format
        )
        return cast(Tensor, values.view(data.shape))

    def with_columns(self, more: int) -> Plane:
        """Return the plane of one matrix, padded with ``more`` columns of zeros."""
        codes = functional.pad(self.data.view(torch.uint8), (0, more))
        scale = self.scale
        if not self.format.per_tensor:
            rows, cols = codes.shape
            more_blocks = self.format.scale_shape(rows, cols)[1] - scale.shape[1]
            scale = functional.pad(as_bytes(scale), (0, more_blocks), value=1).view(scale.dtype)
        return Plane(codes.view(self.data.dtype), scale, self.format)

    def first_rows(self, rows: int) -> Plane:
        """Return the first rows of a 2-D plane over the same memory.

        Unlike `part`, this supports unbacked symbolic sizes.
        """
        codes = self.data.narrow(0, 0, rows)
        scale = self.scale
        if not self.format.per_tensor:
            scale = scale.narrow(0, 0, self.format.scale_shape(*codes.shape)[0])
        return Plane(codes, scale, self.format)

    def expand_scale(self) -> Tensor:
        """Return the scale of each element, fp32, in a shape that broadcasts to `matrix`."""
        scale = self.scale.to(torch.float32)
        if self.format.per_tensor:
            return scale.view(-1, 1, 1) if self.batched else scale
        for dim, block, offset in zip((-2, -1), self.format.block, self.block_offset, strict=True):
            if block > 1:
                length = self.matrix.shape[dim]
                scale = scale.repeat_interleave(block, dim).narrow(dim, offset, length)
        return scale

    @property
    def has_memory(self) -> bool:
        """Whether the codes' storage has not been freed, as FSDP does when it reshards."""
        data = self.data
        return data.untyped_storage().nbytes() != 0 or data.numel() == 0

    def check_has_memory(self, description: str) -> None:
        """Raise RuntimeError if the codes' storage was freed. The message has the description."""
        if not self.has_memory:
            raise RuntimeError(
                f"{description} has no storage: FSDP freed the gathered weight when it resharded. "
                "Read it between the module's pre-forward and its reshard, or call unshard() first"
            )


def _blocks_of(span: slice, block: int, offset: int) -> tuple[slice, int]:
    """Return the blocks along a dimension that have elements of a part.

    Args:
        span: the elements of the part.
        block: the size of a block. -1 is the whole extent.
        offset: the number of elements by which the first block begins before the data.

    Returns:
        The blocks, and the number of elements by which the first one begins before the part.
    """
    if block == -1:
        return slice(0, 1), 0
    if span.start == span.stop:
        return slice(0, 0), 0
    start = span.start + offset
    stop = span.stop + offset
    return slice(start // block, -(-stop // block)), start % block


#: The rowwise and the columnwise plane of one tensor.
Planes = tuple[Plane | None, Plane | None]


def transpose_dims(dims: tuple[_T, ...]) -> tuple[_T, ...]:
    """Swap the last two dimensions or slices, as a transpose of each matrix does."""
    return *dims[:-2], dims[-1], dims[-2]


def as_bytes(tensor: Tensor) -> Tensor:
    """View codes and E8M0 scales as uint8, which all operators support. Return fp32 unchanged."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def zeros(like: Tensor, size: Sequence[int], device: torch.device | str | None = None) -> Tensor:
    """Return zeros in the dtype of ``like``, from bytes: not all devices fill E8M0 tensors."""
    device = like.device if device is None else device
    raw = torch.zeros([*size, like.itemsize], dtype=torch.uint8, device=device)
    return raw.view(like.dtype).squeeze(-1)


def check_planes(rowwise: Plane | None, columnwise: Plane | None, shape: torch.Size) -> None:
    """Raise TypeError or ValueError if these are not planes of a tensor of ``shape``.

    Nothing is read from the device.
    """
    for name, plane in (("rowwise", rowwise), ("columnwise", columnwise)):
        if plane is None:
            continue
        data = plane.data
        scale = plane.scale
        format = plane.format
        batch, matrix = split_batch(shape, (rowwise or plane).batched)
        data_shape: tuple[int, ...] = shape
        if name == "columnwise":
            matrix = matrix[::-1]
            data_shape = (*batch, *matrix)
        if data.shape != data_shape:
            raise ValueError(
                f"{name} has data of shape {tuple(data.shape)}, but a tensor of shape "
                f"{tuple(shape)} needs {tuple(data_shape)}"
            )
        formats.check_fp8_dtype(data.dtype, f"{name}.data.dtype")

        if scale.dtype != format.scale_dtype:
            raise TypeError(
                f"{name} is in format {format.name!r}, which has scales of "
                f"{format.scale_dtype}, not {scale.dtype}"
            )
        rows = matrix[0] + plane.block_offset[0]
        cols = matrix[1] + plane.block_offset[1]
        expected = format.scale_shape(rows, cols, batch)
        if scale.shape != expected:
            raise ValueError(
                f"{name} has scales of shape {tuple(scale.shape)}, but codes of shape "
                f"{(*batch, *matrix)} in format {format.name!r} need {expected}"
            )
