"""The compiled core. Functions write into tensors that the caller allocated.

Tensors are dense, on the CPU or one CUDA device, and are read as matrices. TypeError and ValueError
name the argument and, like UnsupportedError, are raised before anything is written. CudaError is
the driver's: it may come after earlier launches of the same call were queued, so that what the
outputs hold is not known.

Absolute maxima that are given (``amax``, ``amaxes``, ``amax_columnwise``) must not be negative:
they are not checked, because that would wait for the device.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from torch import Tensor

__all__ = [
    "CudaError",
    "UnsupportedError",
    "__version__",
    "adamw",
    "amax",
    "block_amax",
    "cpu_features",
    "dequantize",
    "multi_amax",
    "multi_quantize",
    "multi_quantize_delayed",
    "pack_scales",
    "quantize",
    "quantize_blocks",
    "quantize_current",
    "quantize_delayed",
    "random_uniform",
    "rebase",
    "register_kernels",
    "scale_from_amax",
    "set_cpu_simd",
    "transpose",
    "unpack_scales",
]

_Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]

__version__: str

class CudaError(RuntimeError):
    code: int | None
    name: str | None
    is_out_of_memory: bool

class UnsupportedError(RuntimeError): ...

def cpu_features() -> Literal["scalar", "avx2", "avx512"]: ...
def set_cpu_simd(level: Literal["scalar", "avx2", "avx512"] | None) -> None: ...
def register_kernels(tensor: type[Tensor], raiser: object) -> list[str]:
    """Register the operators' kernels with torch, once; gives the operators that have one.

    ``raiser`` raises the exception that it, or its ``__torch_function__``, is called with. Raises
    UnsupportedError where torch's C interface lacks something; nothing is registered then.
    """

def amax(x: Tensor, out: Tensor) -> None: ...
def multi_amax(xs: _Tensors, out: Tensor) -> None: ...
def scale_from_amax(
    amax: Tensor,
    scale_out: Tensor,
    fp8_dtype: Literal["e4m3", "e5m2"],
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    margin: int = 0,
) -> None: ...
def quantize(
    x: Tensor, scale: Tensor, rowwise: Tensor | None, columnwise: Tensor | None
) -> None: ...
def quantize_delayed(
    x: Tensor,
    scale: Tensor,
    amax: Tensor,
    scale_used: Tensor,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
) -> None: ...
def quantize_current(
    x: Tensor,
    scale_out: Tensor,
    rowwise: Tensor | None,
    columnwise: Tensor | None,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> None: ...
def multi_quantize(xs: _Tensors, scales: Tensor, outs: _Tensors) -> None: ...
def multi_quantize_delayed(
    xs: _Tensors,
    scales: Tensor,
    amaxes: Tensor,
    scales_used: Tensor,
    outs: _Tensors,
) -> None: ...
def transpose(codes: Tensor, out: Tensor) -> None: ...
def dequantize(
    codes: Tensor, scale: Tensor, block_rows: int, block_cols: int, out: Tensor
) -> None: ...
def block_amax(
    x: Tensor, block_rows: int, block_cols: int, out: Tensor, row_offset: int = 0
) -> None: ...
def quantize_blocks(
    x: Tensor,
    block_rows: int,
    block_cols: int,
    rowwise: Tensor | None,
    rowwise_scale: Tensor | None,
    columnwise: Tensor | None,
    columnwise_scale: Tensor | None,
    *,
    rounding: str = "ceil",
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
    packed: bool = False,
    row_offset: int = 0,
    amax: Tensor | None = None,
    amax_columnwise: Tensor | None = None,
    fold: Tensor | None = None,
) -> None: ...
def pack_scales(scale: Tensor, rows: int, block_rows: int, out: Tensor) -> None: ...
def unpack_scales(packed: Tensor, rows: int, block_rows: int, out: Tensor) -> None: ...
def rebase(
    codes: Tensor,
    scale: Tensor,
    block_rows: int,
    block_cols: int,
    axis: int,
    out: Tensor,
    scale_out: Tensor,
) -> None: ...
def adamw(
    grads: _Tensors,
    exp_avgs: _Tensors,
    exp_avg_sqs: _Tensors,
    params: _Tensors,
    masters: _Tensors,
    steps: _Tensors,
    scales: _Tensors,
    new_scales: _Tensors,
    amaxes: _Tensors,
    offsets: Sequence[int],
    streams: Sequence[int],
    lr_tensor: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    maximize: bool,
    seed: int | None,
    block: Sequence[int],
    rounding: str = "ceil",
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> None: ...
def random_uniform(
    x: Tensor, seed: int, offset: int, low: float, high: float, number: int, step: Tensor | None
) -> None: ...
