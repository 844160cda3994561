"""Tensors that have their values in a store: made over it, viewed, copied and traced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from fp8rs._torch import make_wrapper_subclass
from fp8rs.tensor import formats, windows
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.region import Region
from fp8rs.tensor.spec import Planes
from fp8rs.tensor.store import Store
from fp8rs.tensor.windows import Window

#: The names of the two planes.
PLANES = ("rowwise", "columnwise")

#: Attributes of a tensor that users do not set.
OWN_ATTRIBUTES = frozenset(("_store", "_window", "_shown", "_is_param"))


_plain_data: Any = torch.Tensor.data


class StoreTensor(Tensor):
    """Base of quantized tensors: a wrapper of a store, and of a window on it for a view.

    Copies of a tensor alone share its planes, as ``copy.copy`` of any; deep copies and pickles have
    planes of their own, and what users have set on the tensor.
    """

    #: Whether copies into it are pieces of a shard that DCP loads (`fp8rs.tensor.dcp`).
    loads_pieces: ClassVar[bool] = False

    #: Scale dtypes that a subclass stands for; checked at construction.
    scale_dtype: ClassVar[torch.dtype | None] = None

    _store: Store
    #: The store's elements that a view has. None for all of them in the store's own shape.
    _window: Window | None
    #: For a view, the store's planes and the parts of them that it shows.
    _shown: tuple[Plane | None, Plane | None, Planes] | None

    @classmethod
    def over(
        cls, store: Store, shape: torch.Size, dtype: torch.dtype, requires_grad: bool = False
    ) -> Self:
        """The tensor of a store whose planes have that logical shape; nothing is checked."""
        plane = store.rowwise
        if plane is None:
            plane = store.columnwise
            assert plane is not None
        self: Self = make_wrapper_subclass(
            cls, shape, dtype=dtype, device=plane.data.device, requires_grad=requires_grad
        )
        self._store = store
        self._window = None
        self._shown = None
        return self

    def view_of(self, window: Window | None) -> Self:
        """A view of this tensor's store; None is all of it, in the store's own shape."""
        if torch.is_inference_mode_enabled() and not self.is_inference():
            # torch gives views of a normal tensor that tensor's version counter, which a tensor
            # that was made in inference mode does not take.
            with torch.inference_mode(False):
                return self._view_of(window)
        return self._view_of(window)

    def _view_of(self, window: Window | None) -> Self:
        if window is None:
            row = self._store.rowwise
            return self.over(self._store, self.shape if row is None else row.data.shape, self.dtype)
        view: Self = make_wrapper_subclass(
            type(self),
            window.size,
            strides=window.stride,
            storage_offset=window.offset,
            dtype=self.dtype,
            device=self.device,
            requires_grad=False,
        )
        view._store = self._store
        view._window = window
        view._shown = None
        return view

    @property
    def planes(self) -> Planes:
        """Both planes."""
        store = self._store
        window = self._window
        if window is None:
            return store.rowwise, store.columnwise
        shown = self._shown
        # A store's planes change: FSDP's hooks refill a gathered weight's.
        if shown is None or shown[0] is not store.rowwise or shown[1] is not store.columnwise:
            planes = windows.shown(store.rowwise, store.columnwise, window, store.matrix)
            shown = self._shown = store.rowwise, store.columnwise, planes
        return shown[2]

    @property
    def region(self) -> Region:
        """Which elements of its store this has."""
        return Region(self._store, self._window, self.shape)

    # --- other tensors like this one --------------------------------------------------------------

    def like(
        self,
        rowwise: Plane | None,
        columnwise: Plane | None,
        *,
        shape: Iterable[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """A tensor of this class and specification over other planes, with the same observer."""
        shape = self.shape if shape is None else torch.Size(shape)
        store = self._store.over(rowwise, columnwise)
        return self.over(store, shape, self.dtype if dtype is None else dtype)

    def map(
        self, fn: Callable[[Tensor], Tensor], scale: Callable[[Tensor], Tensor] | None = None
    ) -> Self:
        """Apply ``fn`` to the data of each plane, and ``scale`` (default ``fn``) to its scale.

        It must not be a view without planes.
        """
        row, col = (None if plane is None else plane.map(fn, scale) for plane in self.planes)
        if self._store.one_scale and row is not None and col is not None:
            col.scale = row.scale  # one scale stays one
        return self.like(row, col)

    def _get_data(self) -> Any:
        """An alias outside autograd. Assigning a quantized tensor shares its planes from then on.

        Raises:
            TypeError: a plain tensor, or one of another class, is assigned.
        """
        return _plain_data.__get__(self)

    def _set_data(self, value: Any) -> None:
        if type(value) is not type(self):
            raise TypeError(
                f".data of a {type(self).__name__} must be one too, not a {type(value).__name__}: "
                "it would have to share the storage of what is assigned. Write values by copy_() "
                "or quantize_()"
            )
        _plain_data.__set__(self, value)
        self._store, self._window, self._shown = value._store, value._window, None

    data = property(_get_data, _set_data)

    # --- copies and compilers ---------------------------------------------------------------------

    def __copy__(self) -> Self:
        new = self.view_of(self._window)
        new.requires_grad_(self.requires_grad)
        for name, value in self.__dict__.items():
            new.__dict__.setdefault(name, value)
        return new

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if id(self) in memo:
            known: Self = memo[id(self)]
            return known
        if not self.is_leaf:
            raise RuntimeError("only leaves of the autograd graph can be copied by deepcopy")
        with torch.no_grad():
            new = self.view_of(self._window)
            memo[id(self)] = new
            # With its attributes: the planes, marks that users set, and that it is a parameter.
            new.__dict__.update(copy.deepcopy({**self.__dict__, "_shown": None}, memo))
        new.requires_grad_(self.requires_grad)
        if self.grad is not None:
            new.grad = copy.deepcopy(self.grad, memo)
        return new

    # The traceable wrapper protocol reads the store's tensors as attributes by name.
    _rowwise_data = property(lambda self: self._store.rowwise.data)
    _rowwise_scale = property(lambda self: self._store.rowwise.scale)
    _columnwise_data = property(lambda self: self._store.columnwise.data)
    _columnwise_scale = property(lambda self: self._store.columnwise.scale)
    _delayed_scale = property(lambda self: self._store.delayed[0])
    _delayed_amax = property(lambda self: self._store.delayed[1])

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """The names of the tensors that it is made of, and plain values that say how.

        The values are constant and compare by value: compilers guard on them.
        """
        store = self._store
        names: list[str] = []
        kinds: list[Any] = []
        for name, plane in zip(PLANES, (store.rowwise, store.columnwise), strict=True):
            kinds.append(None if plane is None else (plane.format.name, plane.lead))
            if plane is not None:
                names += [f"_{name}_data", f"_{name}_scale"]
        if store.one_scale:  # twice, it would be written twice
            names.remove("_columnwise_scale")
        if store.delayed is not None:
            names += ["_delayed_scale", "_delayed_amax"]
        offset = None if self._window is None else self._window.offset
        return names, (self.dtype, tuple(kinds), store.spec, offset)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any
    ) -> Self:
        dtype, kinds, spec, offset = context
        row, col = (
            None
            if kind is None
            else Plane(
                inner[f"_{name}_data"],
                inner[f"_{name}_scale" if f"_{name}_scale" in inner else "_rowwise_scale"],
                formats.FORMATS[kind[0]],
                kind[1],
            )
            for name, kind in zip(PLANES, kinds, strict=True)
        )
        delayed = None
        if "_delayed_scale" in inner:
            delayed = inner["_delayed_scale"], inner["_delayed_amax"]
        store = Store(row, col, spec, delayed)
        if offset is None:
            return cls.over(store, outer_size, dtype)
        of = cls.over(store, torch.Size(store.matrix), dtype)
        return of._view_of(Window(tuple(outer_size), tuple(outer_stride), offset))


#: The public classes, by the dtype of their scales.
TENSOR_TYPES: dict[torch.dtype, type[StoreTensor]] = {}


def tensor_over(
    store: Store, shape: torch.Size, dtype: torch.dtype, requires_grad: bool = False
) -> StoreTensor:
    """The quantized tensor of a store, of the class that its format calls for; unchecked."""
    return TENSOR_TYPES[store.format.scale_dtype].over(store, shape, dtype, requires_grad)
