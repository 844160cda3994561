"""Quantized tensors: a logical shape and dtype over up to two planes of FP8 codes.

The data of the ``rowwise`` plane has the logical shape. The data of the ``columnwise`` plane is the
transposed 2-D view, stored contiguously. GEMMs that contract over the rows read the columnwise
plane, because Hopper's FP8 GEMM supports only K-major operands.

A batched weight (E, N, K) consists of E matrices, each quantized by itself. Its columnwise plane is
(E, K, N). Views of whole matrices can be written.

Planes belong to a `PlaneStorage`, as the bytes of a plain tensor belong to its storage. A tensor,
its detached aliases and its views share one, so a plane that is written, made or dropped through
one of them changes for all. A view of consecutive elements can be written. Other views can be read
only.

A view has the geometry that it would have over the contiguous values of the storage. A shallow
copy shares the planes. A deep copy and a pickle have planes of their own. Operators are implemented
in `fp8rs.tensor.aten`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from fp8rs._torch import (
    disabled_torch_function,
    is_traced,
    make_wrapper_subclass,
    note_write,
    own_part,
)
from fp8rs.quantize import formats
from fp8rs.quantize.formats import BlockFormat
from fp8rs.quantize.planes import Box, Planes, as_bytes, check_planes
from fp8rs.quantize.planes import Plane as Plane
from fp8rs.quantize.spec import QuantSpec, default_spec
from fp8rs.tensor import dcp
from fp8rs.tensor.plane_storage import (
    NO_SINGLE_MEMORY,
    Delayed,
    PlaneStorage,
    Write,
    WriteKind,
)

#: The names of the two planes.
PLANES = ("rowwise", "columnwise")

#: Attributes of a tensor that users have not set.
OWN_ATTRIBUTES = frozenset(("_storage", "_is_storage_view", "_is_param"))

#: The size, strides and offset of a view.
Geometry = tuple[Any, Any, Any]

_plain_data: Any = torch.Tensor.data


class QuantizedTensor(Tensor):
    """A tensor that stores FP8 planes. Its ``shape`` and ``dtype`` describe the values.

    Views share the planes. Writes through views of consecutive elements reach the tensor:
    ``view(-1)``, rows, parts of one row. Other views raise an error when they are written. Views of
    whole blocks have planes of their own shape. In other views, both planes are None. Read these
    views by ``dequantize()``.
    """

    #: The scale dtype of a subclass, checked at construction.
    scale_dtype: ClassVar[torch.dtype | None] = None

    _storage: PlaneStorage
    #: Whether this is a view, with some elements of the storage or in another shape.
    _is_storage_view: bool

    #: The handlers of operators, filled by `fp8rs.tensor.aten`.
    handlers: ClassVar[dict[Any, Callable[..., Any]]] = {}

    #: Whether copies into it are pieces of a shard that DCP loads.
    loads_pieces: ClassVar[bool] = False

    # Operators go to __torch_dispatch__ directly.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    def __new__(
        cls,
        rowwise: Plane | None = None,
        columnwise: Plane | None = None,
        *,
        shape: Iterable[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
        spec: QuantSpec | None = None,
    ) -> Self:
        """Make a tensor over planes, which are not copied.

        Args:
            rowwise: plane with data of the logical shape, or None.
            columnwise: plane with data of the transposed 2-D view, (last dim, product of the
                leading dims), or None; for a batch (E, N, K), (E, K, N). At least one plane is
                given. The shape of its scales says whether the tensor is a batch (`Plane`).
            shape: the logical shape.
            dtype: the logical dtype, which dequantized values have.
            requires_grad: as in torch.
            spec: how ``quantize_`` and in-place operations quantize. The default is the format of
                the planes, with scales from the data.

        Raises:
            TypeError, ValueError: the planes do not fit the shape or their format, or ``spec`` does
                not fit the planes.
        """
        plane = rowwise if rowwise is not None else columnwise
        if plane is None:
            raise ValueError("rowwise and columnwise are both None: one plane must be given")
        shape = torch.Size(shape)
        if cls.scale_dtype is not None and plane.scale.dtype != cls.scale_dtype:
            raise TypeError(
                f"{cls.__name__} has scales of {cls.scale_dtype}, not {plane.scale.dtype}"
            )
        _check_dtype(dtype)
        check_planes(rowwise, columnwise, shape)
        if spec is not None:
            plane_format = (plane.format.name, plane.data.dtype)
            spec_format = (spec.format.name, spec.fp8_dtype)
            if plane_format != spec_format:
                raise ValueError(
                    f"spec is of format {spec_format}, but the planes are of format {plane_format}"
                )
        return cls.over(PlaneStorage(rowwise, columnwise, spec), shape, dtype, requires_grad)

    @classmethod
    def over(
        cls,
        storage: PlaneStorage,
        shape: Any,
        dtype: torch.dtype,
        requires_grad: bool = False,
        stride: Any = None,
        offset: int | None = None,
    ) -> Self:
        """Return a tensor over a storage. Nothing is checked.

        Args:
            storage: the planes.
            shape: the logical shape.
            dtype: the logical dtype.
            requires_grad: as in torch.
            stride: for a view, the strides in elements over contiguous values of the storage. The
                default is all of the storage, in its own shape.
            offset: for a view, the index of its first element in these values.
        """
        self: Self = make_wrapper_subclass(
            cls,
            shape,
            strides=stride,
            storage_offset=offset,
            dtype=dtype,
            device=storage.any_plane.data.device,
            requires_grad=requires_grad,
        )
        self._storage = storage
        self._is_storage_view = stride is not None
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # No values: reading them would synchronise, and a repr must not.
        planes = [name for name in PLANES if getattr(self, name) is not None]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"fp8_dtype={self.fp8_dtype}, format={self.format.name!r}, planes={planes}, "
            f"device={str(self.device)!r}, requires_grad={self.requires_grad})"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return cls.handlers[func](func, *args, **(kwargs or {}))

    # --- planes -----------------------------------------------------------------------------------

    @property
    def rowwise(self) -> Plane | None:
        """The plane with data of the logical shape."""
        return self.planes[0] if self._is_storage_view else self._storage.rowwise

    @property
    def columnwise(self) -> Plane | None:
        """The plane with data of the transposed 2-D view, stored contiguously."""
        return self.planes[1] if self._is_storage_view else self._storage.columnwise

    @property
    def planes(self) -> Planes:
        """Both planes. A view has a plane if it begins with a block and keeps the rows' length.

        A view of a batch must consist of whole matrices.
        """
        storage = self._storage
        if self._is_storage_view:
            return storage.planes_of(self)
        return storage.rowwise, storage.columnwise

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The element type of the codes."""
        return self._storage.any_plane.data.dtype

    @property
    def format(self) -> BlockFormat:
        """The format of the planes."""
        return self._storage.any_plane.format

    @property
    def spec(self) -> QuantSpec:
        """How values are quantized when they are written to this tensor."""
        storage = self._storage
        plane = storage.any_plane
        return storage.spec or default_spec(plane.format, plane.data.dtype, plane.batched)

    def any_plane(self) -> Plane:
        """Return the rowwise plane, or the columnwise one if the rowwise one is missing.

        Raises:
            ValueError: this is a view without planes, because it splits blocks.
        """
        row, col = self.planes
        plane = row or col
        if plane is None:
            plane = self.plane("rowwise" if self._storage.rowwise else "columnwise", "this")
        return plane

    def plane(self, name: str, operation: str) -> Plane:
        """Return the plane called ``name``.

        Raises:
            ValueError: it is missing. The message names ``operation``.
        """
        plane: Plane | None = getattr(self, name)
        if plane is None:
            reason = ""
            if getattr(self._storage, name) is not None:
                reason = (
                    f": a view of shape {tuple(self.shape)} has no planes if it is not made of "
                    f"whole blocks of format {self.format.name!r}. Read it by dequantize()"
                )
            raise ValueError(
                f"{operation} needs the {name} plane, which this tensor does not have{reason}"
            )
        return plane

    def update_usage(
        self, rowwise: bool | None = None, columnwise: bool | None = None
    ) -> QuantizedTensor:
        """Make (True) or drop (False) planes in place. None leaves a plane as it is.

        If the blocks are square, a plane is made exactly from the other one. Aliases
        (``detach()``, ``nn.Parameter(t)``) and views share the planes, so this changes their planes
        too.

        Raises:
            ValueError: no plane would be left, or the missing plane cannot be made from the other
                (the message names it), or this is a view.
        """
        if self._is_storage_view:
            raise ValueError(
                f"update_usage of this view of a quantized tensor, of shape {tuple(self.shape)}, "
                "is not possible: its planes belong to the whole tensor. Call it on that, or on a "
                "clone() of the view"
            )
        storage = self._storage
        row, col = self.planes
        # A plane that is missing is made from the other one, even if that is dropped.
        new_row = row
        if rowwise and row is None:
            new_row = self.make_plane("rowwise", "update_usage(rowwise=True)")
        elif rowwise is False:
            new_row = None
        new_col = col
        if columnwise and col is None:
            new_col = self.make_plane("columnwise", "update_usage(columnwise=True)")
        elif columnwise is False:
            new_col = None

        if new_row is None and new_col is None:
            raise ValueError("update_usage(rowwise, columnwise) would leave no plane")
        storage.rowwise = new_row
        storage.columnwise = new_col
        return self

    def make_plane(self, name: str, operation: str) -> Plane:
        """Return the plane called ``name``, made from the other one.

        Raises:
            ValueError: the blocks are not square. The message names ``operation``.
        """
        plane = self.any_plane().transposed(name, operation)
        if name == "rowwise":
            plane.data = plane.data.view(self.shape)
        return plane

    def get_high_precision_init_val(self) -> Tensor | None:
        """Return a weight's values before the first rounding, on the CPU. None if not kept.

        ``quantized_init(preserve_high_precision_init_val=True)`` keeps them. The local
        tensor of a sharded weight has the values of its shard.
        """
        observer = self._storage.observer
        return None if observer is None else observer.init_value

    def clear_high_precision_init_val(self) -> None:
        """Free the values from before the first rounding."""
        if self._storage.observer is not None:
            self._storage.observer.forget_init()

    # --- views ------------------------------------------------------------------------------------

    @property
    def geometry(self) -> Geometry | None:
        """The size, strides and offset of a view. None for a tensor that is not a view."""
        if not self._is_storage_view:
            return None
        return self.shape, self.stride(), self.storage_offset()

    def view_of(self, geometry: Geometry | None) -> Self:
        """Return a view of this tensor's storage. None is all of it, in the storage's own shape."""
        storage = self._storage
        if geometry is not None:
            shape, stride, offset = geometry
        else:
            shape = self.shape if storage.rowwise is None else storage.rowwise.data.shape
            stride = None
            offset = None
        # A view of a normal tensor shares its version counter, which a tensor that is made in
        # inference mode cannot do.
        leaves_inference_mode = torch.is_inference_mode_enabled() and not self.is_inference()
        with torch.inference_mode(False) if leaves_inference_mode else nullcontext():
            return self.over(storage, shape, self.dtype, stride=stride, offset=offset)

    @property
    def box(self) -> Box | None:
        """The part of the storage that this tensor has, in order. None if it has other elements."""
        storage = self._storage
        if self._is_storage_view:
            return storage.box_of(self)
        return storage.box(slice(0, storage.rows_and_row_size[0]))

    @property
    def is_whole(self) -> bool:
        """Whether this has all elements of the storage, in order."""
        if not self._is_storage_view:
            return True
        return self.is_contiguous() and self.numel() == math.prod(self._storage.matrix)

    # --- reads and writes -------------------------------------------------------------------------

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
        storage = self._storage
        storage.any_plane.check_has_memory("this quantized tensor")
        row, col = self.planes
        if row is not None:
            return row.dequantize(dtype)
        if col is not None:
            return col.dequantize(dtype).mT.contiguous().view(self.shape)
        if not self.numel():
            return torch.empty(self.shape, dtype=dtype, device=self.device)

        # A view without planes: dequantize the rows around it, and take the view of these.
        stride = self.stride()
        offset = int(self.storage_offset())
        last = offset
        for size, step in zip(self.shape, stride, strict=True):
            last += (size - 1) * step
        rows = storage.rows_around(offset, last + 1)
        offset -= rows.start * storage.rows_and_row_size[1]
        part = storage.read(rows, dtype).as_strided(self.shape, stride, offset)
        return part.clone(memory_format=torch.contiguous_format)  # frees the other elements

    def quantize_(self, src: Tensor) -> Self:
        """Quantize ``src`` (same shape and device) into this tensor's planes, in place.

        Scales are written too. If this is a view that shares scales with other elements, the other
        elements keep their values: scales stay, or change by powers of two.

        Raises:
            TypeError, ValueError: ``src`` has another shape or device, or cannot be quantized.
            NotImplementedError: this is a view whose elements are not consecutive.
        """
        self.write(src, self.spec, self._storage.delayed)
        return self

    def write(
        self,
        src: Tensor,
        spec: QuantSpec,
        delayed: Delayed | None,
        kind: WriteKind = WriteKind.VALUES,
        exact_values: Tensor | None = None,
    ) -> None:
        """Quantize ``src`` as ``quantize_`` does, with another spec of the same format.

        This is a method because compilers put calls of a tensor's methods into a graph without
        tracing them. Torch 2.11 cannot trace how `PlaneStorage.write` reads storages.

        Args:
            src: values, or another quantized tensor.
            spec: how to quantize, in the format of this tensor.
            delayed: for delayed scaling, the scale to read and the amax to raise.
            kind: what is written: see `Write`.
            exact_values: for exact arithmetic, the values before it: see `Write`.
        """
        self.check_writable()
        if not isinstance(src, Tensor):
            raise TypeError(f"src must be a tensor, not {type(src).__name__}")
        if isinstance(src, QuantizedTensor):
            src = src.dequantize(src.dtype)
        if src.shape != self.shape:
            raise ValueError(f"src has shape {tuple(src.shape)}, but dst has {tuple(self.shape)}")
        if src.device != self.device:
            raise ValueError(f"src is on {src.device}, but dst is on {self.device}")
        if src.dtype == self.dtype == torch.float64:
            src = src.float()
        if src.dtype not in formats.INPUT_DTYPES:
            raise TypeError(f"src must be float32, bfloat16 or float16, not {src.dtype}")

        write = Write(kind, src.detach(), exact_values)
        storage = self._storage
        observer = storage.active_observer
        if storage.write(write, int(self.storage_offset()), spec, delayed, observer):
            note_write(self)
        if observer is not None:
            observer.observe_write(self, write)

    def check_writable(self) -> None:
        """Check that writes to this tensor reach its storage.

        Raises:
            NotImplementedError: this is a view of elements that are not consecutive, or of parts of
                the matrices of a batch.
        """
        if not self._is_storage_view:
            return
        storage = self._storage
        size = storage.rows_and_row_size[1] if storage.batched and self.numel() else 1
        if not self.is_contiguous() or self.storage_offset() % size or self.numel() % size:
            elements = "whole matrices" if storage.batched else "consecutive elements"
            raise NotImplementedError(
                f"cannot write through a view of shape {tuple(self.shape)} with strides "
                f"{self.stride()} of a quantized tensor {storage.matrix}: it does not consist of "
                f"{elements}. Write slices of the first dimension or view(-1), or dequantize() the "
                "tensor, change the values and copy_() them back"
            )

    # --- memory -----------------------------------------------------------------------------------

    @property
    def _is_weight(self) -> bool:
        """Whether this object is a parameter, or the local tensor of a sharded one."""
        return isinstance(self, torch.nn.Parameter)

    def data_ptr(self) -> int:
        """Return the address of the codes: of the rowwise plane, or else of the columnwise one.

        Optimizers and wrappers use it to distinguish parameters. It is 0 in a trace.

        Raises:
            RuntimeError: this is not a parameter. Codes and scales have different addresses, and
                code that reads or allocates memory for a state dict must not miss the scales.
        """
        codes = self._storage.any_plane.data
        if is_traced(codes):
            return 0
        if not self._is_weight:
            raise RuntimeError(f"data_ptr() of a {type(self).__name__}: {NO_SINGLE_MEMORY}")
        return codes.data_ptr()

    def share_memory_(self) -> Self:
        """Move codes and scales to shared memory. For a view, the whole tensor moves."""
        for x in self._storage.tensors():
            x.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Return whether codes and scales are in shared memory."""
        return all(x.is_shared() for x in self._storage.tensors())

    # --- other tensors like this one --------------------------------------------------------------

    def map(
        self,
        fn: Callable[[Tensor], Tensor],
        scale: Callable[[Tensor], Tensor] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Return a tensor over other planes, with the spec and observer of this tensor.

        This tensor must not be a view without planes.

        Args:
            fn: applied to all codes.
            scale: applied to all scales. The default is ``fn``.
            dtype: the logical dtype. The default is the dtype of this tensor.

        Raises:
            RuntimeError: the storage was freed by a reshard.
        """
        self._storage.any_plane.check_has_memory("this quantized tensor")
        row, col = (plane and plane.map(fn, scale) for plane in self.planes)
        if self._storage.shares_scale and row is not None and col is not None:
            col.scale = row.scale  # one scale stays one
        return self.over(self._storage.over(row, col), self.shape, dtype or self.dtype)

    def _set_data(self, value: Tensor) -> None:
        if type(value) is not type(self):
            raise TypeError(
                f".data of a {type(self).__name__} must be one too, not a {type(value).__name__}: "
                "it would have to share the storage of what is assigned. Write values by copy_() "
                "or quantize_()"
            )
        _plain_data.__set__(self, value)
        self._storage = value._storage
        self._is_storage_view = value._is_storage_view

    #: An alias outside autograd. If a quantized tensor is assigned, this tensor shares its planes.
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
        # Copy all attributes: planes, attributes that users set, and the mark of a parameter.
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        new.requires_grad_(self.requires_grad)
        if self.grad_dtype != self.dtype:  # it was set, and the gradient may have it
            new.grad_dtype = self.grad_dtype
        new.grad = copy.deepcopy(self.grad, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle plain parts, which ``torch.load(weights_only=True)`` accepts.

        A view is pickled as a tensor that is not a view. A view without planes is pickled as a
        plain tensor.
        """
        pickled: Tensor = self.detach().clone() if self._is_storage_view else self
        if not isinstance(pickled, QuantizedTensor):
            return pickled.__reduce_ex__(protocol)
        names, (dtype, kinds, spec, _) = pickled.__tensor_flatten__()

        # pickle alone does not support FP8 tensors, so store their bytes and their dtype.
        inner = {}
        for name in names:
            tensor: Tensor = getattr(pickled, name)
            inner[name] = as_bytes(tensor), tensor.dtype
        if spec is not None:
            spec = spec.without_group()
        context = dtype, kinds, spec, None

        marks = {}
        for name, value in self.__dict__.items():
            if name not in OWN_ATTRIBUTES:
                marks[name] = value
        is_parameter = isinstance(self, torch.nn.Parameter)
        return rebuild, (inner, context, tuple(self.shape), self.requires_grad, is_parameter, marks)

    # --- compilers --------------------------------------------------------------------------------

    # The traceable wrapper protocol reads the storage's tensors as attributes by name.
    _rowwise_data = property(lambda self: self._storage.rowwise.data)
    _rowwise_scale = property(lambda self: self._storage.rowwise.scale)
    _columnwise_data = property(lambda self: self._storage.columnwise.data)
    _columnwise_scale = property(lambda self: self._storage.columnwise.scale)
    _delayed_scale = property(lambda self: self._storage.delayed[0])
    _delayed_amax = property(lambda self: self._storage.delayed[1])

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of the inner tensors, and the other values that rebuild the tensor.

        These values are constant and compared by value, because compilers guard on them.
        """
        storage = self._storage
        names: list[str] = []
        kinds = []
        for name in PLANES:
            plane = getattr(storage, name)
            if plane is not None:
                names += f"_{name}_data", f"_{name}_scale"
                kinds.append((name, plane.format.name, plane.block_offset))
        if storage.shares_scale:  # a scale that is listed twice would be written twice
            names.remove("_columnwise_scale")
        if storage.delayed is not None:
            names += ["_delayed_scale", "_delayed_amax"]
        offset = self.storage_offset() if self._is_storage_view else None
        return names, (self.dtype, tuple(kinds), storage.spec, offset)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> Self:
        dtype, kinds, spec, offset = context
        planes = {}
        for name, format, block_offset in kinds:
            scale = inner.get(f"_{name}_scale")
            if scale is None:  # the planes share a scale
                scale = inner["_rowwise_scale"]
            planes[name] = Plane(
                inner[f"_{name}_data"], scale, formats.FORMATS[format], block_offset
            )
        delayed = None
        if "_delayed_scale" in inner:
            delayed = inner["_delayed_scale"], inner["_delayed_amax"]
        stride = None if offset is None else outer_stride
        storage = PlaneStorage(planes.get("rowwise"), planes.get("columnwise"), spec, delayed)
        return cls.over(storage, outer_size, dtype, stride=stride, offset=offset)

    # --- torch.distributed.checkpoint -------------------------------------------------------------

    def __create_write_items__(self, fqn: str, tensor: Tensor) -> list[Any]:
        return dcp.write_items(fqn, tensor)

    def __get_tensor_shard__(self, index: Any = None) -> QuantizedTensor:
        shard: QuantizedTensor = self.view_of(self.geometry)
        shard.__class__ = LoadedShard
        return shard


class LoadedShard(QuantizedTensor):
    """An alias of a quantized tensor, into which DCP copies the pieces that it loads.

    Pieces are rows. If tensor parallelism shards columns, they are parts of rows. In a batch, codes
    can be copied into parts of matrices. Values can be written to whole matrices only.
    """

    loads_pieces = True

    def check_writable(self) -> None:
        """Check that this is a part of the tensor that DCP may load."""
        if self.box is None:
            super().check_writable()

    def write(
        self,
        src: Tensor,
        spec: QuantSpec,
        delayed: Delayed | None,
        kind: WriteKind = WriteKind.VALUES,
        exact_values: Tensor | None = None,
    ) -> None:
        """Quantize ``src``. Columns are written with the rest of their rows.

        Raises:
            NotImplementedError: these are parts of the matrices of a batch.
        """
        box = self.box
        if box is None or self._storage.batched or self.is_contiguous():
            super().check_writable()
            return super().write(src, spec, delayed, kind, exact_values)
        cols = self._storage.rows_and_row_size[1]
        rows = self.view_of(((self.shape[0], cols), (cols, 1), box[0].start * cols))
        values = rows.dequantize(src.dtype)
        values[:, box[1]] = src
        return rows.write(values, spec, delayed, WriteKind.MERGED_COPY)


class Float8Tensor(QuantizedTensor):
    """FP8 codes with fp32 scales: per tensor, per row or per block, as the planes' format says."""

    scale_dtype = torch.float32


class MXFP8Tensor(QuantizedTensor):
    """FP8 codes with a power-of-two E8M0 scale for each block of 1x32 or 32x32."""

    scale_dtype = torch.float8_e8m0fnu


#: The public classes, by the dtype of their scales.
TENSOR_TYPES: dict[torch.dtype, type[QuantizedTensor]] = {
    torch.float32: Float8Tensor,
    torch.float8_e8m0fnu: MXFP8Tensor,
}


def wrap(
    storage: PlaneStorage, shape: Iterable[int], dtype: torch.dtype, requires_grad: bool = False
) -> QuantizedTensor:
    """Return the quantized tensor over a storage, of the class for its format.

    See `QuantizedTensor` for the arguments. The planes are not checked.
    """
    _check_dtype(dtype)
    kind = TENSOR_TYPES[storage.format.scale_dtype]
    return kind.over(storage, torch.Size(shape), dtype, requires_grad)


def is_fp8(parameter: Any) -> bool:
    """Return whether a parameter, sharded or not, is an FP8 weight."""
    return isinstance(own_part(parameter), QuantizedTensor)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in formats.LOGICAL_DTYPES:
        raise TypeError(f"dtype must be float32, bfloat16, float16 or float64, not {dtype!r}")


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
    _, kinds, *_ = context
    _, format, _ = kinds[0]
    kind = TENSOR_TYPES[formats.FORMATS[format].scale_dtype]
    new: Tensor = kind.__tensor_unflatten__(tensors, context, shape, None)
    if is_parameter:
        new = torch.nn.Parameter(new, requires_grad)
    new.requires_grad_(requires_grad)
    new.__dict__.update(marks)
    return new


torch.serialization.add_safe_globals([rebuild, QuantSpec, formats.format_named])
