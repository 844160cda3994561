"""Quantized tensors: a logical shape and dtype over up to two planes of FP8 codes.

``rowwise`` has data of the logical shape, ``columnwise`` the transposed 2-D view stored
contiguously (what GEMMs that contract over the rows read: Hopper's FP8 GEMM takes only K-major
operands).

A batched weight (E, N, K) consists of E matrices, each quantized by itself. Its columnwise plane is
(E, K, N). Views of whole matrices share memory with it. Other views of it can be read only.

Planes belong to a :class:`~fp8rs.tensor.store.Store`, as the bytes of a plain tensor belong to its
storage. A tensor, its detached aliases and its views share one, so a plane that is written, made or
dropped through one of them changes for all. A view also has a
:class:`~fp8rs.tensor.windows.Window` on the store.

Operators are implemented in :mod:`fp8rs.tensor.aten` and its neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import Self

from fp8rs._torch import disabled_torch_function, is_traced
from fp8rs.tensor import dcp, formats, pickles, writes
from fp8rs.tensor.formats import BlockFormat
from fp8rs.tensor.planes import Plane as Plane
from fp8rs.tensor.planes import check_planes
from fp8rs.tensor.spec import QuantSpec, default_spec
from fp8rs.tensor.store import NO_SINGLE_MEMORY, Delayed, Store
from fp8rs.tensor.table import HANDLERS
from fp8rs.tensor.wrapper import PLANES, TENSOR_TYPES, StoreTensor, tensor_over


class QuantizedTensor(StoreTensor):
    """A tensor whose storage is FP8 planes. It looks like ``shape`` and ``dtype``.

    Views share the planes, and writes through them land. Those made of whole blocks have planes of
    their own shape; of others (``view(-1)`` where blocks are two-dimensional, a slice that cuts
    blocks) both planes are None: they are read by ``dequantize()`` and written like any other.
    """

    @staticmethod
    def __new__(
        cls,
        rowwise: Plane | None = None,
        columnwise: Plane | None = None,
        *,
        shape: Iterable[int],
        dtype: torch.dtype,
        requires_grad: bool = False,
        spec: QuantSpec | None = None,
        delayed: Delayed | None = None,
    ) -> Self:
        """A tensor over planes, which it does not copy.

        Args:
            rowwise: plane with data of the logical shape, or None.
            columnwise: plane with data of the transposed 2-D view, (last dim, product of the
                leading dims), or None; for a batch (E, N, K), (E, K, N). At least one plane is
                given. The shape of its scales says whether the tensor is a batch (`Plane`).
            shape: the logical shape.
            dtype: the logical dtype: what dequantizing gives.
            requires_grad: as in torch.
            spec: how ``quantize_`` and in-place operations quantize; by default with scales from
                the data and the planes' format.
            delayed: for delayed scaling, the scale that they read and the amax that they raise,
                each fp32 of one element.

        Raises:
            TypeError, ValueError: the planes do not fit the shape, their format or each other, or
                ``spec`` or ``delayed`` not them.
        """
        plane = rowwise if rowwise is not None else columnwise
        if plane is None:
            raise ValueError("rowwise and columnwise are both None: one plane must be given")
        shape = torch.Size(shape)
        if cls.scale_dtype is not None and plane.scale.dtype != cls.scale_dtype:
            raise TypeError(
                f"{cls.__name__} has scales of {cls.scale_dtype}, not {plane.scale.dtype}"
            )
        if dtype not in formats.LOGICAL_DTYPES:
            raise TypeError(f"dtype must be float32, bfloat16, float16 or float64, not {dtype!r}")
        check_planes(rowwise, columnwise, shape)
        check_writing(plane, spec, delayed)
        store = Store(rowwise, columnwise, spec, delayed)
        return cls.over(store, shape, dtype, requires_grad)

    # The C++ operators come straight to __torch_dispatch__.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    # --- planes -----------------------------------------------------------------------------------

    @property
    def rowwise(self) -> Plane | None:
        """The plane with data of the logical shape. Assigning to a view's makes it no view."""
        return self._store.rowwise if self._window is None else self.planes[0]

    @rowwise.setter
    def rowwise(self, plane: Plane | None) -> None:
        self._be_no_view()
        self._store.rowwise = plane

    @property
    def columnwise(self) -> Plane | None:
        """The plane with data of the transposed 2-D view, stored contiguously."""
        return self._store.columnwise if self._window is None else self.planes[1]

    @columnwise.setter
    def columnwise(self, plane: Plane | None) -> None:
        self._be_no_view()
        self._store.columnwise = plane

    def _be_no_view(self) -> None:
        """Stop being a view: a store of one's own, with the planes that were shown."""
        if self._window is not None:
            self._store = Store(*self.planes, self._store.spec, self._store.delayed)
            self._window = self._shown = None

    @property
    def fp8_dtype(self) -> torch.dtype:
        """The element type of the codes."""
        return self._store.any_plane.data.dtype

    @property
    def format(self) -> BlockFormat:
        """The format of the planes."""
        return self._store.any_plane.format

    @property
    def spec(self) -> QuantSpec:
        """How what is written to this tensor is quantized."""
        store = self._store
        plane = store.any_plane
        return store.spec or default_spec(plane.format, plane.data.dtype, plane.batched)

    def any_plane(self) -> Plane:
        """Return the rowwise plane, or the columnwise one if the rowwise one is missing.

        Raises:
            ValueError: this is a view without planes, because it splits blocks.
        """
        row, col = self.planes
        plane = row if row is not None else col
        if plane is None:
            raise ValueError(f"{self._view_in_words} has no planes: {self._why_none}")
        return plane

    def plane(self, name: str, operation: str) -> Plane:
        """The plane called ``name``; ValueError naming it and ``operation`` if it is missing."""
        plane: Plane | None = getattr(self, name)
        if plane is None:
            reason = f": {self._why_none}" if getattr(self._store, name) is not None else ""
            raise ValueError(
                f"{operation} needs the {name} plane, which this tensor does not have{reason}"
            )
        return plane

    @property
    def _view_in_words(self) -> str:
        return f"this view of a quantized tensor, of shape {tuple(self.shape)},"

    @property
    def _why_none(self) -> str:
        return (
            f"it is not made of whole blocks of format {self.format.name!r}. "
            "Read it by dequantize(), write it by copy_()"
        )

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """A plain tensor: code times scale in fp32, then one cast to ``dtype`` (the logical one).

        Either plane will do. Raises RuntimeError if the storage was freed by a reshard.
        """
        dtype = self.dtype if dtype is None else dtype
        if not isinstance(dtype, torch.dtype):  # of other dtypes the operator speaks
            raise TypeError(f"dtype must be float32, bfloat16 or float16, not {dtype!r}")
        return self.region.values(dtype)

    def update_usage(
        self, rowwise: bool | None = None, columnwise: bool | None = None
    ) -> QuantizedTensor:
        """Make (True) or drop (False) planes in place; None leaves a plane as it is.

        A plane is made from the other one, exactly, where the blocks are square. Aliases
        (``detach()``, ``nn.Parameter(t)``) and views share the planes: for them too it is there or
        gone.

        Raises:
            ValueError: no plane would be left, or the missing plane cannot be made from the other
                (the message names it), or this is a view.
        """
        if self._window is not None:
            raise ValueError(
                f"update_usage of {self._view_in_words} is not possible: its planes belong to "
                "the whole tensor. Call it on that, or on a clone() of the view"
            )
        self.region.update_usage(rowwise, columnwise)
        return self

    def get_high_precision_init_val(self) -> Tensor | None:
        """A weight's values before the first rounding, on the CPU; None if they were not kept.

        ``quantized_init(preserve_high_precision_init_val=True)`` keeps them. The local
        tensor of a sharded weight has the values of its shard.
        """
        observer = self._store.observer
        return None if observer is None else observer.init_value

    def clear_high_precision_init_val(self) -> None:
        """Free the values from before the first rounding."""
        if self._store.observer is not None:
            self._store.observer.forget_init()

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
        codes = self._store.any_plane.data
        if is_traced(codes):
            return 0
        if not self._is_weight:
            raise RuntimeError(f"data_ptr() of a {type(self).__name__}: {NO_SINGLE_MEMORY}")
        return codes.data_ptr()

    def share_memory_(self) -> Self:
        """Move codes and scales to shared memory. For a view, the whole tensor moves."""
        for x in self._store.tensors():
            x.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether codes and scales are in shared memory."""
        return all(x.is_shared() for x in self._store.tensors())

    # --- writes -----------------------------------------------------------------------------------

    def quantize_(self, src: Tensor) -> Self:
        """Quantize ``src`` (same shape and device) into this tensor's planes, in place.

        Scales are written too. Where this is a view that shares scales with other elements, these
        keep their values: scales stay, or move by powers of two.

        Raises:
            TypeError, ValueError: ``src`` has another shape or device, or cannot be quantized.
        """
        self.write(src, self.spec, self._store.delayed)
        return self

    def write(self, src: Tensor, spec: QuantSpec, delayed: Delayed | None) -> None:
        """Quantize ``src`` as ``quantize_`` does, with another spec of the same format.

        It is a method because compilers put a tensor's method into a graph as it is. Torch 2.11
        cannot trace how `writes` reads storages.
        """
        writes.quantize(self, src, spec, delayed)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        planes = [n for n, p in zip(PLANES, self.planes, strict=True) if p is not None]
        # No values: reading them would synchronise, and a repr must not.
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"fp8_dtype={self.fp8_dtype}, format={self.format.name!r}, "
            f"planes={planes}, device={str(self.device)!r}, requires_grad={self.requires_grad})"
        )

    # --- torch.distributed.checkpoint -------------------------------------------------------------

    def __create_write_items__(self, fqn: str, whole: Tensor) -> list[Any]:
        return dcp.write_items(fqn, whole)

    def __get_tensor_shard__(self, index: Any = None) -> QuantizedTensor:
        shard: Any = self.view_of(self._window)
        shard.__class__ = LoadedShard
        found: LoadedShard = shard
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        return pickles.rebuild, pickles.parts(self)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return HANDLERS[func](func, *args, **(kwargs or {}))


class LoadedShard(QuantizedTensor):
    """An alias of a quantized tensor, into which DCP copies the pieces that it loads."""

    loads_pieces = True


class Float8Tensor(QuantizedTensor):
    """FP8 codes with fp32 scales: per tensor, per row or per block, as the planes' format says."""

    scale_dtype = torch.float32


class MXFP8Tensor(QuantizedTensor):
    """FP8 codes with a power-of-two E8M0 scale for each block of 1x32 or 32x32."""

    scale_dtype = torch.float8_e8m0fnu


TENSOR_TYPES.update((kind.scale_dtype, kind) for kind in (Float8Tensor, MXFP8Tensor))


def wrap_planes(
    rowwise: Plane | None,
    columnwise: Plane | None,
    *,
    shape: Iterable[int],
    dtype: torch.dtype,
    requires_grad: bool = False,
    spec: QuantSpec | None = None,
    delayed: Delayed | None = None,
) -> QuantizedTensor:
    """The quantized tensor over these planes, of the class that their format calls for.

    The arguments are as for :class:`QuantizedTensor`. The planes are not checked.
    """
    if dtype not in formats.LOGICAL_DTYPES:
        raise TypeError(f"dtype must be float32, bfloat16, float16 or float64, not {dtype!r}")
    store = Store(rowwise, columnwise, spec, delayed)
    return cast(QuantizedTensor, tensor_over(store, torch.Size(shape), dtype, requires_grad))


def check_writing(plane: Plane, spec: QuantSpec | None, delayed: Delayed | None) -> None:
    """TypeError or ValueError where what is to say how a plane is written does not fit it."""
    if spec is not None:
        if not isinstance(spec, QuantSpec):
            raise TypeError(f"spec must be a QuantSpec or None, not {type(spec).__name__}")
        for what, own, asked in (
            ("of format", plane.format.name, spec.format.name),
            ("of", plane.data.dtype, spec.fp8_dtype),
        ):
            if own != asked:
                raise ValueError(f"spec is {what} {asked}, but the planes are {what} {own}")
    if delayed is None:
        return
    if not plane.format.per_tensor:
        raise ValueError(
            f"delayed is for one scale a tensor, but the planes are of format {plane.format.name!r}"
        )
    for name, t in zip(("scale", "amax"), delayed, strict=True):
        if t.dtype != torch.float32 or t.numel() != 1 or t.device != plane.data.device:
            raise ValueError(
                f"the {name} in delayed is {t.dtype} of shape {tuple(t.shape)} on {t.device}; it "
                f"must be float32 of one element on {plane.data.device}"
            )
