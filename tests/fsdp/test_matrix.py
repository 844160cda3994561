"""Every recipe with every option of FSDP2 trains like the unsharded model.

A cell of the matrix is one training. It is compared with the unsharded eager model in every bit.
Only one rank has a gradient, multiplied by the number of ranks, so that the mean over ranks is
exact, and wrong if a rank or a replica is left out.
"""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
import torch._dynamo as dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor

from distributed import ranks
from distributed.models import RECIPES, WIDTH, linears, make, on_all_ranks, same_bytes, shard
from fp8rs.fsdp import MasterWeight
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.optim import AdamW
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.planes import Plane
from fp8rs.tensor.quantized import QuantizedTensor
from internals import local_of, storage_of

#: With the oldest torch what the other files show of FSDP2 must do: the matrix takes minutes.
pytestmark = pytest.mark.newest_torch

#: Shapes of meshes by device, replicas first. Two GPUs are too few for 2 replicas of 2 shards.
MESHES = {
    "1-D": {"cpu": (4,), "cuda": (2,)},
    "HSDP": {"cpu": (2, 2), "cuda": (1, 2)},
    "HSDP, shard size 1": {"cpu": (2, 1), "cuda": (2, 1)},
    "world size 1": {"cpu": (1,), "cuda": (1,)},
}
#: Rows of a block's first layer, by the number of shards. 27 and 5 cut blocks of 32 and 128 too.
HIDDEN = {
    "even": {1: 64, 2: 64, 4: 64},
    "uneven": {2: 27, 4: 50},
    "empty": {2: 1, 4: 5},
}
#: Pairs of a mesh and shards without cells, with the reason.
LEFT_OUT = {
    (mesh, shards): "one shard is the whole weight, and so neither uneven nor empty"
    for mesh in ("HSDP, shard size 1", "world size 1")
    for shards in ("uneven", "empty")
}
#: All other combinations of weights, mesh and shards. Each is tested with each recipe, and with
#: some value of every other parameter (with all values if --full is given).
SHARDED = [
    (weights, mesh, shards)
    for weights in ("master", "fp8")
    for mesh in MESHES
    for shards in HIDDEN
    if (mesh, shards) not in LEFT_OUT
]
PARAMETERS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def size(device_type, mesh, **cell):
    """The number of ranks of a cell."""
    return math.prod(MESHES[mesh][device_type])


@ranks(by=size)
@pytest.mark.parametrize("recipe", list(RECIPES))
@pytest.mark.parametrize(("weights", "mesh", "shards"), SHARDED)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("init", ["real", "meta"])
@pytest.mark.parametrize("parameters", list(PARAMETERS))
@pytest.mark.parametrize("blocks", ["eager", "compiled"])
def test_it_trains_as_the_whole_model(
    rig, recipe, weights, mesh, shards, reshard, init, parameters, blocks
):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")  # of compiled code
    shape = MESHES[mesh][rig.device_type]
    hidden = (HIDDEN[shards][shape[-1]],) * 2
    options = {"dtype": PARAMETERS[parameters], "device": rig.device}
    converted = {"recipe": RECIPES[recipe], "fp8_weights": weights == "fp8"}
    sharding = {"mesh": rig.mesh(*shape), "reshard_after_forward": reshard}
    reference = make(hidden, **options, **converted)
    if init == "real":
        model = shard(copy.deepcopy(reference), **sharding)
    else:
        model = shard(make(hidden, **{**options, "device": "meta"}, **converted), **sharding)
        model.to_empty(device=rig.device)
        for module in model.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        model.load_state_dict(shard(make(hidden, recipe=None, **options), **sharding).state_dict())
    check_shards(model, weights, shards)

    backend = CompileCounterWithBackend("aot_eager")
    if blocks == "compiled":
        dynamo.reset()
        for block in model.blocks:
            block.compile(backend=backend, fullgraph=True)
    kind = AdamW if weights == "fp8" else torch.optim.AdamW
    optimizers = [kind(m.parameters(), lr=1e-2) for m in (reference, model)]
    for step in range(3):
        # It has a gradient as the second block's input does: the blocks are one graph.
        x = batch(rig, step, PARAMETERS[parameters]).requires_grad_()
        before = shard_bytes(model)
        wanted, actual = (m(x).float().square().mean() for m in (reference, model))
        gathered = [not isinstance(b.up.weight, DTensor) for b in model.blocks]
        assert gathered == [not reshard] * 2
        assert same_bytes(actual.detach(), wanted.detach()), step
        wanted.backward()
        (actual * (rig.world_size if rig.rank == rig.world_size - 1 else 0)).backward()
        model.reshard()
        assert same(shard_bytes(model), before), "a step's gathers wrote to the shards"
        wholes = dict(reference.named_parameters())
        for name, parameter in model.named_parameters():
            grad = parameter.grad.full_tensor()
            assert grad.dtype == wholes[name].grad.dtype
            assert torch.equal(grad, wholes[name].grad), (name, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        compare(model, reference, weights, step)
        check_scales(model)
    check_gathered(model, reference, weights, recipe)
    graphs = 2 if recipe == "delayed" else 1  # of delayed scaling one finds the first scales
    assert backend.frame_count == (graphs if blocks == "compiled" else 0)
    dynamo.reset()


def batch(rig, step, dtype):
    """Return a batch that is equal on all ranks, so that activations equal the whole model's."""
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(16, WIDTH, generator=generator).to(rig.device, dtype)


def check_shards(model, weights, shards):
    """The cell is what its name says."""
    kind = QuantizedTensor if weights == "fp8" else MasterWeight
    sizes = []
    for layer in linears(model).values():
        assert isinstance(layer.weight, DTensor)
        assert isinstance(local_of(layer.weight), kind)
        placement = ShardSpec.from_dtensor(layer.weight)
        rows = placement.unsharded_shape[0]
        last = rows - min((placement.num_shards - 1) * placement.padded_length, rows)
        sizes.append(
            "empty" if not last else "even" if last == placement.padded_length else "uneven"
        )
    assert shards in sizes
    assert not {"even": {"uneven", "empty"}, "uneven": {"empty"}}.get(shards, set()) & set(sizes)


def shard_bytes(model):
    """Copies of all bytes that the shards are made of."""
    results = []
    for layer in linears(model).values():
        local = local_of(layer.weight)
        if isinstance(local, QuantizedTensor):
            results += [t.clone() for t in storage_of(local).tensors()]
        else:
            results.append(local.high_precision.clone())
    return results


def same(left, right):
    return all(same_bytes(a, b) for a, b in zip(left, right, strict=True))


def compare(model, reference, weights, step):
    """Check that the parameters equal the unsharded model's."""
    wholes = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = wholes[name].detach()
        actual = parameter.detach()
        if isinstance(wanted, QuantizedTensor):
            wanted = wanted.dequantize()
            actual = DTensor.from_local(
                local_of(parameter).dequantize(),
                parameter.device_mesh,
                parameter.placements,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        assert same_bytes(actual.full_tensor(), wanted), (name, step)


def check_scales(model):
    """Where all of a weight has one scale, every rank has the same one."""
    for name, layer in linears(model).items():
        local = local_of(layer.weight)
        if isinstance(local, QuantizedTensor) and local.format.per_tensor:
            assert on_all_ranks(storage_of(local).any_plane.scale.reshape(1).clone()), name


def check_gathered(model, reference, weights, recipe):
    """Check that gathered bytes equal the quantized whole weight's."""
    parts = [(f"blocks.{i}.", block) for i, block in enumerate(model.blocks)]
    wholes = linears(reference)
    for prefix, part in [*parts, ("", model)]:
        before = shard_bytes(model)
        part.unshard()
        mine = linears(part) if prefix else {"head": model.head}
        for name, layer in mine.items():
            weight = layer.weight
            wanted = wholes[prefix + name].weight
            assert isinstance(weight, QuantizedTensor)
            if weights == "fp8":
                planes = wanted.planes
            else:
                planes = quantized(wanted.detach(), weight, recipe)
            for a, b in zip(weight.planes, planes, strict=True):
                assert (a is None) == (b is None), (prefix, name)
                if a is not None:
                    assert a.format is b.format
                    assert same_bytes(a.data, b.data), (prefix, name)
                    assert same_bytes(a.scale, b.scale), (prefix, name)
        part.reshard()
        assert same(shard_bytes(model), before)


def quantized(values, weight, recipe):
    """The planes of a whole weight; of delayed scaling with the scale that is used."""
    if recipe == "delayed":
        scale = weight.rowwise.scale
        codes = torch.ops.fp8rs.quantize(values, scale, weight.fp8_dtype, True, False, None)[0]
        return Plane(codes, scale, weight.format), None
    return quantize_planes(weight.spec, values, True, weight.columnwise is not None)
