"""Quantized tensors: a logical shape and dtype over up to two planes of FP8 codes.

``rowwise`` has data of the logical shape, ``columnwise`` the transposed 2-D view stored
contiguously (what GEMMs that contract over the rows read: Hopper's FP8 GEMM takes only K-major
operands). The aten handlers are in :mod:`fp8rs.aten`; anything without one dequantizes its
quantized arguments, runs, and writes the mutated ones back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only
from typing_extensions import Self

from . import formats, ops  # noqa: F401  (ops registers torch.ops.fp8rs)
from .formats import BlockFormat, matrix_shape

if TYPE_CHECKING:
    from .quantizers import Quantizer

_dequantize = torch.ops.fp8rs.dequantize.default
_transpose = torch.ops.fp8rs.transpose.default

Handler = Callable[..., Any]

#: aten overload -> handler(func, *args, **kwargs), whose first argument is a QuantizedTensor.
#: A handler returns NotImplemented to leave the call to the fallback.
HANDLERS: dict[Any, Handler] = {}


@dataclass(slots=True, eq=False)
class Plane:
    """FP8 codes with their scales: ``data * scale`` is the value.

    Args:
        data: codes, torch.float8_e4m3fn or torch.float8_e5m2; its 2-D view is (product of the
            leading dims, last dim).
        scale: one element a block of that 2-D view, shape ``format.scale_shape(rows, cols)``.
        format: block shape and scale dtype.
    """

    data: Tensor
    scale: Tensor
    format: BlockFormat = formats.TENSOR

    @property
    def matrix(self) -> Tensor:
        """The 2-D view of the codes."""
        data = self.data
        return data if data.dim() == 2 else data.reshape(matrix_shape(data.shape))

    def map(self, fn: Callable[[Tensor], Tensor]) -> Plane:
        """A plane of ``fn(data)`` and ``fn(scale)``."""
        return Plane(fn(self.data), fn(self.scale), self.format)

    def transposed(self) -> Plane:
        """The plane of the transposed 2-D matrix, as a new contiguous tensor.

        Raises:
            ValueError: the format's blocks are not square, so the codes would differ.
        """
        if not self.format.square:
            raise ValueError(
                f"a plane in format {self.format.name!r} cannot be transposed without "
                "quantizing again: its blocks are not square"
            )
        scale = self.scale if self.format.per_tensor else self.scale.t().contiguous()
        return Plane(_transpose(self.matrix), scale, self.format)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """``data * scale`` in fp32, then one cast to ``dtype``; the shape is that of ``data``."""
        return cast(Tensor, _dequantize(self.data, self.scale, list(self.format.block), dtype))

    def check_live(self, what: str) -> None:
        """RuntimeError if the codes' storage was freed, as FSDP does when it reshards."""
        data = self.data
        if data.untyped_storage().nbytes() == 0 and data.numel() > 0:
            raise RuntimeError(
                f"{what} has no storage: FSDP freed the gathered weight when it resharded. "
                "Read it between the module's pre-forward and its reshard, or call unshard() first"
            )


class QuantizedTensor(Tensor):
    """A tensor whose storage is FP8 planes. It looks like ``shape`` and ``dtype``.

    Args:
        rowwise: plane with data of the logical shape, or None.
        columnwise: plane with data of the transposed 2-D view, (last dim, product of the leading
            dims), or None. At least one plane is given.
        shape: the logical shape.
        dtype: the logical dtype: what dequantizing gives.
        requires_grad: as in torch.
        quantizer: what :meth:`quantize_` and in-place operations quantize with; by default a
            current-scaling quantizer of the planes' format.
    """

    rowwise: Plane | None
    columnwise: Plane | None
    quantizer: Quantizer | None
    # Where this tensor is part of another one that shares its scales: that tensor, and the
    # operation that takes this part of a plain tensor of its shape. Writes go through it.
    _whole: tuple[QuantizedTensor, Callable[[Tensor], Tensor]] | None

    #: Scale dtypes that a subclass stands for; checked at construction.
    scale_dtype: ClassVar[torch.dtype | None] = None

    @staticmethod
    def __new__(
        cls,
        rowwise: Plane | None = None,
        columnwise: Plane | None = None,
        *,
        shape: Iterable[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
        quantizer: Quantizer | None = None,
    ) -> Self:
        plane = rowwise if rowwise is not None else columnwise
        if plane is None:
            raise ValueError("rowwise and columnwise are both None: one plane must be given")
        shape = torch.Size(shape)
        if rowwise is not None and rowwise.data.shape != shape:
            raise ValueError(
                f"rowwise has data of shape {tuple(rowwise.data.shape)}, "
                f"but the tensor's shape is {tuple(shape)}"
            )
        if columnwise is not None:
            rows, cols = matrix_shape(shape)
            if columnwise.data.shape != (cols, rows):
                raise ValueError(
                    f"columnwise has data of shape {tuple(columnwise.data.shape)}, but a tensor "
                    f"of shape {tuple(shape)} needs {(cols, rows)}"
                )
        if cls.scale_dtype is not None and plane.scale.dtype != cls.scale_dtype:
            raise TypeError(
                f"{cls.__name__} has scales of {cls.scale_dtype}, not {plane.scale.dtype}"
            )
        if dtype not in formats.INPUT_DTYPES:
            raise TypeError(f"dtype must be float32, bfloat16 or float16, not {dtype!r}")
        self: Self = torch.Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=dtype,
            device=plane.data.device,
            requires_grad=requires_grad,
        )
        self.rowwise = rowwise
        self.columnwise = columnwise
        self.quantizer = quantizer
        self._whole = None
        return self

    # The C++ operators come straight to __torch_dispatch__.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The element type of the codes."""
        return self.any_plane().data.dtype

    def any_plane(self) -> Plane:
        """The rowwise plane, or the columnwise one where there is no rowwise."""
        plane = self.rowwise if self.rowwise is not None else self.columnwise
        assert plane is not None
        return plane

    def plane(self, name: str, operation: str) -> Plane:
        """The plane called ``name``; ValueError naming it and ``operation`` if it is missing."""
        plane: Plane | None = getattr(self, name)
        if plane is None:
            raise ValueError(f"{operation} needs the {name} plane, which this tensor does not have")
        return plane

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor: code times scale in fp32, then one cast to ``dtype`` (the logical one).

        Either plane will do. Raises RuntimeError if the storage was freed by a reshard.
        """
        dtype = self.dtype if dtype is None else dtype
        plane = self.any_plane()
        plane.check_live("this quantized tensor")
        values = plane.dequantize(dtype)
        if self.rowwise is None:
            values = values.t().contiguous().view(self.shape)
        return values

    def update_usage(
        self, rowwise: bool | None = None, columnwise: bool | None = None
    ) -> QuantizedTensor:
        """Make (True) or drop (False) planes in place; None leaves a plane as it is.

        A plane is made from the other one, exactly, where the blocks are square.

        Raises:
            ValueError: no plane would be left, or the missing plane cannot be made from the other.
        """
        want_row = self.rowwise is not None if rowwise is None else rowwise
        want_col = self.columnwise is not None if columnwise is None else columnwise
        if not want_row and not want_col:
            raise ValueError("update_usage(rowwise, columnwise) would leave no plane")
        new_row, new_col = self.rowwise, self.columnwise
        if want_row and new_row is None:
            made = self.plane("columnwise", "update_usage(rowwise=True)").transposed()
            new_row = Plane(made.data.view(self.shape), made.scale, made.format)
        if want_col and new_col is None:
            new_col = self.plane("rowwise", "update_usage(columnwise=True)").transposed()
        self.rowwise = new_row if want_row else None
        self.columnwise = new_col if want_col else None
        return self

    @torch.no_grad()
    def quantize_(self, src: Tensor) -> QuantizedTensor:
        """Quantize ``src`` (same shape) into this tensor's planes, in place.

        Scales are written too. A slice shares its scales with the tensor that it was taken from,
        so the whole of that tensor is quantized again, with the slice replaced.
        """
        if src.shape != self.shape:
            raise ValueError(
                f"src has shape {tuple(src.shape)}, but the tensor's is {tuple(self.shape)}"
            )
        if isinstance(src, QuantizedTensor):
            src = src.dequantize()
        if self._whole is not None:
            whole, part = self._whole
            values = whole.dequantize(torch.float32)
            part(values).copy_(src)
            whole.quantize_(values)
            return self
        quantizer = self.quantizer
        if quantizer is None:
            from .quantizers import quantizer_like

            quantizer = quantizer_like(self)
        quantizer.update_quantized(src, self)
        return self

    def like(
        self,
        rowwise: Plane | None,
        columnwise: Plane | None,
        *,
        shape: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """A tensor of this class and quantizer over other planes."""
        return type(self)(
            rowwise,
            columnwise,
            shape=self.shape if shape is None else shape,
            dtype=self.dtype if dtype is None else dtype,
            quantizer=self.quantizer,
        )

    def map(self, fn: Callable[[Tensor], Tensor]) -> QuantizedTensor:
        """The same tensor with ``fn`` applied to every data and scale tensor."""
        row = None if self.rowwise is None else self.rowwise.map(fn)
        col = None if self.columnwise is None else self.columnwise.map(fn)
        if (
            row is not None
            and col is not None
            and self.columnwise is not None
            and self.rowwise is not None
            and self.columnwise.scale is self.rowwise.scale
        ):
            col.scale = row.scale  # one scale stays one
        return self.like(row, col)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        planes = [n for n in ("rowwise", "columnwise") if getattr(self, n, None) is not None]
        # No values: reading them would synchronise, and a repr must not.
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"fp8_dtype={self.fp8_dtype}, format={self.any_plane().format.name!r}, "
            f"planes={planes}, device={str(self.device)!r}, requires_grad={self.requires_grad})"
        )

    # torch.compile and the traceable wrapper protocol read the planes as attributes by name.
    _rowwise_data = property(lambda self: self.rowwise.data)
    _rowwise_scale = property(lambda self: self.rowwise.scale)
    _columnwise_data = property(lambda self: self.columnwise.data)
    _columnwise_scale = property(lambda self: self.columnwise.scale)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        names: list[str] = []
        kinds: list[BlockFormat | None] = []
        for plane in ("rowwise", "columnwise"):
            value: Plane | None = getattr(self, plane)
            kinds.append(None if value is None else value.format)
            if value is not None:
                names += [f"_{plane}_data", f"_{plane}_scale"]
        return names, (self.dtype, tuple(kinds), self.quantizer)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> QuantizedTensor:
        dtype, kinds, quantizer = context
        planes = [
            None if kind is None else Plane(inner[f"_{name}_data"], inner[f"_{name}_scale"], kind)
            for name, kind in zip(("rowwise", "columnwise"), kinds, strict=True)
        ]
        return cls(*planes, shape=outer_size, dtype=dtype, quantizer=quantizer)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        handler = HANDLERS.get(func)
        if handler is not None:
            out = handler(func, *args, **kwargs)
            if out is not NotImplemented:
                return out
        return dequantized_call(func, args, kwargs)


class Float8Tensor(QuantizedTensor):
    """FP8 codes with fp32 scales: per tensor, per row or per block, as the planes' format says."""

    scale_dtype = torch.float32


class MXFP8Tensor(QuantizedTensor):
    """FP8 codes with a power-of-two E8M0 scale for each block of 1x32 or 32x32."""

    scale_dtype = torch.float8_e8m0fnu


#: The public class of a format's tensors, by the dtype of its scales.
TENSOR_TYPES: dict[torch.dtype, type[QuantizedTensor]] = {
    torch.float32: Float8Tensor,
    torch.float8_e8m0fnu: MXFP8Tensor,
}


def wrap_planes(
    rowwise: Plane | None,
    columnwise: Plane | None,
    *,
    shape: Iterable[int],
    dtype: torch.dtype,
    requires_grad: bool = False,
    quantizer: Quantizer | None = None,
) -> QuantizedTensor:
    """The quantized tensor over these planes, of the class that their format calls for."""
    plane = rowwise if rowwise is not None else columnwise
    if plane is None:
        raise ValueError("rowwise and columnwise are both None: one plane must be given")
    return TENSOR_TYPES[plane.format.scale_dtype](
        rowwise,
        columnwise,
        shape=shape,
        dtype=dtype,
        requires_grad=requires_grad,
        quantizer=quantizer,
    )


def dequantized_call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on dequantized arguments; quantize back those that it mutated.

    Lists (torch's foreach and fused optimizers) are taken apart too. The result is what ``func``
    gives, with mutated arguments in place of their dequantized stand-ins.
    """
    plain: dict[int, tuple[QuantizedTensor, Tensor]] = {}

    def dequantize(t: QuantizedTensor) -> Tensor:
        if id(t) not in plain:
            plain[id(t)] = (t, t.dequantize())
        return plain[id(t)][1]

    def mutated(value: Any) -> None:
        if isinstance(value, QuantizedTensor):
            written[id(value)] = value
        elif isinstance(value, (list, tuple)):
            for item in value:
                mutated(item)

    written: dict[int, QuantizedTensor] = {}
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        if position < len(args):
            mutated(args[position])
        else:
            mutated(kwargs.get(argument.name))

    new_args, new_kwargs = tree_map_only(QuantizedTensor, dequantize, (args, kwargs))
    out = func(*new_args, **new_kwargs)
    if not written:
        return out
    stand_ins = {}
    for key, original in written.items():
        value = plain[key][1]
        original.quantize_(value)
        stand_ins[id(value)] = original
    return tree_map(lambda v: stand_ins.get(id(v), v) if isinstance(v, Tensor) else v, out)


from . import aten as _aten  # noqa: E402,F401  (fills HANDLERS)
