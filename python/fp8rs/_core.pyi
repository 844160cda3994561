"""The compiled core.

Most operators have their kernels in it, which ``register_kernels`` hands to torch. The functions
that take tensors are kernels of operators that declare a write; they write into what the caller
allocated. Tensors are dense, on the CPU or one CUDA device, and are read as matrices. TypeError and
ValueError name the argument and, like UnsupportedError, are raised before anything is written.
CudaError is the driver's: it may come after earlier launches of the same call were queued, so that
what the outputs hold is not known.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias, TypedDict

from torch import Tensor

__all__ = [
    "CudaError",
    "UnsupportedError",
    "__version__",
    "adamw",
    "block_formats",
    "check_offsets",
    "cpu_features",
    "multi_quantize",
    "multi_quantize_delayed",
    "multi_rescale",
    "random_uniform",
    "register_kernels",
    "set_cpu_simd",
    "sum_rows",
    "zero_tail",
]

_Tensors: TypeAlias = list[Tensor] | tuple[Tensor, ...]

class _BlockFormat(TypedDict):
    name: str
    block: tuple[int, int]
    scale_dtype: Literal["float32", "float8_e8m0fnu"]
    scales_by_columns: bool
    in_adamw: bool

__version__: str

class CudaError(RuntimeError):
    code: int | None
    name: str | None
    is_out_of_memory: bool

class UnsupportedError(RuntimeError): ...

def cpu_features() -> Literal["scalar", "avx2", "avx512"]: ...
def set_cpu_simd(level: Literal["scalar", "avx2", "avx512"] | None) -> None: ...
def block_formats() -> list[_BlockFormat]:
    """Return the crate's table of formats: all but that with one scale per tensor.

    A size of -1 in a block is the whole extent.
    """

def register_kernels(tensor: type[Tensor], raiser: object) -> list[str]:
    """Register the operators' kernels with torch, once; gives the operators that have one.

    ``raiser`` raises the exception that it, or its ``__torch_function__``, is called with. Raises
    UnsupportedError where torch's C interface lacks something.
    """

def multi_quantize(xs: _Tensors, scales: Tensor, outs: _Tensors, batched: bool = False) -> None: ...
def multi_quantize_delayed(
    xs: _Tensors,
    scales: Tensor,
    amaxes: Tensor,
    scales_used: Tensor,
    outs: _Tensors,
    batched: bool = False,
) -> None: ...
def multi_rescale(
    codes: _Tensors, scales: Tensor, new_scales: Tensor, width: int | None = None
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
    exp_avg_ranges: _Tensors,
    exp_avg_sq_ranges: _Tensors,
    offsets: Sequence[int],
    streams: Sequence[int],
    lr_tensor: Tensor | None = None,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
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
    batched: bool = False,
) -> None: ...
def random_uniform(
    x: Tensor,
    seed: int,
    offset: int = 0,
    low: float = 0.0,
    high: float = 1.0,
    stream: int = 0,
    step: Tensor | None = None,
) -> None: ...
def sum_rows(out: Tensor, x: Tensor, divisor: float) -> None: ...
def check_offsets() -> None: ...
def zero_tail(out: Tensor, ends: Tensor) -> None: ...
