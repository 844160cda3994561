"""FP8 training for PyTorch FSDP2: weights are quantized before they are gathered.

``import fp8rs`` registers the operators of ``torch.ops.fp8rs``. It starts no CUDA context and needs
no GPU.
"""

from typing import TYPE_CHECKING, Any

from . import ops  # isort: skip  (registers the operators that the rest calls)

from fp8rs.convert.convert import convert_to_float8_training, optimizer_stepped
from fp8rs.convert.quantized_init import quantized_init
from fp8rs.monitoring import Monitor, high_precision, monitor
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    Quantizer,
)
from fp8rs.quantize.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Recipe,
)
from fp8rs.tensor.formats import BlockFormat
from fp8rs.tensor.quantized import Float8Tensor, MXFP8Tensor, Plane, QuantizedTensor
from fp8rs.tensor.spec import QuantSpec

from . import nn, optim
from ._core import CudaError, UnsupportedError, __version__

if TYPE_CHECKING:
    from fp8rs.convert.report import report
    from fp8rs.fsdp import precompute_float8_dynamic_scale_for_fsdp

__all__ = [
    "BlockFormat",
    "CudaError",
    "DelayedScaling",
    "Float8BlockQuantizer",
    "Float8BlockScaling",
    "Float8CurrentScaling",
    "Float8CurrentScalingQuantizer",
    "Float8Linear",
    "Float8Quantizer",
    "Float8RowwiseScaling",
    "Float8Tensor",
    "MXFP8BlockScaling",
    "MXFP8Quantizer",
    "MXFP8Tensor",
    "Monitor",
    "Plane",
    "QuantSpec",
    "QuantizedTensor",
    "Quantizer",
    "Recipe",
    "UnsupportedError",
    "__version__",
    "convert_to_float8_training",
    "high_precision",
    "monitor",
    "nn",
    "ops",
    "optim",
    "optimizer_stepped",
    "precompute_float8_dynamic_scale_for_fsdp",
    "quantized_init",
    "report",
]


def __getattr__(name: str) -> Any:
    # They import torch.distributed.tensor, which takes two seconds: only for those who shard.
    if name == "precompute_float8_dynamic_scale_for_fsdp":
        from fp8rs.fsdp import precompute_float8_dynamic_scale_for_fsdp

        return precompute_float8_dynamic_scale_for_fsdp
    if name == "report":
        from fp8rs.convert.report import report

        return report
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
