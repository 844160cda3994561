"""Tensor-parallel styles for converted layers: operands are quantized before they are gathered.

Not imported by ``import fp8rs``: torch.distributed.tensor takes seconds.
"""

from .styles import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput

__all__ = ["Float8ColwiseParallel", "Float8RowwiseParallel", "PrepareFloat8ModuleInput"]
