"""Quantized tensors: a logical shape and dtype over up to two planes of FP8 codes.

``rowwise`` has data of the logical shape, ``columnwise`` the transposed 2-D view stored
contiguously (what GEMMs that contract over the rows read: Hopper's FP8 GEMM takes only K-major
operands). The aten handlers are in :mod:`fp8rs.tensor.aten`; anything without one dequantizes its
quantized arguments, runs, and writes the mutated ones back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from fp8rs.tensor import formats
from fp8rs.tensor.formats import BlockFormat
from fp8rs.tensor.planes import Part, check_planes
from fp8rs.tensor.planes import Plane as Plane

if TYPE_CHECKING:
    from fp8rs.quantize.quantizers import Quantizer

Handler = Callable[..., Any]

#: aten overload -> handler(func, *args, **kwargs), whose first argument is a QuantizedTensor.
#: A handler returns NotImplemented to leave the call to the fallback.
HANDLERS: dict[Any, Handler] = {}

#: The names of the two planes.
PLANES = ("rowwise", "columnwise")


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

    Raises:
        TypeError, ValueError: the planes do not fit the shape, their format or each other.
    """

    rowwise: Plane | None
    columnwise: Plane | None
    quantizer: Quantizer | None
    # Set for a view whose planes alone do not hold all that a write must change.
    _part: Part | None

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
        if cls.scale_dtype is not None and plane.scale.dtype != cls.scale_dtype:
            raise TypeError(
                f"{cls.__name__} has scales of {cls.scale_dtype}, not {plane.scale.dtype}"
            )
        check_planes(rowwise, columnwise, shape)
        return cls.wrap(rowwise, columnwise, shape, dtype, requires_grad, quantizer)

    @classmethod
    def wrap(
        cls,
        rowwise: Plane | None,
        columnwise: Plane | None,
        shape: torch.Size,
        dtype: torch.dtype,
        requires_grad: bool,
        quantizer: Quantizer | None,
    ) -> Self:
        """The constructor without its checks of the planes, for those that the library made."""
        plane = rowwise if rowwise is not None else columnwise
        assert plane is not None
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
        self._part = None
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

        A plane is made from the other one, exactly, where the blocks are square. It belongs to
        this tensor object: writes through this object and through views that are taken of it from
        now on reach it, writes through older views and detached aliases do not.

        Raises:
            ValueError: no plane would be left, or the missing plane cannot be made from the other;
                the message names it.
        """
        want_row = self.rowwise is not None if rowwise is None else rowwise
        want_col = self.columnwise is not None if columnwise is None else columnwise
        if not want_row and not want_col:
            raise ValueError("update_usage(rowwise, columnwise) would leave no plane")
        new_row, new_col = self.rowwise, self.columnwise
        if want_row and new_row is None:
            new_row = self._made("rowwise", "update_usage(rowwise=True)")
        if want_col and new_col is None:
            new_col = self._made("columnwise", "update_usage(columnwise=True)")
        self.rowwise = new_row if want_row else None
        self.columnwise = new_col if want_col else None
        return self

    def _made(self, name: str, operation: str) -> Plane:
        """The plane called ``name``, which is missing, made from the other one."""
        if name == "columnwise":
            return self.plane("rowwise", operation).transposed(name, operation)
        made = self.plane("columnwise", operation).transposed(name, operation)
        return Plane(made.data.view(self.shape), made.scale, made.format)

    def quantize_(self, src: Tensor) -> QuantizedTensor:
        """Quantize ``src`` (same shape) into this tensor's planes, in place.

        Scales are written too. Where this is a part of a tensor whose scales it shares (a slice of
        one with one scale a tensor, say), the whole of that tensor is quantized again, with the
        part replaced.
        """
        quantizer = self.quantizer
        if quantizer is None:
            from fp8rs.quantize.quantizers import quantizer_like

            quantizer = quantizer_like(self)
        return quantizer.update_quantized(src, self)

    def copy_planes_(self, src: QuantizedTensor, *, non_blocking: bool = False) -> bool:
        """Take over the codes and scales of ``src`` (same shape) as they are.

        Returns:
            False, with nothing written, where that does not make this tensor equal to ``src``:
            formats or element types differ, ``src`` lacks a plane that cannot be made from its
            other one, or this tensor shares its scales with other elements.
        """
        to, of = self.any_plane(), src.any_plane()
        if of.format != to.format or of.data.dtype != to.data.dtype:
            return False
        part = self._part
        if part is not None:
            if not part.everything:
                return False
            # The codes of the whole are those of the view, arranged as its values are.
            row = src.rowwise if src.rowwise is not None else src._made("rowwise", "copy_")
            codes = torch.empty(part.whole.shape, dtype=torch.uint8, device=row.data.device)
            part.take(codes).copy_(row.data.view(torch.uint8))
            row = Plane(codes.view(row.data.dtype), row.scale, row.format)
            part.whole.copy_planes_(part.whole.like(row, None), non_blocking=non_blocking)
            self.follow_whole()
            return True
        names = [name for name in PLANES if getattr(self, name) is not None]
        if not of.format.square and any(getattr(src, name) is None for name in names):
            return False
        for name in names:
            to, given = getattr(self, name), getattr(src, name)
            of = given if given is not None else src._made(name, "copy_")
            to.data.copy_(of.data, non_blocking=non_blocking)
            to.scale.copy_(of.scale, non_blocking=non_blocking)
        return True

    def follow_whole(self) -> None:
        """After a write to the tensor that this is a part of: write the planes of its own.

        A view lacks planes that its whole has not or that a view cannot show, and
        :meth:`update_usage` may have made them since.
        """
        assert self._part is not None
        fresh: Any = self._part.take(self._part.whole)
        for name in PLANES:
            own, now = getattr(self, name), getattr(fresh, name)
            if own is None:
                continue
            if now is None:
                now = fresh._made(name, "a write through a view")
            if own.data.untyped_storage()._cdata != now.data.untyped_storage()._cdata:
                own.data.copy_(now.data)
                own.scale.copy_(now.scale)

    def like(
        self,
        rowwise: Plane | None,
        columnwise: Plane | None,
        *,
        shape: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> QuantizedTensor:
        """A tensor of this class and quantizer over other planes."""
        return type(self).wrap(
            rowwise,
            columnwise,
            self.shape if shape is None else torch.Size(shape),
            self.dtype if dtype is None else dtype,
            False,
            self.quantizer,
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

    def __setitem__(self, index: Any, value: Any) -> None:
        try:
            is_view = isinstance(self[index], QuantizedTensor)
        except ValueError:  # it would cut blocks
            is_view = False
        if is_view:
            super().__setitem__(index, value)
        else:  # torch would write to a dequantized copy
            values = self.dequantize(torch.float32)
            values[index] = value
            self.quantize_(values)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        planes = [n for n in PLANES if getattr(self, n, None) is not None]
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
        for plane in PLANES:
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
        row, col = (
            None if kind is None else Plane(inner[f"_{name}_data"], inner[f"_{name}_scale"], kind)
            for name, kind in zip(PLANES, kinds, strict=True)
        )
        return cls.wrap(row, col, torch.Size(outer_size), dtype, False, quantizer)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Of plain parts, so that torch.load(weights_only=True) takes it, and of bytes, because
        # pickle alone does not take FP8 tensors. A view becomes a tensor of its own.
        planes = [
            None if p is None else (_as_bytes(p.data), p.data.dtype, _as_bytes(p.scale), p.format)
            for p in (self.rowwise, self.columnwise)
        ]
        return _rebuild, (
            *planes,
            tuple(self.shape),
            self.dtype,
            self.requires_grad,
            isinstance(self, torch.nn.Parameter),
            self.quantizer,
        )

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
        return _aten.dequantized_call(func, args, kwargs)


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
    return TENSOR_TYPES[plane.format.scale_dtype].wrap(
        rowwise, columnwise, torch.Size(shape), dtype, requires_grad, quantizer
    )


def _as_bytes(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float32 else t.view(torch.uint8)


def _rebuild(
    rowwise: Any,
    columnwise: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    requires_grad: bool,
    is_parameter: bool,
    quantizer: Quantizer | None,
) -> Tensor:
    """What pickles of quantized tensors call."""
    row, col = (
        None if p is None else Plane(p[0].view(p[1]), p[2].view(p[3].scale_dtype), p[3])
        for p in (rowwise, columnwise)
    )
    if is_parameter:
        t = wrap_planes(row, col, shape=shape, dtype=dtype, quantizer=quantizer)
        return torch.nn.Parameter(t, requires_grad)
    return wrap_planes(
        row, col, shape=shape, dtype=dtype, requires_grad=requires_grad, quantizer=quantizer
    )


torch.serialization.add_safe_globals([_rebuild, BlockFormat])

from fp8rs.tensor import aten as _aten  # noqa: E402  (fills HANDLERS)
