"""Quantized tensors: a logical shape and dtype over up to two planes of FP8 codes.

``rowwise`` has data of the logical shape, ``columnwise`` the transposed 2-D view stored
contiguously (what GEMMs that contract over the rows read: Hopper's FP8 GEMM takes only K-major
operands).

A batched weight (E, N, K) consists of E matrices, each quantized by itself. Its columnwise plane is
(E, K, N). Views of whole matrices can be written.

Planes belong to a :class:`~fp8rs.tensor.store.Store`, as the bytes of a plain tensor belong to its
storage. A tensor, its detached aliases and its views share one, so a plane that is written, made or
dropped through one of them changes for all. A view of consecutive elements can be written. Other
views can be read only.

Operators are implemented in :mod:`fp8rs.tensor.aten`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from typing_extensions import Self

from fp8rs._torch import disabled_torch_function, is_traced, note_write, own_part
from fp8rs.tensor import dcp, formats, writes
from fp8rs.tensor.formats import BlockFormat
from fp8rs.tensor.planes import Plane as Plane
from fp8rs.tensor.planes import check_planes
from fp8rs.tensor.spec import QuantSpec, default_spec
from fp8rs.tensor.store import NO_SINGLE_MEMORY, Delayed, Store
from fp8rs.tensor.wrapper import PLANES, TENSOR_TYPES, StoreTensor


class QuantizedTensor(StoreTensor):
    """A tensor whose storage is FP8 planes. It looks like ``shape`` and ``dtype``.

    Views share the planes. Writes through views of consecutive elements reach the tensor:
    ``view(-1)``, rows, parts of one row. Other views raise an error when they are written. Views of
    whole blocks have planes of their own shape. In other views, both planes are None: they are read
    by ``dequantize()``.
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
            own, asked = (plane.format.name, plane.data.dtype), (spec.format.name, spec.fp8_dtype)
            if own != asked:
                raise ValueError(f"spec is of format {asked}, but the planes are of format {own}")
        return cls.over(Store(rowwise, columnwise, spec), shape, dtype, requires_grad)

    #: The handlers of operators, filled by `fp8rs.tensor.aten`.
    handlers: ClassVar[dict[Any, Callable[..., Any]]] = {}

    #: Whether copies into it are pieces of a shard that DCP loads.
    loads_pieces: ClassVar[bool] = False

    # The C++ operators come straight to __torch_dispatch__.
    __torch_function__ = disabled_torch_function  # type: ignore[assignment]

    # --- planes -----------------------------------------------------------------------------------

    @property
    def rowwise(self) -> Plane | None:
        """The plane with data of the logical shape."""
        return self.planes[0] if self._store_view else self._store.rowwise

    @property
    def columnwise(self) -> Plane | None:
        """The plane with data of the transposed 2-D view, stored contiguously."""
        return self.planes[1] if self._store_view else self._store.columnwise

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
        return row or col or self.plane("rowwise" if self._store.rowwise else "columnwise", "this")

    def plane(self, name: str, operation: str) -> Plane:
        """Return the plane called ``name``.

        Raises:
            ValueError: it is missing. The message names ``operation``.
        """
        plane: Plane | None = getattr(self, name)
        if plane is None:
            reason = ""
            if getattr(self._store, name) is not None:
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
        """Make (True) or drop (False) planes in place; None leaves a plane as it is.

        A plane is made from the other one, exactly, where the blocks are square. Aliases
        (``detach()``, ``nn.Parameter(t)``) and views share the planes: for them too it is there or
        gone.

        Raises:
            ValueError: no plane would be left, or the missing plane cannot be made from the other
                (the message names it), or this is a view.
        """
        if self._store_view:
            raise ValueError(
                f"update_usage of this view of a quantized tensor, of shape {tuple(self.shape)}, "
                "is not possible: its planes belong to the whole tensor. Call it on that, or on a "
                "clone() of the view"
            )
        store = self._store
        kept = list(self.planes)
        for i, (name, wanted) in enumerate(zip(PLANES, (rowwise, columnwise), strict=True)):
            if wanted and kept[i] is None:
                kept[i] = self.made(name, f"update_usage({name}=True)")
            elif wanted is False:
                kept[i] = None
        if kept == [None, None]:
            raise ValueError("update_usage(rowwise, columnwise) would leave no plane")
        store.rowwise, store.columnwise = kept
        return self

    def made(self, name: str, operation: str) -> Plane:
        """Return the plane called ``name``, made from the other one.

        Raises:
            ValueError: the blocks are not square. The message names ``operation``.
        """
        made = self.any_plane().transposed(name, operation)
        if name == "rowwise":
            made.data = made.data.view(self.shape)
        return made

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

        Scales are written too. If this is a view that shares scales with other elements, these
        keep their values: scales stay, or change by powers of two.

        Raises:
            TypeError, ValueError: ``src`` has another shape or device, or cannot be quantized.
            NotImplementedError: this is a view whose elements are not consecutive.
        """
        self.write(src, self.spec, self._store.delayed)
        return self

    def write(
        self, src: Tensor, spec: QuantSpec, delayed: Delayed | None, keep: bool = False
    ) -> None:
        """Quantize ``src`` as ``quantize_`` does, with another spec of the same format.

        It is a method because compilers put a tensor's method into a graph as it is. Torch 2.11
        cannot trace how `writes` reads storages.

        Args:
            src: values, or another quantized tensor.
            spec: how to quantize, in the format of this tensor.
            delayed: for delayed scaling, the scale to read and the amax to raise.
            keep: elements that do not change keep their codes.
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
        src = src.detach()
        store, offset = self._store, int(self.storage_offset())
        if writes.write(store, offset, src, spec, delayed, keep):
            note_write(self)
        if (observer := store.active_observer) is not None:
            observer.observe_write(self, src, exact=not keep)

    def check_writable(self) -> None:
        """Check that writes to this tensor reach its store.

        Raises:
            NotImplementedError: this is a view of elements that are not consecutive, or of parts of
                the matrices of a batch.
        """
        if not self._store_view:
            return
        store = self._store
        size = store.extent[1] if store.batched and self.numel() else 1
        if not self.is_contiguous() or self.storage_offset() % size or self.numel() % size:
            elements = "whole matrices" if store.batched else "consecutive elements"
            raise NotImplementedError(
                f"cannot write through a view of shape {tuple(self.shape)} with strides "
                f"{self.stride()} of a quantized tensor {store.matrix}: it does not consist of "
                f"{elements}. Write slices of the first dimension or view(-1), or dequantize() the "
                "tensor, change the values and copy_() them back"
            )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # No values: reading them would synchronise, and a repr must not.
        planes = [name for name in PLANES if getattr(self, name) is not None]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"fp8_dtype={self.fp8_dtype}, format={self.format.name!r}, planes={planes}, "
            f"device={str(self.device)!r}, requires_grad={self.requires_grad})"
        )

    # --- torch.distributed.checkpoint -------------------------------------------------------------

    def __create_write_items__(self, fqn: str, whole: Tensor) -> list[Any]:
        return dcp.write_items(fqn, whole)

    def __get_tensor_shard__(self, index: Any = None) -> QuantizedTensor:
        shard: Any = self.view_of(self.geometry)
        shard.__class__ = LoadedShard
        found: LoadedShard = shard
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return cls.handlers[func](func, *args, **(kwargs or {}))


class LoadedShard(QuantizedTensor):
    """An alias of a quantized tensor, into which DCP copies the pieces that it loads.

    Pieces are rows, and columns if tensor parallelism shards columns. Codes can be copied into
    parts of the matrices of a batch. Values are written to whole matrices.
    """

    loads_pieces = True

    def check_writable(self) -> None:
        """Check that this is a part of the tensor that DCP may load."""
        if self.box is None:
            super().check_writable()

    def write(
        self, src: Tensor, spec: QuantSpec, delayed: Delayed | None, keep: bool = False
    ) -> None:
        """Quantize ``src``. Columns are written with the rest of their rows.

        Raises:
            NotImplementedError: these are parts of the matrices of a batch.
        """
        box = self.box
        if box is None or self._store.batched or self.is_contiguous():
            super().check_writable()
            return super().write(src, spec, delayed, keep)
        cols = self._store.extent[1]
        size, offset = (self.shape[0], cols), box[0].start * cols
        rows = self.view_of((size, (cols, 1), offset))
        values = rows.dequantize(src.dtype)
        values[:, box[1]] = src
        return rows.write(values, spec, delayed, keep=True)


class Float8Tensor(QuantizedTensor):
    """FP8 codes with fp32 scales: per tensor, per row or per block, as the planes' format says."""

    scale_dtype = torch.float32


class MXFP8Tensor(QuantizedTensor):
    """FP8 codes with a power-of-two E8M0 scale for each block of 1x32 or 32x32."""

    scale_dtype = torch.float8_e8m0fnu


TENSOR_TYPES.update((kind.scale_dtype, kind) for kind in (Float8Tensor, MXFP8Tensor))


def wrap(
    store: Store, shape: Iterable[int], dtype: torch.dtype, requires_grad: bool = False
) -> QuantizedTensor:
    """Return the quantized tensor over a store, of the class for its format.

    See `QuantizedTensor` for the arguments. The planes are not checked.
    """
    _check_dtype(dtype)
    kind = cast(type[QuantizedTensor], TENSOR_TYPES[store.format.scale_dtype])
    return kind.over(store, torch.Size(shape), dtype, requires_grad)


def is_fp8(parameter: Any) -> bool:
    """Return whether a parameter, sharded or not, is an FP8 weight."""
    return isinstance(own_part(parameter), QuantizedTensor)


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in formats.LOGICAL_DTYPES:
        raise TypeError(f"dtype must be float32, bfloat16, float16 or float64, not {dtype!r}")
