"""Layouts of a model over ranks, between which checkpoints move, and copies of its state."""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from distributed.batched import make_any, shard_any
from distributed.models import WIDTH, linears
from fp8rs import checkpoint
from fp8rs.optim import AdamW, MasterWeights
from fp8rs.scaling.histories import BUFFERS
from fp8rs.tensor.quantized import QuantizedTensor
from internals import dtensor_like, local_of

PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}

#: The kinds of weights, each with its optimizer.
KEPT = {
    "master weights, torch's AdamW": (False, lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-5)),
    "FP8 weights, AdamW with masters": (True, lambda p: AdamW(p, lr=1e-2)),
    "FP8 weights, AdamW without masters": (
        True,
        lambda p: AdamW(p, lr=1e-2, master_weights=False, state_dtype=torch.bfloat16),
    ),
    "FP8 weights, MasterWeights around SGD": (
        True,
        lambda p: MasterWeights(p, torch.optim.SGD, lr=1e-2, momentum=0.9),
    ),
    "FP8 weights, torch's AdamW": (True, lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-5)),
}

#: The ranks and mesh dimensions of each layout.
LAYOUTS = {
    "FSDP of 8": (8,),
    "FSDP of 4": (4,),
    "FSDP of 2": (2,),
    "FSDP of 1": (1,),
    "one process": None,
    "HSDP of 2x2": (2, 2),
    "HSDP of 2x4": (2, 4),
    "FSDP of 2 x TP of 2": (2, 2),
}


def lay_out(rig, layout, recipe, weight_kind, hidden, seed=0):
    """Return a model and its optimizer in a layout, with the process group of its ranks.

    If a layout has fewer ranks than there are, several copies of the model exist on disjoint sets
    of ranks.
    """
    fp8_weights, optimizer = KEPT[weight_kind]
    model = make_any(hidden, device=rig.device, recipe=recipe, seed=seed, fp8_weights=fp8_weights)
    group = None
    shape = LAYOUTS[layout]
    if layout == "FSDP of 2 x TP of 2":
        mesh = rig.mesh(*shape, names=("data", "tensor"))
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], PLAN)
            fully_shard(block, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    elif shape is not None and math.prod(shape) == rig.world_size:
        shard_any(model, mesh=rig.mesh(*shape))
    else:
        ranks_per_copy = shape[0] if shape else 1
        ranks = [
            list(range(i, i + ranks_per_copy)) for i in range(0, rig.world_size, ranks_per_copy)
        ]
        group = [dist.new_group(of) for of in ranks][rig.rank // ranks_per_copy]
        if shape is not None:
            shard_any(model, mesh=DeviceMesh.from_group(group, rig.device_type))
    return model, optimizer(model.parameters()), group


def batch(rig, step):
    """Return a batch that is equal on all ranks, as tensor parallelism requires."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(16, WIDTH, generator=generator).to(rig.device)


def state_of(model, optimizer):
    return {
        "model": checkpoint.Model(model),
        "optimizer": checkpoint.Optimizer(model, optimizer),
    }


def group_of(count):
    """Make the group of the first ranks. All ranks call it."""
    return dist.new_group(range(count or 1))


def model_on(rig, count, recipe, weight_kind, hidden, seed):
    """Return a model, its optimizer and its group on the first ranks, and None on others."""
    group = group_of(count)
    if rig.rank >= (count or 1):
        return None
    fp8_weights, optimizer = KEPT[weight_kind]
    model = make_any(hidden, device=rig.device, recipe=recipe, seed=seed, fp8_weights=fp8_weights)
    if count is not None:
        shard_any(model, mesh=DeviceMesh.from_group(group, rig.device_type))
    return model, optimizer(model.parameters()), group


def state_dicts_of(model, optimizer):
    """Return the state dicts of torch."""
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def full_value(value, local=None):
    """Return the full tensor. Its bytes may differ between ranks."""
    local = local_of(value.detach()) if local is None else local
    if not isinstance(value, DTensor):
        return local.clone()
    plain = local.contiguous().view(torch.uint8) if local.dtype.itemsize == 1 else local
    return dtensor_like(value, plain).full_tensor().clone()  # of one rank it is a view


def contents(model, optimizer):
    """Return copies of the training state: codes, the scale of each element, moments."""
    values = {}
    for name, p in model.named_parameters():
        local = local_of(p)
        if not isinstance(local, QuantizedTensor):
            local = getattr(local, "high_precision", local)
            values[name] = full_value(p.detach(), local.detach().clone())
            continue
        planes = local.planes
        for kind, plane in zip(("codes", "columnwise"), planes, strict=True):
            if plane is None or (kind == "columnwise" and plane.format.square):
                continue
            transposed = kind == "columnwise"
            size = (*local.shape[:-2], *local.shape[:-3:-1]) if transposed else local.shape
            codes = plane.data.view(torch.uint8) if local.numel() else torch.empty(size)
            scale = plane.expand_scale().expand(size) if local.numel() else torch.empty(size)
            for part, t in ((kind, codes.to(torch.uint8)), (f"{kind}' scales", scale.float())):
                values[f"{name} {part}"] = full_value(p, (t.mT if transposed else t).contiguous())
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            if isinstance(value, torch.Tensor):
                values[f"{name} {key}"] = full_value(value)
    for name, layer in linears(model).items():
        for buffer in BUFFERS if "fp8_scale" in layer._buffers else ():
            values[f"{name} {buffer}"] = layer.get_buffer(buffer).clone()
    return values


def spoil(model):
    """Fill every parameter with NaN."""
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))


def size_of(folder):
    """Return the number of bytes in a checkpoint's files, except its metadata."""
    names = [name for name in os.listdir(folder) if name.endswith(".distcp")]
    return sum(os.path.getsize(os.path.join(folder, name)) for name in names)
