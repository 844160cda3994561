"""Gradients of sharded models, and their sum over ranks in rank order."""

import torch
import torch.distributed as dist

from distributed.models import batch, same_bytes
from fp8rs.fsdp import set_links
from internals import divisor, local_of


class InOrder:
    """Reference reduce-scatter: sums the gradients of all ranks in float32, in rank order."""

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=torch.float32, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        everyone = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(everyone, input_tensor, group=group)
        parts = [x.view(group.size(), -1)[group.rank()] for x in everyone]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        output_tensor.copy_(total / divisor(op, group.size()))


def sum_in_order(model):
    for module in model.modules():
        if hasattr(module, "set_custom_reduce_scatter"):
            module.set_custom_reduce_scatter(InOrder())


def backward(model, rig, step=0):
    model(batch(rig, step)).float().square().mean().backward()


def grads_of(model):
    for part in (*model.blocks, model):
        # With some options, FSDP2 keeps a module unsharded after its backward.
        part.reshard()
    return {n: local_of(p.grad) for n, p in model.named_parameters() if p.grad is not None}


def check(rig, build, run=backward):
    """Assert that a model with links has the gradients of the reference. Return its links."""
    models = [build(), build()]
    sum_in_order(models[0])
    links = set_links(models[1], gather="torch")
    for model in models:
        run(model, rig)
    expected, got = map(grads_of, models)
    assert expected and expected.keys() == got.keys()
    for name, grad in expected.items():
        assert same_bytes(got[name], grad), name
    return links


def twice(model, rig, synced):
    """Run the backward of two micro-batches. If not ``synced``, the first only accumulates."""
    model.set_requires_gradient_sync(synced)
    backward(model, rig, 0)
    model.set_requires_gradient_sync(True)
    backward(model, rig, 1)
