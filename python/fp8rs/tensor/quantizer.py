"""Quantizers: callables that quantize high-precision tensors in one format.

There is one class. The functions of this module return it for one kind of scaling each. Linear
layers need planes without a tensor around them, and call
`fp8rs.quantize.cast.quantize_planes`, as a quantizer does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8rs._torch import constant_when_traced
from fp8rs.quantize import formats
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.formats import INPUT_DTYPES, BlockFormat, check_fp8_dtype, split_batch
from fp8rs.quantize.planes import Plane
from fp8rs.quantize.recipes import check_amax_epsilon, check_bool, check_choice
from fp8rs.quantize.spec import QuantSpec
from fp8rs.tensor.plane_storage import Delayed, PlaneStorage
from fp8rs.tensor.quantized import QuantizedTensor, wrap

# Dynamo does not trace the constructor of a tensor subclass. It can put a call of a function that
# returns one into the graph, if all arguments are tensors or plain constants. A spec is therefore
# passed by its key.

_SPECS: dict[str, QuantSpec] = {}


def _key_of(spec: QuantSpec) -> str:
    """Register a spec and return its key for `quantize`. Equal specs have equal keys."""
    key = repr(spec)
    _SPECS[key] = spec
    return key


def quantize(
    x: Tensor, rowwise: bool, columnwise: bool, delayed: Delayed | None, key: str
) -> QuantizedTensor:
    """Quantize a tensor. The result has its shape and dtype, and is detached from autograd.

    A result of a compiled graph holds copies of ``delayed``. Writes to it update the amax of the
    copy.

    Args:
        x: fp32, bf16 or fp16, without gradient.
        rowwise: whether the result has a rowwise plane.
        columnwise: whether the result has a columnwise plane.
        delayed: the scale () to use and the amax () to update, or None.
        key: the key of the spec.
    """
    spec = _SPECS[key]
    scale, amax = (None, None) if delayed is None else delayed
    row, col = quantize_planes(
        spec, x, rowwise, columnwise, scale=scale, amax=amax, declare_mutation=True
    )
    return wrap(PlaneStorage(row, col, spec, delayed), x.shape, x.dtype)


@constant_when_traced
def _allow_in_graph() -> None:
    """Make Dynamo put calls of `quantize` into its graphs.

    Call it while tracing, when Dynamo is already imported. Importing it takes two seconds.
    """
    torch.compiler.allow_in_graph(quantize)


class Quantizer:
    """Quantizes tensors by one `QuantSpec`.

    Args:
        spec: format, element type and options of the scales.
        rowwise: whether results have a rowwise plane.
        columnwise: whether results have a columnwise plane.
        delayed: the scale () to use and the amax () to update, both fp32, with delayed scaling. By
            default, scales are computed from the data.
    """

    def __init__(
        self,
        spec: QuantSpec,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        delayed: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.spec = spec
        self.delayed = delayed
        self._key = _key_of(spec)
        self.rowwise = self.columnwise = True
        self.set_usage(rowwise=rowwise, columnwise=columnwise)

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The element type of the codes."""
        return self.spec.fp8_dtype

    @property
    def format(self) -> BlockFormat:
        """Block shape and scale dtype."""
        return self.spec.format

    @property
    def scale(self) -> Tensor | None:
        """With delayed scaling, the scale () that is used."""
        return None if self.delayed is None else self.delayed[0]

    @property
    def amax(self) -> Tensor | None:
        """With delayed scaling, the amax () that is updated."""
        return None if self.delayed is None else self.delayed[1]

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Choose the planes of later results. None keeps a choice.

        Raises:
            ValueError: both would be False.
        """
        row = self.rowwise if rowwise is None else bool(rowwise)
        col = self.columnwise if columnwise is None else bool(columnwise)
        if not row and not col:
            raise ValueError("rowwise and columnwise are both False, but one plane is required")
        self.rowwise, self.columnwise = row, col

    def __call__(self, x: Tensor) -> QuantizedTensor:
        """Quantize a tensor.

        Args:
            x: a tensor of float32, bfloat16 or float16, of any shape. A quantized tensor is
                dequantized first.

        Returns:
            A new tensor with the shape and logical dtype of ``x``, detached from autograd.

        Raises:
            TypeError: ``x`` is not a tensor of these dtypes.
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
            _allow_in_graph()
        return quantize(x, self.rowwise, self.columnwise, self.delayed, self._key)

    def update_quantized(self, src: Tensor, dst: QuantizedTensor) -> QuantizedTensor:
        """Quantize ``src`` into the existing planes and scales of ``dst``.

        If ``dst`` is a view that shares scales with other elements, those elements keep their
        values: scales are kept, or multiplied by powers of two.

        Args:
            src: values of the shape of ``dst``.
            dst: the tensor to write to.

        Returns:
            ``dst``.

        Raises:
            TypeError: ``dst`` is not quantized, or ``src`` cannot be quantized.
            ValueError: shapes, devices, element types or formats differ.
        """
        if not isinstance(dst, QuantizedTensor):
            raise TypeError(f"dst must be a QuantizedTensor, not {type(dst).__name__}")
        if dst.fp8_dtype != self.fp8_dtype or dst.format is not self.format:
            raise ValueError(
                f"dst has {dst.fp8_dtype} in format {dst.format.name!r}, but the quantizer "
                f"has {self.fp8_dtype} in format {self.format.name!r}"
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
        """Return a tensor with this quantizer's planes, uninitialized codes, and scales of 1."""
        shape = torch.Size(shape)
        batch, (rows, cols) = split_batch(shape, self.spec.batched)

        def plane(data_shape: tuple[int, ...], rows: int, cols: int) -> Plane:
            data = torch.empty(data_shape, dtype=self.fp8_dtype, device=device)
            scale = torch.ones(self.format.scale_shape(rows, cols, batch), device=device)
            return Plane(data, scale.to(self.format.scale_dtype), self.format)

        row = plane(shape, rows, cols) if self.rowwise else None
        col = plane((*batch, cols, rows), cols, rows) if self.columnwise else None
        return wrap(PlaneStorage(row, col, self.spec, self.delayed), shape, dtype, requires_grad)

    def copy(self) -> Quantizer:
        """Return a quantizer with the same settings, which shares ``scale`` and ``amax``."""
        return Quantizer(
            self.spec, rowwise=self.rowwise, columnwise=self.columnwise, delayed=self.delayed
        )

    def __getstate__(self) -> dict[str, Any]:
        # The name of a process group is not valid in another process.
        return {**self.__dict__, "spec": self.spec.without_group(), "_key": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _key=_key_of(state["spec"]))

    def __repr__(self) -> str:
        planes = [n for n in ("rowwise", "columnwise") if getattr(self, n)]
        block = "" if self.format.per_tensor else f", block={self.format.block}"
        return f"Quantizer({self.fp8_dtype}, planes={planes}{block})"


def Float8Quantizer(
    scale: Tensor,
    amax: Tensor,
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
) -> Quantizer:
    """Return a quantizer with one scale per tensor, which is given (delayed scaling).

    Args:
        scale: fp32 tensor of one element. It is read at every call and never written.
        amax: fp32 tensor of one element. Each call writes the maximum of its value and the amax of
            the data. If the data has NaN or Inf, it is not written and the result's scale is NaN.
        fp8_dtype: the element type of the codes, torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: whether results have a rowwise plane.
        columnwise: whether results have a columnwise plane.
    """
    spec = QuantSpec(formats.TENSOR, check_fp8_dtype(fp8_dtype))
    delayed = _scalar(scale, "scale"), _scalar(amax, "amax")
    return Quantizer(spec, rowwise=rowwise, columnwise=columnwise, delayed=delayed)


def _scalar(t: Tensor, name: str) -> Tensor:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(t).__name__}")
    if t.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, not {t.dtype}")
    if t.numel() != 1:
        raise ValueError(f"{name} must have one element, not shape {tuple(t.shape)}")
    return t.view(())


def group_name(group: Any) -> str | None:
    """Return the name of an ``amax_reduction_group``.

    Raises:
        TypeError: it is not a process group.
    """
    if group is None:
        return None
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "amax_reduction_group must be a torch.distributed.ProcessGroup, "
            f"not {type(group).__name__}"
        )
    return group.group_name


def Float8CurrentScalingQuantizer(
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    amax_reduction_group: Any = None,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> Quantizer:
    """Return a quantizer with one scale per tensor, computed from the tensor's amax.

    Args:
        fp8_dtype: the element type of the codes, torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: whether results have a rowwise plane.
        columnwise: whether results have a columnwise plane.
        amax_reduction_group: process group over which the amax is reduced. All its ranks must then
            call the quantizer at the same point. By default the amax is not reduced.
        power_2_scale: round the scale up to a power of two.
        amax_epsilon: lower bound of the amax.
    """
    spec = QuantSpec(
        formats.TENSOR,
        check_fp8_dtype(fp8_dtype),
        power_2_scale=check_bool("power_2_scale", power_2_scale),
        amax_epsilon=check_amax_epsilon(amax_epsilon),
        group=group_name(amax_reduction_group),
    )
    return Quantizer(spec, rowwise=rowwise, columnwise=columnwise)


def Float8BlockQuantizer(
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    block: tuple[int, int] = (1, 128),
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> Quantizer:
    """Return a quantizer with one fp32 scale per block, computed from the block's amax.

    Args:
        fp8_dtype: the element type of the codes, torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: whether results have a rowwise plane.
        columnwise: whether results have a columnwise plane.
        block: (1, 128), (128, 128), or (1, -1) for whole rows. A columnwise plane has the blocks of
            that shape in the transposed matrix that it holds.
        power_2_scale: round scales up to powers of two.
        amax_epsilon: lower bound of the amaxes.
    """
    spec = QuantSpec(
        formats.format_of(block, torch.float32),
        check_fp8_dtype(fp8_dtype),
        power_2_scale=check_bool("power_2_scale", power_2_scale),
        amax_epsilon=check_amax_epsilon(amax_epsilon),
    )
    return Quantizer(spec, rowwise=rowwise, columnwise=columnwise)


def MXFP8Quantizer(
    fp8_dtype: torch.dtype,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    block: tuple[int, int] = (1, 32),
    scale_rounding: str = "ceil",
) -> Quantizer:
    """Return an MXFP8 quantizer, with one power-of-two E8M0 scale per block.

    Args:
        fp8_dtype: the element type of the codes, torch.float8_e4m3fn or torch.float8_e5m2.
        rowwise: whether results have a rowwise plane.
        columnwise: whether results have a columnwise plane.
        block: (1, 32) or (32, 32).
        scale_rounding: "ceil", with which no element saturates, or "floor", the OCP rule.
    """
    check_choice("scale_rounding", scale_rounding, ("ceil", "floor"))
    spec = QuantSpec(
        formats.format_of(block, torch.float8_e8m0fnu),
        check_fp8_dtype(fp8_dtype),
        scale_rounding=scale_rounding,
    )
    return Quantizer(spec, rowwise=rowwise, columnwise=columnwise)


# torch.load(weights_only=True) loads only classes that are registered.
torch.serialization.add_safe_globals([Quantizer])
