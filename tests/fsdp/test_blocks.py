"""Weights with a scale per block: gathered codes and scales equal the whole weight's."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fp8rs
from cases import TWO_PLANES
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import (
    BLOCKS,
    batch,
    check_planes,
    full_weights,
    make,
    reduces,
    same_bytes,
    whole_planes,
)
from fp8rs.fsdp.layout import block_rows, scale_order, split_block_rows

ROWS = {
    "even and aligned": (512, 256),
    "even and cut": (160, 320),
    "uneven and aligned": (300, 130),
    "uneven and cut": (97, 250),
    "blocks in several shards": (40, 33),
    "empty": (5, 1),
}


def build(rig, rows, block):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(72, r, bias=False) for r in rows)).to(rig.device)
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(torch.randn_like(layer.weight).exp())
    fp8rs.convert_to_float8_training(model, recipe=BLOCKS[block])
    return model


def check(model, weights, block):
    for name, weight in weights.items():
        gathered = model.get_submodule(name).weight
        check_planes(gathered, weight, block)
        assert gathered.rowwise.scale.is_contiguous()
        assert (gathered.columnwise is not None) == (block in TWO_PLANES)


@ranks(1, 2, 4)
@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("block", list(BLOCKS))
def test_gathered_blocks_are_those_of_the_whole_weight(rig, rows, block):
    model = build(rig, ROWS[rows], block)
    weights = full_weights(model)
    fully_shard(model, mesh=rig.mesh())
    for _ in range(2):
        model.unshard()
        check(model, weights, block)
        model.reshard()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.7)
        weights = full_weights(model)


@ranks(4)
@pytest.mark.parametrize("block", list(BLOCKS))
def test_hybrid_sharding_of_blocks(rig, block):
    model = build(rig, ROWS["uneven and cut"], block)
    weights = full_weights(model)
    fully_shard(model, mesh=rig.mesh(2, 2))
    model.unshard()
    check(model, weights, block)


@ranks(2)
@pytest.mark.parametrize("block", list(BLOCKS))
def test_offloaded_blocks(rig, block):
    model = build(rig, ROWS["uneven and cut"], block)
    weights = full_weights(model)
    policy = CPUOffloadPolicy(pin_memory=rig.device_type == "cuda")
    fully_shard(model, mesh=rig.mesh(), offload_policy=policy)
    model.cpu() if rig.device_type == "cuda" else None
    model.unshard()
    check(model, {n: w.to(rig.device) for n, w in weights.items()}, block)


@ranks(2)
def test_what_blocks_send(rig):
    """Codes and scales, once; nothing is reduced where no block is cut."""
    for block, rows, extra in (
        ("rowwise", (160, 160), 4 * 160),
        ("mxfp8", (192, 192), 6 * 3),
        ("block", (256, 256), 4 * 2),
    ):
        model = build(rig, rows, block)
        fully_shard(model, mesh=rig.mesh())
        with Collectives() as collectives:
            model.unshard()
        assert collectives.nbytes("reduce") == 0
        assert collectives.nbytes("gather") == 2 * (rows[0] * 72 + extra)
        assert {c.dtype for c in collectives.calls} == {torch.uint8}
    model = build(rig, (96, 96), "mxfp8")  # 48 rows a rank: one of three rows of blocks is cut
    fully_shard(model, mesh=rig.mesh())
    with Collectives() as collectives:
        model.unshard()
    # A row of 3 blocks of each weight, in fp32, together.
    assert reduces(collectives) == [12 + 12], collectives.calls


@ranks(2)
def test_blocks_are_gathered_by_rows_only(rig):
    model = build(rig, (64, 64), "mxfp8")
    fully_shard(model, mesh=rig.mesh(), shard_placement_fn=lambda p: Shard(1))
    with pytest.raises(ValueError, match=r"0\.weight.*Shard\(0\)"):
        model.unshard()


@pytest.mark.parametrize("ranks_", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("height", [1, 32, 128])
def test_where_blocks_are_found(ranks_, height):
    """Against a plain walk over all rows."""
    for rows in (1, 5, 31, 32, 33, 64, 97, 128, 200, 256, 1000):
        padded = -(-rows // ranks_)
        holders: dict[int, set[int]] = {}
        for row in range(rows):
            holders.setdefault(row // height, set()).add(row // padded)
        rows_per_rank = block_rows(rows, padded, ranks_, height)
        assert rows_per_rank == max(
            sum(rank in ranks for ranks in holders.values()) for rank in range(ranks_)
        )
        assert split_block_rows(rows, padded, ranks_, height) == tuple(
            block for block, ranks in holders.items() if len(ranks) > 1
        )
        order = scale_order(rows, padded, ranks_, height)
        if order is None:  # as they come
            order = range(-(-rows // height))
        else:
            assert order != tuple(range(len(order)))
        for block, place in enumerate(order):
            rank, local = divmod(place, rows_per_rank)
            first = min(b for b, ranks in holders.items() if rank in ranks)
            assert rank == min(holders[block])
            assert first + local == block


@ranks(4)
def test_cut_blocks_are_measured_over_fsdps_shards_alone(rig):
    """And not over the parts that other ranks of a tensor-parallel mesh have."""
    model = make((100, 64), recipe="mxfp8", device=rig.device)
    with torch.no_grad():
        model.blocks[0].up.weight[:50].mul_(64)
    weight = model.blocks[0].up.weight.detach().clone()
    mesh = rig.mesh(2, 2, names=("data", "tensor"))
    parallelize_module(
        model.blocks[0], mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )
    fully_shard(model.blocks[0], mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    planes = []
    model.blocks[0].up.register_forward_pre_hook(
        lambda module, _: planes.append(module.weight.to_local().rowwise.map(torch.clone))
    )
    model(batch(rig))
    tensor_part = weight.chunk(2)[mesh["tensor"].get_local_rank()].contiguous()
    codes, scale, *_ = whole_planes(tensor_part, "mxfp8")
    assert same_bytes(planes[0].scale, scale)
    assert same_bytes(planes[0].data, codes)
