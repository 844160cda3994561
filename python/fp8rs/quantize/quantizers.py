"""Quantizers: objects that turn high-precision tensors into planes of one format.

A quantizer knows the element type, the format, where scales come from, and which planes its user
wants. It is callable, and gives a `QuantizedTensor`. Linear layers need planes and no tensor around
them: they call `fp8rs.tensor.spec.quantize_planes`, as a quantizer does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rs.quantize.in_graph import key_of, quantized, take_into_graphs
from fp8rs.quantize.recipes import check_amax_epsilon, check_bool
from fp8rs.tensor import formats
from fp8rs.tensor.formats import INPUT_DTYPES, BlockFormat, check_fp8_dtype, split
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.quantized import QuantizedTensor, wrap_planes
from fp8rs.tensor.spec import QuantSpec


class Quantizer:
    """Base of all quantizers.

    Args:
        spec: how planes are made.
        rowwise: make the rowwise plane.
        columnwise: make the columnwise plane.
    """

    #: A delayed scale to read, and the amax to write.
    delayed: tuple[Tensor, Tensor] | None = None

    def __init__(self, spec: QuantSpec, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.spec = spec
        self._key = key_of(spec)
        self.rowwise = True
        self.columnwise = True
        self.set_usage(rowwise=rowwise, columnwise=columnwise)

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The element type of the codes."""
        return self.spec.fp8_dtype

    @property
    def format(self) -> BlockFormat:
        """Block shape and scale dtype."""
        return self.spec.format

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

    def __call__(self, x: Tensor) -> QuantizedTensor:
        """Quantize ``x``: a new tensor of the same shape and logical dtype, outside autograd.

        Raises:
            TypeError: ``x`` is no tensor of float32, bfloat16 or float16.
        """
        if type(x) is not Tensor:
            if not isinstance(x, Tensor):
                raise TypeError(f"x must be a tensor, not {type(x).__name__}")
            x = x.dequantize() if isinstance(x, QuantizedTensor) else x.detach()
        if x.dtype not in INPUT_DTYPES:
            raise TypeError(f"x must be float32, bfloat16 or float16, not {x.dtype}")
        if x.requires_grad:
            x = x.detach()
        if torch.compiler.is_compiling():
            take_into_graphs()
        return quantized(x, self.rowwise, self.columnwise, self.delayed, self._key)

    def update_quantized(self, src: Tensor, dst: QuantizedTensor) -> QuantizedTensor:
        """Quantize ``src`` into the planes that ``dst`` has, scales included; returns ``dst``.

        Where ``dst`` is a view that shares its scales with other elements, these keep their values:
        scales stay, or move by powers of two.

        Raises:
            TypeError: ``dst`` is not quantized, or ``src`` cannot be.
            ValueError: shapes, devices, element types or formats differ.
        """
        if not isinstance(dst, QuantizedTensor):
            raise TypeError(f"dst must be a QuantizedTensor, not {type(dst).__name__}")
        if dst.fp8_dtype != self.fp8_dtype or dst.format is not self.format:
            raise ValueError(
                f"dst has {dst.fp8_dtype} in format {dst.format.name!r}, but the quantizer "
                f"makes {self.fp8_dtype} in format {self.format.name!r}"
            )
        dst.write(src, self.spec, self.delayed)
        return dst

    def make_empty(
        self,
        shape: Iterable[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: Any = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """A tensor with this quantizer's planes, codes uninitialised and scales 1.

        Raises:
            ValueError: a size is negative.
        """
        shape = torch.Size(shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"shape must have no negative sizes, not {tuple(shape)}")
        batch, (rows, cols) = split(shape, self.spec.batched)

        def plane(data_shape: Iterable[int], rows: int, cols: int) -> Plane:
            data = torch.empty(tuple(data_shape), dtype=self.fp8_dtype, device=device)
            scale_shape = self.format.scale_shape(rows, cols, batch)
            scale = torch.ones(scale_shape, dtype=torch.float32, device=device)
            return Plane(data, scale.to(self.format.scale_dtype), self.format)

        row = plane(shape, rows, cols) if self.rowwise else None
        col = plane((*batch, cols, rows), cols, rows) if self.columnwise else None
        return wrap_planes(
            row,
            col,
            shape=shape,
            dtype=dtype,
            requires_grad=requires_grad,
            spec=self.spec,
            delayed=self.delayed,
        )

    def copy(self) -> Quantizer:
        """A quantizer with the same settings whose usage can be changed on its own.

        Tensors that scales are read from or amaxes written to stay shared.
        """
        new = type(self).__new__(type(self))
        new.__dict__.update(self.__dict__)
        return new

    def __getstate__(self) -> dict[str, Any]:
        # A process group means nothing in another process.
        spec = self.spec.without_group()
        return {**self.__dict__, "spec": spec, "_key": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _key=key_of(state["spec"]))

    def __repr__(self) -> str:
        planes = [n for n in ("rowwise", "columnwise") if getattr(self, n)]
        block = "" if self.format.per_tensor else f", block={self.format.block}"
        return f"{type(self).__name__}({self.fp8_dtype}, planes={planes}{block})"


class Float8Quantizer(Quantizer):
    """Per tensor, with a scale that is known: delayed scaling.

    Args:
        scale: fp32 tensor of one element; read at every call, never written.
        amax: fp32 tensor of one element; its maximum with the amax of each finite quantized
            tensor is written back. A tensor with NaN or Inf leaves it and gets the scale NaN.
        fp8_dtype: the element type of the codes, torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise plane.
        columnwise: make the columnwise plane.
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
        spec = QuantSpec(formats.TENSOR, check_fp8_dtype(fp8_dtype))
        super().__init__(spec, rowwise=rowwise, columnwise=columnwise)
        self.delayed = _single(scale, "scale"), _single(amax, "amax")

    @property
    def scale(self) -> Tensor:
        """The scale that is read, shape ()."""
        assert self.delayed is not None
        return self.delayed[0]

    @property
    def amax(self) -> Tensor:
        """The amax that is written, shape ()."""
        assert self.delayed is not None
        return self.delayed[1]


def _single(t: Tensor, name: str) -> Tensor:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(t).__name__}")
    if t.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, not {t.dtype}")
    if t.numel() != 1:
        raise ValueError(f"{name} must have one element, not shape {tuple(t.shape)}")
    return t.view(())


def group_name(group: Any) -> str | None:
    """The name of an ``amax_reduction_group``; TypeError if it is no process group."""
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "amax_reduction_group must be a torch.distributed.ProcessGroup, "
            f"not {type(group).__name__}"
        )
    return group.group_name


class Float8CurrentScalingQuantizer(Quantizer):
    """Per tensor, with a scale from the tensor's own amax.

    Args:
        fp8_dtype: the element type of the codes, torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise plane.
        columnwise: make the columnwise plane.
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
        spec = QuantSpec(
            formats.TENSOR,
            check_fp8_dtype(fp8_dtype),
            power_2_scale=check_bool("power_2_scale", power_2_scale),
            amax_epsilon=check_amax_epsilon(amax_epsilon),
            group=group_name(amax_reduction_group),
        )
        super().__init__(spec, rowwise=rowwise, columnwise=columnwise)


class Float8BlockQuantizer(Quantizer):
    """One fp32 scale a block, from the block's own amax.

    Args:
        fp8_dtype: the element type of the codes, torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise plane.
        columnwise: make the columnwise plane.
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
        spec = QuantSpec(
            formats.format_of(block, torch.float32),
            check_fp8_dtype(fp8_dtype),
            power_2_scale=check_bool("power_2_scale", power_2_scale),
            amax_epsilon=check_amax_epsilon(amax_epsilon),
        )
        super().__init__(spec, rowwise=rowwise, columnwise=columnwise)


class MXFP8Quantizer(Quantizer):
    """MXFP8: one power-of-two E8M0 scale for each block of 32 or of 32 by 32.

    Args:
        fp8_dtype: the element type of the codes, torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: make the rowwise plane.
        columnwise: make the columnwise plane.
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
        if scale_rounding not in ("ceil", "floor"):
            raise ValueError(f'scale_rounding must be "ceil" or "floor", not {scale_rounding!r}')
        spec = QuantSpec(
            formats.format_of(block, torch.float8_e8m0fnu),
            check_fp8_dtype(fp8_dtype),
            scale_rounding=scale_rounding,
        )
        super().__init__(spec, rowwise=rowwise, columnwise=columnwise)


# torch.load(weights_only=True) takes known classes.
torch.serialization.add_safe_globals(
    [
        Float8BlockQuantizer,
        Float8CurrentScalingQuantizer,
        Float8Quantizer,
        MXFP8Quantizer,
    ]
)
