"""FP8 training for PyTorch FSDP2, with weights that are quantized before the all-gather.

``import fp8rs`` registers the operators of ``torch.ops.fp8rs``. It does not create a CUDA context
and does not require a GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import ops  # isort: skip  (registers the operators)

from fp8rs.convert.convert import convert_to_float8_training, optimizer_stepped
from fp8rs.convert.high_precision import convert_to_high_precision
from fp8rs.convert.quantized_init import quantized_init
from fp8rs.convert.select import min_speedup
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.formats import BlockFormat
from fp8rs.quantize.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Recipe,
)
from fp8rs.quantize.spec import QuantSpec
from fp8rs.tensor.quantized import Float8Tensor, MXFP8Tensor, Plane, QuantizedTensor
from fp8rs.tensor.quantizer import Quantizer

from . import nn
from ._core import CudaError, UnsupportedError, __version__

if TYPE_CHECKING:
    from fp8rs import checkpoint, comm, export, fsdp, optim, tensor_parallel
    from fp8rs.convert.report import report
    from fp8rs.fsdp import precompute_float8_dynamic_scale_for_fsdp
    from fp8rs.monitoring.high_precision import high_precision
    from fp8rs.monitoring.monitor import Monitor, monitor

__all__ = [
    "BlockFormat",
    "CudaError",
    "DelayedScaling",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8Linear",
    "Float8RowwiseScaling",
    "Float8Tensor",
    "MXFP8BlockScaling",
    "MXFP8Tensor",
    "Monitor",
    "Plane",
    "QuantSpec",
    "QuantizedTensor",
    "Quantizer",
    "Recipe",
    "UnsupportedError",
    "__version__",
    "checkpoint",
    "comm",
    "convert_to_float8_training",
    "convert_to_high_precision",
    "export",
    "fsdp",
    "high_precision",
    "min_speedup",
    "monitor",
    "nn",
    "ops",
    "optim",
    "optimizer_stepped",
    "precompute_float8_dynamic_scale_for_fsdp",
    "quantized_init",
    "report",
    "tensor_parallel",
]

#: Names whose modules are imported at the first access, because some import
#: torch.distributed.tensor, which takes two seconds.
_LATER = {
    "Monitor": "fp8rs.monitoring",
    "checkpoint": "fp8rs.checkpoint",
    "comm": "fp8rs.comm",
    "export": "fp8rs.export",
    "fsdp": "fp8rs.fsdp",
    "high_precision": "fp8rs.monitoring",
    "monitor": "fp8rs.monitoring",
    "optim": "fp8rs.optim",
    "precompute_float8_dynamic_scale_for_fsdp": "fp8rs.fsdp",
    "report": "fp8rs.convert.report",
    "tensor_parallel": "fp8rs.tensor_parallel",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_LATER[name])
    return module if module.__name__ == f"{__name__}.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return __all__
