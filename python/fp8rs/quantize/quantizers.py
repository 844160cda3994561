"""Quantizers: objects that turn high-precision tensors into planes of one format.

A quantizer knows the element type, the format, where scales come from, and which planes its user
wants. It is callable; :meth:`Quantizer.planes` is the same without a tensor subclass around the
result, which is what linear layers use for activations and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rs.quantize.recipes import Recipe, Role
from fp8rs.tensor import formats
from fp8rs.tensor.formats import BlockFormat, check_fp8_dtype, matrix_shape
from fp8rs.tensor.quantized import Plane, QuantizedTensor, wrap_planes

_amax = torch.ops.fp8rs.amax.default
_quantize = torch.ops.fp8rs.quantize.default
_quantize_blocks = torch.ops.fp8rs.quantize_blocks.default
_quantize_current = torch.ops.fp8rs.quantize_current.default
_quantize_delayed = torch.ops.fp8rs.quantize_delayed.default
_scale_from_amax = torch.ops.fp8rs.scale_from_amax.default

Planes = tuple[Plane | None, Plane | None]


def reduce_amax_(amax: Tensor, group: Any = None) -> Tensor:
    """Maximum of ``amax`` (fp32) over the ranks of ``group``, in place.

    The bits are reduced as int32: amaxes are not negative, so the order is the same, and NaN and
    Inf reach every rank (a float MAX drops NaN on some of them).
    """
    dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=group)
    return amax


class Quantizer:
    """Base of all quantizers.

    Args:
        fp8_dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise plane.
        columnwise: make the columnwise plane.
    """

    format: BlockFormat = formats.TENSOR

    def __init__(
        self, fp8_dtype: torch.dtype, *, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        self.fp8_dtype = check_fp8_dtype(fp8_dtype)
        self.rowwise = True
        self.columnwise = True
        self.set_usage(rowwise=rowwise, columnwise=columnwise)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose the planes that later calls make; None leaves a choice as it is.

        Raises:
            ValueError: no plane would be made.
        """
        row = self.rowwise if rowwise is None else bool(rowwise)
        col = self.columnwise if columnwise is None else bool(columnwise)
        if not row and not col:
            raise ValueError("rowwise and columnwise are both False: one plane must be made")
        self.rowwise, self.columnwise = row, col

    def planes(self, x: Tensor, rowwise: bool, columnwise: bool) -> Planes:
        """The planes of ``x`` (fp32, bf16 or fp16; any strides), None for one not asked for."""
        raise NotImplementedError

    def planes_again(self, x: Tensor, scale: Tensor, rowwise: bool, columnwise: bool) -> Planes:
        """The planes of an ``x`` that :meth:`planes` has been given, which made ``scale`` of it.

        For what is kept in high precision anyway: its planes need not be kept too.
        """
        raise NotImplementedError

    @torch.no_grad()
    def __call__(self, x: Tensor) -> QuantizedTensor:
        """Quantize ``x``: a new tensor of the same shape and logical dtype, outside autograd."""
        x = _source(x, "x")
        row, col = self.planes(x, self.rowwise, self.columnwise)
        return wrap_planes(row, col, shape=x.shape, dtype=x.dtype, quantizer=self)

    @torch.no_grad()
    def update_quantized(self, src: Tensor, dst: QuantizedTensor) -> QuantizedTensor:
        """Quantize ``src`` into the planes that ``dst`` has, scales included; returns ``dst``.

        Where ``dst`` is a view that shares its scales with other elements, all of them are
        quantized again, with those of the view replaced.

        Raises:
            TypeError: ``dst`` is not quantized.
            ValueError: shapes, element types or formats differ.
        """
        if not isinstance(dst, QuantizedTensor):
            raise TypeError(f"dst must be a QuantizedTensor, not {type(dst).__name__}")
        src = _source(src, "src")
        if src.shape != dst.shape:
            raise ValueError(f"src has shape {tuple(src.shape)}, but dst has {tuple(dst.shape)}")
        plane = dst.any_plane()
        if plane.data.dtype != self.fp8_dtype or plane.format != self.format:
            raise ValueError(
                f"dst has {plane.data.dtype} in format {plane.format.name!r}, but the quantizer "
                f"makes {self.fp8_dtype} in format {self.format.name!r}"
            )
        if src.device != dst.device:
            raise ValueError(f"src is on {src.device}, but dst is on {dst.device}")
        part = dst._part
        if part is not None:
            if part.everything:
                values = torch.empty(part.whole.shape, dtype=src.dtype, device=src.device)
            else:
                values = part.whole.dequantize(torch.float32)
            part.take(values).copy_(src)
            self.update_quantized(values, part.whole)
            dst.follow_whole()
            return dst
        made = self.planes(src, dst.rowwise is not None, dst.columnwise is not None)
        for new, old in zip(made, (dst.rowwise, dst.columnwise), strict=True):
            if new is not None and old is not None:
                old.data.copy_(new.data)
                old.scale.copy_(new.scale)
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """A tensor with this quantizer's planes, codes uninitialised and scales 1."""
        shape = torch.Size(shape)
        rows, cols = matrix_shape(shape)

        def plane(data_shape: Iterable[int], rows: int, cols: int) -> Plane:
            data = torch.empty(tuple(data_shape), dtype=self.fp8_dtype, device=device)
            scale_shape = self.format.scale_shape(rows, cols)
            scale = torch.ones(scale_shape, dtype=torch.float32, device=device)
            return Plane(data, scale.to(self.format.scale_dtype), self.format)

        row = plane(shape, rows, cols) if self.rowwise else None
        col = plane((cols, rows), cols, rows) if self.columnwise else None
        return wrap_planes(
            row,
            col,
            shape=shape,
            dtype=dtype,
            requires_grad=requires_grad,
            quantizer=self,
        )

    def copy(self) -> Quantizer:
        """A quantizer with the same settings whose usage can be changed on its own.

        Tensors that scales are read from or amaxes written to stay shared.
        """
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __repr__(self) -> str:
        planes = [n for n in ("rowwise", "columnwise") if getattr(self, n)]
        return f"{type(self).__name__}({self.fp8_dtype}, planes={planes})"


def _source(x: Tensor, name: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(x).__name__}")
    if isinstance(x, QuantizedTensor):
        return x.dequantize()
    if x.dtype not in formats.INPUT_DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, not {x.dtype}")
    return x.detach()


class _TensorQuantizer(Quantizer):
    """Per tensor: once the scale is known, it alone determines the codes."""

    def planes_again(self, x: Tensor, scale: Tensor, rowwise: bool, columnwise: bool) -> Planes:
        row, col = _quantize(x, scale, self.fp8_dtype, rowwise, columnwise)
        return _plane_pair(row, col, scale, rowwise, columnwise)


def _plane_pair(row: Tensor, col: Tensor, scale: Tensor, rowwise: bool, columnwise: bool) -> Planes:
    return (
        Plane(row, scale) if rowwise else None,
        Plane(col, scale) if columnwise else None,
    )


class Float8Quantizer(_TensorQuantizer):
    """Per tensor, with a scale that is known: delayed scaling.

    Args:
        scale: fp32 tensor of one element; read at every call, never written.
        amax: fp32 tensor of one element; its maximum with the amax of each finite quantized
            tensor is written back. A tensor with NaN or Inf leaves it and gets the scale NaN.
        fp8_dtype, rowwise, columnwise: as in :class:`Quantizer`.
    """

    def __init__(
        self,
        scale: Tensor,
        amax: Tensor,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.scale = _single(scale, "scale")
        self.amax = _single(amax, "amax")

    def planes(self, x: Tensor, rowwise: bool, columnwise: bool) -> Planes:
        row, col, scale = _quantize_delayed(
            x, self.scale, self.amax, self.fp8_dtype, rowwise, columnwise
        )
        return _plane_pair(row, col, scale, rowwise, columnwise)


def _single(t: Tensor, name: str) -> Tensor:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(t).__name__}")
    if t.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, not {t.dtype}")
    if t.numel() != 1:
        raise ValueError(f"{name} must have one element, not shape {tuple(t.shape)}")
    return t.view(())


class Float8CurrentScalingQuantizer(_TensorQuantizer):
    """Per tensor, with a scale from the tensor's own amax.

    Args:
        fp8_dtype, rowwise, columnwise: as in :class:`Quantizer`.
        amax_reduction_group: process group over whose ranks the amax is reduced; None is no
            group. With a group, every rank of it must quantize at the same point.
        power_2_scale: round the scale up to a power of two.
        amax_epsilon: lower bound of the amax.
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_reduction_group: Any = None,
        power_2_scale: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.amax_reduction_group = amax_reduction_group
        self.power_2_scale = power_2_scale
        self.amax_epsilon = amax_epsilon

    def planes(self, x: Tensor, rowwise: bool, columnwise: bool) -> Planes:
        if self.amax_reduction_group is None:
            row, col, scale = _quantize_current(
                x,
                self.fp8_dtype,
                rowwise,
                columnwise,
                self.power_2_scale,
                self.amax_epsilon,
            )
        else:
            amax = reduce_amax_(_amax(x), self.amax_reduction_group)
            scale = _scale_from_amax(amax, self.fp8_dtype, self.power_2_scale, self.amax_epsilon)
            row, col = _quantize(x, scale, self.fp8_dtype, rowwise, columnwise)
        return _plane_pair(row, col, scale, rowwise, columnwise)

    def __getstate__(self) -> dict[str, Any]:
        # Process groups do not pickle, and another process has others.
        return {**self.__dict__, "amax_reduction_group": None}


class BlockQuantizer(Quantizer):
    """Scales per block, from the data alone."""

    def planes(
        self, x: Tensor, rowwise: bool, columnwise: bool, fold: Tensor | None = None
    ) -> Planes:
        """As :meth:`Quantizer.planes`.

        Args:
            fold: (columns of ``x``,) fp32 factors of what goes into the rowwise plane, and only
                that; for blocks of a whole row.
        """
        row, row_scale, col, col_scale = _quantize_blocks(
            x,
            self.fp8_dtype,
            list(self.format.block),
            self.format.scale_dtype,
            rowwise,
            columnwise,
            fold=fold,
            **self.options(),
        )
        return (
            Plane(row, row_scale, self.format) if rowwise else None,
            Plane(col, col_scale, self.format) if columnwise else None,
        )

    def planes_again(self, x: Tensor, scale: Tensor, rowwise: bool, columnwise: bool) -> Planes:
        return self.planes(x, rowwise, columnwise)

    def options(self) -> dict[str, Any]:
        """How scales come from amaxes: keyword arguments of ``torch.ops.fp8rs.quantize_blocks``."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, block={self.format.block})"


class Float8BlockQuantizer(BlockQuantizer):
    """One fp32 scale a block, from the block's own amax.

    Args:
        fp8_dtype, rowwise, columnwise: as in :class:`Quantizer`.
        block: (1, 128), (128, 128), or (1, -1) for whole rows. Columnwise planes are cut in
            blocks of that shape too, in the transposed matrix that they hold.
        power_2_scale: round scales up to powers of two.
        amax_epsilon: lower bound of the amaxes.
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        block: tuple[int, int] = (1, 128),
        power_2_scale: bool = False,
        amax_epsilon: float = 0.0,
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.format = formats.format_of(block, torch.float32)
        self.power_2_scale = power_2_scale
        self.amax_epsilon = amax_epsilon

    def options(self) -> dict[str, Any]:
        return {"power_2_scale": self.power_2_scale, "amax_epsilon": self.amax_epsilon}


class MXFP8Quantizer(BlockQuantizer):
    """MXFP8: one power-of-two E8M0 scale for each block of 32 or of 32 by 32.

    Args:
        fp8_dtype, rowwise, columnwise: as in :class:`Quantizer`.
        block: (1, 32) or (32, 32).
        scale_rounding: "ceil", with which no element saturates, or "floor", the OCP rule.
    """

    def __init__(
        self,
        fp8_dtype: torch.dtype,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        block: tuple[int, int] = (1, 32),
        scale_rounding: str = "ceil",
    ) -> None:
        super().__init__(fp8_dtype, rowwise=rowwise, columnwise=columnwise)
        self.format = formats.format_of(block, torch.float8_e8m0fnu)
        if scale_rounding not in ("ceil", "floor"):
            raise ValueError(f'scale_rounding must be "ceil" or "floor", not {scale_rounding!r}')
        self.scale_rounding = scale_rounding

    def options(self) -> dict[str, Any]:
        return {"rounding": self.scale_rounding}


def _make_blocks(block: tuple[int, int]) -> Callable[[torch.dtype, Any, Recipe], Quantizer]:
    return lambda fp8_dtype, group, recipe: Float8BlockQuantizer(
        fp8_dtype,
        block=block,
        # A recipe whose own scales are E8M0 has powers of two wherever it goes.
        power_2_scale=recipe.power_2_scale or recipe.block_format("weight").microscaled,
        amax_epsilon=recipe.amax_epsilon,
    )


def _make_mx(block: tuple[int, int]) -> Callable[[torch.dtype, Any, Recipe], Quantizer]:
    return lambda fp8_dtype, group, recipe: MXFP8Quantizer(
        fp8_dtype, block=block, scale_rounding=getattr(recipe, "scale_rounding", "ceil")
    )


#: Format -> the quantizer that makes it with scales from the data, of (fp8_dtype, group, options
#: that the recipe has). A new format is a row.
MAKERS: dict[BlockFormat, Callable[[torch.dtype, Any, Recipe], Quantizer]] = {
    formats.TENSOR: lambda fp8_dtype, group, recipe: Float8CurrentScalingQuantizer(
        fp8_dtype,
        amax_reduction_group=group,
        power_2_scale=recipe.power_2_scale,
        amax_epsilon=recipe.amax_epsilon,
    ),
    **{f: _make_blocks(f.block) for f in (formats.ROW, formats.BLOCK_1X128, formats.BLOCK_128X128)},
    **{f: _make_mx(f.block) for f in (formats.MX_1X32, formats.MX_32X32)},
}


def quantizer_for(
    recipe: Recipe,
    role: Role,
    amax_reduction_group: Any = None,
    format: BlockFormat | None = None,
) -> Quantizer:
    """The quantizer of a recipe's operand, with scales from the data.

    Args:
        recipe: whose options are taken.
        role: the operand.
        amax_reduction_group: over which per-tensor amaxes are reduced.
        format: the one to quantize in, if not the recipe's own.
    """
    make = MAKERS[recipe.block_format(role) if format is None else format]
    return make(recipe.fp8_dtype(role), amax_reduction_group, recipe)


def quantizer_like(t: QuantizedTensor) -> Quantizer:
    """A quantizer that makes planes such as ``t`` has, with scales from the data."""
    plane = t.any_plane()
    quantizer = MAKERS[plane.format](plane.data.dtype, None, Recipe())
    quantizer.set_usage(rowwise=t.rowwise is not None, columnwise=t.columnwise is not None)
    return quantizer


# Quantized tensors carry their quantizer, and torch.load(weights_only=True) takes known classes.
torch.serialization.add_safe_globals(
    [
        Float8BlockQuantizer,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        MXFP8Quantizer,
    ]
)
