"""Counts the GEMMs of a model, and runs the two backwards of a zero-bubble pipeline schedule."""

from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fp8rs.nn import function
from internals import quantize_operand, replace_quantize_operand

zero_bubble_works = pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 cannot begin a backward at an autograd.Function"
)


class Count(TorchDispatchMode):
    """Counts GEMMs of `nn.Linear` and of FP8 layers, and records the planes of gradients."""

    MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def __init__(self):
        super().__init__()
        self.plain = self.fp8 = 0
        self.directions = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.plain += func in self.MATMULS
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_gemms():
    """Yield a `Count` that is active inside the context.

    Backward GEMMs that an FP8 layer runs in high precision count as GEMMs of the layer.
    """

    def counting(gemm):
        def counting_gemm(*args, **kwargs):
            count.fp8 += 1
            return gemm(*args, **kwargs)

        return counting_gemm

    def counting_quantize(spec, role, x, rowwise, columnwise, *options):
        if role == function.GRAD:
            count.directions.append((rowwise, columnwise))
        return quantize_operand(spec, role, x, rowwise, columnwise, *options)

    with pytest.MonkeyPatch.context() as patch, Count() as count:
        for name in ("scaled_mm", "high_precision_dgrad", "high_precision_wgrad"):
            patch.setattr(function, name, counting(getattr(function, name)))
        replace_quantize_operand(patch, counting_quantize)
        yield count


def zero_bubble(model, x):
    """Run the two backwards of a zero-bubble schedule. Return the input gradients of the first."""
    # This import takes a second.
    from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

    loss = model(x).square().sum()
    _, groups = stage_backward_input([loss], None, [x], model.parameters())
    assert all(p.grad is None for p in model.parameters())
    dx = x.grad
    stage_backward_weight(model.parameters(), groups)
    return dx
