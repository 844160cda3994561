"""Gradients of FSDP2 models, and the sum that reduce-scatters must give."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from distributed.models import batch, same_bytes
from fp8rs.comm import set_fsdp_comm
from fp8rs.comm.reduce_scatter import divisor_of
from internals import local_of


class SumInOrder:
    """The definition: the float32 gradients of all ranks, summed in the order of ranks."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=torch.float32, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        gradients = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(gradients, input_tensor, group=group)
        parts = [x.view(group.size(), -1)[group.rank()] for x in gradients]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        # CUDA multiplies by the reciprocal of a divisor that is a Python number. A tensor divides.
        divisor = torch.full_like(total, divisor_of(op, group.size()))
        output_tensor.copy_(total / divisor)


def sum_in_order(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_reduce_scatter(SumInOrder())


def backward(model, rig, step=0):
    model(batch(rig, step)).float().square().mean().backward()


def two_micro_batches(model, rig, synced):
    """Run two backwards. The first one reduces its gradients if ``synced``."""
    model.set_requires_gradient_sync(synced)
    backward(model, rig, 0)
    model.set_requires_gradient_sync(True)
    backward(model, rig, 1)


def grads_of(model):
    for part in (*model.blocks, model):
        part.reshard()  # A setting or an error can leave parts unsharded after the backward.
    return {n: local_of(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def check_same_gradients(model, expected):
    """Check that two models have equal bytes in all gradients."""
    actual = grads_of(model)
    expected = grads_of(expected)
    assert expected and actual.keys() == expected.keys()
    for name, grad in expected.items():
        assert same_bytes(actual[name], grad), name


def check(rig, build, run=backward):
    """Check the gradients after ``set_fsdp_comm`` against `SumInOrder`; return what it chose."""
    expected = build()
    model = build()
    sum_in_order(expected)
    comm = set_fsdp_comm(model)
    run(expected, rig)
    run(model, rig)
    check_same_gradients(model, expected)
    return comm
