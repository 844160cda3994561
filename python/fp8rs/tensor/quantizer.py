"""`Quantizer`, which quantizes high-precision tensors in one format.

Linear layers need planes without a tensor around them. They call
`fp8rs.quantize.cast.quantize_planes`, as a quantizer does.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

import torch
from torch import Tensor

from fp8rs._torch import constant_when_traced
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.formats import INPUT_DTYPES, BlockFormat, check_fp8_dtype, split_batch
from fp8rs.quantize.planes import Plane
from fp8rs.quantize.recipes import (
    Recipe,
    RecipeName,
    Role,
    check_choice,
    quant_spec,
    resolve_recipe,
)
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
    scale = None
    amax = None
    if delayed is not None:
        scale, amax = delayed
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
    """Quantizes tensors as an operand of a recipe's GEMMs.

        fp8rs.Quantizer("block")(weight)
        fp8rs.Quantizer("block", role="input", columnwise=False)(x)

    Args:
        recipe: a recipe or its short name. A `QuantSpec`, such as `QuantizedTensor.spec`, also
            describes formats that are no operand of a recipe.
        role: the operand, "input", "weight" or "grad". It is not used with a `QuantSpec`.
        rowwise: whether results have a rowwise plane.
        columnwise: whether results have a columnwise plane.
        delayed: the scale and the amax of delayed scaling, both fp32 tensors of one element. The
            scale is read at every call and never written. Each call writes the maximum of the
            amax and the data's amax. If the data has NaN or Inf, the amax is not written and the
            result's scale is NaN. By default, scales are computed from the data.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(
        self,
        recipe: Recipe | RecipeName | QuantSpec,
        role: Role = "weight",
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        delayed: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        if isinstance(recipe, QuantSpec):
            spec = recipe
        else:
            check_choice("role", role, get_args(Role))
            spec = quant_spec(resolve_recipe(recipe), role)
        check_fp8_dtype(spec.fp8_dtype)

        if delayed is not None:
            scale, amax = delayed
            delayed = _scalar(scale, "scale"), _scalar(amax, "amax")

        self.spec = spec
        self.delayed = delayed
        self._key = _key_of(spec)
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
        if rowwise is None:
            rowwise = self.rowwise
        if columnwise is None:
            columnwise = self.columnwise
        if not rowwise and not columnwise:
            raise ValueError("rowwise and columnwise are both False, but one plane is required")
        self.rowwise = bool(rowwise)
        self.columnwise = bool(columnwise)

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
        if not isinstance(x, Tensor):
            raise TypeError(f"x must be a tensor, not {type(x).__name__}")
        if isinstance(x, QuantizedTensor):
            x = x.dequantize()
        elif type(x) is not Tensor:
            x = x.detach()
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
        device: torch.device | str | int | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """Return a tensor with this quantizer's planes, uninitialized codes, and scales of 1."""
        shape = torch.Size(shape)
        batch, (rows, cols) = split_batch(shape, self.spec.batched)

        def empty_plane(data_shape: tuple[int, ...], rows: int, cols: int) -> Plane:
            data = torch.empty(data_shape, dtype=self.fp8_dtype, device=device)
            scale = torch.ones(self.format.scale_shape(rows, cols, batch), device=device)
            return Plane(data, scale.to(self.format.scale_dtype), self.format)

        row = None
        if self.rowwise:
            row = empty_plane(shape, rows, cols)
        col = None
        if self.columnwise:
            # A columnwise plane stores the transposed matrices.
            col = empty_plane((*batch, cols, rows), cols, rows)
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
        planes = []
        if self.rowwise:
            planes.append("rowwise")
        if self.columnwise:
            planes.append("columnwise")
        block = "" if self.format.per_tensor else f", block={self.format.block}"
        return f"Quantizer({self.fp8_dtype}, planes={planes}{block})"


def _scalar(value: Tensor, name: str) -> Tensor:
    """Return a tensor of one fp32 element in shape (), or raise an error with its name."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, not {type(value).__name__}")
    if value.dtype != torch.float32:
        raise TypeError(f"{name} must be float32, not {value.dtype}")
    if value.numel() != 1:
        raise ValueError(f"{name} must have one element, not shape {tuple(value.shape)}")
    return value.view(())


# torch.load(weights_only=True) loads only classes that are registered.
torch.serialization.add_safe_globals([Quantizer])
