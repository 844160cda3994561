"""Tensors whose values are in a store: construction, views, copies, pickles and tracing."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from fp8rs._torch import make_wrapper_subclass
from fp8rs.tensor import formats
from fp8rs.tensor.formats import split
from fp8rs.tensor.planes import Box, Plane, as_bytes
from fp8rs.tensor.spec import Planes, QuantSpec
from fp8rs.tensor.store import Store

#: The names of the two planes.
PLANES = ("rowwise", "columnwise")

#: Attributes of a tensor that users have not set.
OWN_ATTRIBUTES = frozenset(("_store", "_store_view", "_is_param"))

#: The size, strides and offset of a view.
Geometry = tuple[Any, Any, Any]

_plain_data: Any = torch.Tensor.data


class StoreTensor(Tensor):
    """Base of quantized tensors: a wrapper of a store.

    A view has the geometry that it would have over the contiguous values of the store. A shallow
    copy shares the planes. A deep copy and a pickle have planes of their own.
    """

    #: Scale dtypes that a subclass stands for; checked at construction.
    scale_dtype: ClassVar[torch.dtype | None] = None

    _store: Store
    #: Whether this has some elements of the store, or another shape.
    _store_view: bool

    @classmethod
    def over(
        cls,
        store: Store,
        shape: Any,
        dtype: torch.dtype,
        requires_grad: bool = False,
        stride: Any = None,
        offset: int | None = None,
    ) -> Self:
        """Return a tensor over a store. Nothing is checked.

        Args:
            store: the planes.
            shape: the logical shape.
            dtype: the logical dtype.
            requires_grad: as in torch.
            stride, offset: for a view, the geometry over contiguous values of the store. The
                default is all of the store, in its own shape.
        """
        self: Self = make_wrapper_subclass(
            cls,
            shape,
            strides=stride,
            storage_offset=offset,
            dtype=dtype,
            device=store.any_plane.data.device,
            requires_grad=requires_grad,
        )
        self._store = store
        self._store_view = stride is not None
        return self

    # --- views ------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry | None:
        """The size, strides and offset of a view. None for a tensor that is not a view."""
        return (self.shape, self.stride(), self.storage_offset()) if self._store_view else None

    def view_of(self, geometry: Geometry | None) -> Self:
        """Return a view of this tensor's store. None is all of it, in the store's own shape."""
        store = self._store
        shape = self.shape if store.rowwise is None else store.rowwise.data.shape
        size, stride, offset = (shape, None, None) if geometry is None else geometry
        # torch gives views of a normal tensor that tensor's version counter, which a tensor that
        # was made in inference mode does not take.
        made_normal = torch.is_inference_mode_enabled() and not self.is_inference()
        with torch.inference_mode(False) if made_normal else nullcontext():
            return self.over(store, size, self.dtype, stride=stride, offset=offset)

    @property
    def box(self) -> Box | None:
        """The part of the store that this tensor has, in order. None if it has other elements."""
        store, shape, stride = self._store, self.shape, self.stride()
        count, size = store.extent
        if not self._store_view:
            return store.box(slice(0, count))
        if not size:
            return None
        first, rest = self.storage_offset() // size, self.storage_offset() % size
        if not rest and not self.numel() % size and self.is_contiguous():
            return store.box(slice(first, first + self.numel() // size))
        *_, height, cols = store.matrix
        matrices: Box = ()
        if store.batched:
            if len(shape) < 3 or stride[0] != size:
                return None
            matrices = (slice(first, first + shape[0]),)
            shape, stride, first, rest = shape[1:], stride[1:], rest // cols, rest % cols
        elif len(shape) != 2:
            return None
        # The dimensions in front of the last one are rows.
        steps = [cols * math.prod(shape[i + 1 : -1]) for i in range(len(shape) - 1)]
        end = first + math.prod(shape[:-1])
        if stride != (*steps, 1) or rest + shape[-1] > cols or end > height:
            return None
        return *matrices, slice(first, end), slice(rest, rest + shape[-1])

    @property
    def is_whole(self) -> bool:
        """Whether this has all elements of the store, in order."""
        size = math.prod(self._store.matrix)
        return not self._store_view or (self.is_contiguous() and self.numel() == size)

    @property
    def planes(self) -> Planes:
        """Both planes. A view has a plane if it begins with a block and keeps the rows' length.

        A view of a batch must consist of whole matrices.
        """
        store = self._store
        if not self._store_view:
            return store.rowwise, store.columnwise
        box = self.box
        if box is None or (store.batched and box != store.box(box[0])):
            return None, None
        row, col = store.part(box)
        starts = box[-2].start, box[-1].start
        row, col = _of_whole_blocks(row, starts), _of_whole_blocks(col, starts[::-1])
        part = [span.stop - span.start for span in box]
        batch, matrix = split(self.shape, store.batched)
        if store.batched and not batch and part[0] == 1:  # one matrix of a batch
            row, col = row and row[0], col and col[0]
            part = part[1:]
        if part != [*batch, *matrix]:  # the rows have another length
            return None, None
        if row is not None:
            return Plane(row.data.view(self.shape), row.scale, row.format, row.lead), col
        # Where the planes differ, the tensor has the values of the rowwise one.
        return None, col if store.rowwise is None else None

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """Return a plain contiguous tensor: code times scale in fp32, then one cast.

        Args:
            dtype: float32, bfloat16, float16 or float64. The default is the logical dtype.

        Raises:
            RuntimeError: the storage was freed by a reshard.
        """
        dtype = self.dtype if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):  # the operator raises for other dtypes
            raise TypeError(f"dtype must be float32, bfloat16 or float16, not {dtype!r}")
        if dtype == torch.float64:  # float32 holds all values
            return self.dequantize(torch.float32).double()
        store = self._store
        store.any_plane.check_live("this quantized tensor")
        row, col = self.planes
        if row is not None:
            return row.dequantize(dtype)
        if col is not None:
            return col.dequantize(dtype).mT.contiguous().view(self.shape)
        if not self.numel():
            return torch.empty(self.shape, dtype=dtype, device=self.device)
        size, stride, offset = self.shape, self.stride(), int(self.storage_offset())
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        rows = store.rows_around(offset, last + 1)
        offset -= rows.start * store.extent[1]
        part = store.read(rows, dtype).as_strided(size, stride, offset)
        return part.clone(memory_format=torch.contiguous_format)  # without the other elements

    # --- other tensors like this one --------------------------------------------------------------

    def map(self, fn: Any, scale: Any = None, dtype: torch.dtype | None = None) -> Self:
        """Return a tensor of this spec and observer over other planes.

        The tensor must not be a view without planes.

        Args:
            fn: applied to all codes.
            scale: applied to all scales. The default is ``fn``.
            dtype: the logical dtype. The default is the dtype of this tensor.
        """
        row, col = (plane and plane.map(fn, scale) for plane in self.planes)
        if self._store.one_scale and row is not None and col is not None:
            col.scale = row.scale  # one scale stays one
        return self.over(self._store.over(row, col), self.shape, dtype or self.dtype)

    def _set_data(self, value: Any) -> None:
        if type(value) is not type(self):
            raise TypeError(
                f".data of a {type(self).__name__} must be one too, not a {type(value).__name__}: "
                "it would have to share the storage of what is assigned. Write values by copy_() "
                "or quantize_()"
            )
        _plain_data.__set__(self, value)
        self._store, self._store_view = value._store, value._store_view

    #: An alias outside autograd. Assigning a quantized tensor shares its planes from then on.
    data = property(lambda self: _plain_data.__get__(self), _set_data)

    # --- copies -----------------------------------------------------------------------------------

    def __copy__(self) -> Self:
        new = self.view_of(self.geometry)
        new.requires_grad_(self.requires_grad)
        for name, value in self.__dict__.items():
            new.__dict__.setdefault(name, value)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if not self.is_leaf:
            raise RuntimeError("only leaves of the autograd graph can be copied by deepcopy")
        new = memo[id(self)] = self.view_of(self.geometry)
        # With its attributes: the planes, marks that users set, and that it is a parameter.
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        new.requires_grad_(self.requires_grad)
        new.grad = copy.deepcopy(self.grad, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle plain parts, which ``torch.load(weights_only=True)`` accepts.

        A view becomes a tensor of its own. A view without planes becomes a plain tensor.
        """
        own: Any = self.detach().clone() if self._store_view else self
        if not isinstance(own, StoreTensor):
            return own.__reduce_ex__(protocol)
        names, (dtype, kinds, spec, _) = own.__tensor_flatten__()
        # Pickle alone does not accept FP8 tensors.
        inner = {name: (as_bytes(t := getattr(own, name)), t.dtype) for name in names}
        context = dtype, kinds, None if spec is None else spec.without_group(), None
        marks = {name: value for name, value in self.__dict__.items() if name not in OWN_ATTRIBUTES}
        is_parameter = isinstance(self, torch.nn.Parameter)
        return rebuild, (inner, context, tuple(self.shape), self.requires_grad, is_parameter, marks)

    # --- compilers --------------------------------------------------------------------------------

    # The traceable wrapper protocol reads the store's tensors as attributes by name.
    _rowwise_data = property(lambda self: self._store.rowwise.data)
    _rowwise_scale = property(lambda self: self._store.rowwise.scale)
    _columnwise_data = property(lambda self: self._store.columnwise.data)
    _columnwise_scale = property(lambda self: self._store.columnwise.scale)
    _delayed_scale = property(lambda self: self._store.delayed[0])
    _delayed_amax = property(lambda self: self._store.delayed[1])

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the inner tensors, and plain values that complete them.

        The values are constant and compare by value: compilers guard on them.
        """
        store = self._store
        names: list[str] = []
        kinds = []
        for name in PLANES:
            plane = getattr(store, name)
            if plane is not None:
                names += f"_{name}_data", f"_{name}_scale"
                kinds.append((name, plane.format.name, plane.lead))
        if store.one_scale:  # twice, it would be written twice
            names.remove("_columnwise_scale")
        if store.delayed is not None:
            names += ["_delayed_scale", "_delayed_amax"]
        offset = self.storage_offset() if self._store_view else None
        return names, (self.dtype, tuple(kinds), store.spec, offset)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> Self:
        dtype, kinds, spec, offset = context
        planes = {}
        for name, format, lead in kinds:
            own = f"_{name}_scale"
            scale = inner[own if own in inner else "_rowwise_scale"]
            planes[name] = Plane(inner[f"_{name}_data"], scale, formats.FORMATS[format], lead)
        delayed = None
        if "_delayed_scale" in inner:
            delayed = inner["_delayed_scale"], inner["_delayed_amax"]
        stride = None if offset is None else outer_stride
        store = Store(planes.get("rowwise"), planes.get("columnwise"), spec, delayed)
        return cls.over(store, outer_size, dtype, stride=stride, offset=offset)


def _of_whole_blocks(plane: Plane | None, starts: tuple[int, int]) -> Plane | None:
    """Return a part of a plane, or None if it begins within a block of the plane."""
    if plane is None or any(lead and start for lead, start in zip(plane.lead, starts, strict=True)):
        return None
    return plane


#: The public classes, by the dtype of their scales.
TENSOR_TYPES: dict[torch.dtype, type[StoreTensor]] = {}


def rebuild(
    inner: dict[str, tuple[Tensor, torch.dtype]],
    context: Any,
    shape: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
    marks: dict[str, Any],
) -> Tensor:
    """Return a pickled quantized tensor. `__reduce_ex__` makes the arguments."""
    tensors = {name: raw.view(dtype) for name, (raw, dtype) in inner.items()}
    scale = tensors.get("_rowwise_scale", tensors.get("_columnwise_scale"))
    assert scale is not None
    kind = TENSOR_TYPES[scale.dtype]
    new: Tensor = kind.__tensor_unflatten__(tensors, context, shape, None)
    if is_parameter:
        new = torch.nn.Parameter(new, requires_grad)
    new.requires_grad_(requires_grad)
    new.__dict__.update(marks)
    return new


torch.serialization.add_safe_globals([rebuild, QuantSpec, formats.format_named])
