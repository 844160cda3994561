"""Tensor-parallel styles that quantize the operands of converted layers before they are gathered.

``import fp8rs`` does not import this package, because torch.distributed.tensor takes seconds.
"""

from .styles import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]
