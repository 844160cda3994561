"""No stale bytes: whatever wrote the masters, the next forward gathers what they hold."""

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import (
    EMPTY,
    RECIPES,
    UNEVEN,
    batch,
    full_weights,
    linears,
    make,
    reduces,
    same_bytes,
    shard,
    train_with_histories,
    watch_weights,
    whole_planes,
)
from internals import local_of
from oracle.tensorwise import scale_from_amax


def local(p):
    return p.detach().to_local() if isinstance(p, DTensor) else p


def weights(model):
    return [p for p in model.parameters() if p.dim() == 2]


def through_data(model, rig):
    for p in weights(model):
        p.data.mul_(1.5)


def through_data_setter(model, rig):
    for p in weights(model):
        inner = local_of(p)
        inner.data = torch.full_like(inner.data.high_precision, 0.5)


def through_local_tensors(model, rig):
    for p in weights(model):
        local(p).add_(0.25)


def on_one_rank(model, rig):
    for p in weights(model):
        if rig.rank == rig.world_size - 1:
            local(p).add_(0.25)


def by_broadcast(model, rig):
    for p in weights(model):
        mine = local(p)
        if all(rows == mine.shape[0] for rows in gather_rows(mine)):
            mine.copy_(mine + rig.rank)
            dist.broadcast(mine, 0)


def by_all_reduce(model, rig):
    for p in weights(model):
        mine = local(p)
        if all(rows == mine.shape[0] for rows in gather_rows(mine)):
            dist.all_reduce(mine)


def gather_rows(t):
    rows = [
        torch.zeros((), dtype=torch.int64, device=t.device) for _ in range(dist.get_world_size())
    ]
    dist.all_gather(rows, torch.tensor(t.shape[0], device=t.device))
    return [r.item() for r in rows]


def by_foreach(model, rig):
    torch._foreach_mul_([p.detach() for p in model.parameters()], 1.25)


def by_sgd(model, rig):
    torch.optim.SGD(model.parameters(), lr=0.5).step()


def by_fused_adam(model, rig):
    torch.optim.Adam(model.parameters(), lr=0.1, fused=True).step()


def by_load_state_dict(model, rig):
    model.load_state_dict({n: p.detach() * 2 for n, p in model.state_dict().items()})


def by_load_state_dict_with_assign(model, rig):
    model.load_state_dict({n: p.detach() * 2 for n, p in model.state_dict().items()}, assign=True)


def by_full_state_dict(model, rig):
    options = StateDictOptions(full_state_dict=True)
    state = {n: t * 2 for n, t in get_model_state_dict(model, options=options).items()}
    set_model_state_dict(model, state, options=options)


def by_init(model, rig):
    for p in weights(model):
        nn.init.constant_(p, 0.125 * (rig.rank + 1))


def by_narrowed_copy(model, rig):
    """Write like torch.distributed.checkpoint."""
    for p in weights(model):
        mine = local(p)
        if mine.shape[0]:
            part = mine.narrow(0, 0, 1)
            part.detach().copy_(torch.full(part.shape, 0.75))


EVEN_BLOCKS = (256, 256)
"""Hidden sizes whose shards consist of whole blocks on two ranks."""

WRITES = [
    through_data,
    through_data_setter,
    through_local_tensors,
    on_one_rank,
    by_broadcast,
    by_all_reduce,
    by_foreach,
    by_sgd,
    by_fused_adam,
    by_load_state_dict,
    by_load_state_dict_with_assign,
    by_full_state_dict,
    by_init,
    by_narrowed_copy,
]
OPTIMIZERS = ("by_sgd", "by_fused_adam")
LOADS = ("by_load_state_dict", "by_load_state_dict_with_assign", "by_full_state_dict")


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
@pytest.mark.parametrize("hidden", [UNEVEN, EMPTY], ids=["uneven", "empty"])
@pytest.mark.parametrize("write", [w.__name__ for w in WRITES])
def test_the_next_forward_sees_the_write(rig, write, hidden, recipe):
    model = make(hidden, recipe=recipe, device=rig.device)
    shard(model, rig)
    if recipe == "delayed":
        amaxes = train_with_histories(model, rig)
    model(batch(rig)).square().mean().backward()
    before = full_weights(model)
    with torch.no_grad():
        globals()[write](model, rig)
    after = full_weights(model)
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    if write not in ("by_broadcast", "by_all_reduce"):
        assert len(changed) == len(before)
    assert changed

    gathered_weights = {}
    watch_weights(
        model,
        lambda name, w: gathered_weights.update({name: (w.rowwise.data.clone(), w.rowwise.scale)}),
    )
    model(batch(rig)).square().mean().backward()
    for name, weight in after.items():
        if recipe == "current" or write in LOADS:  # loads reset histories
            amax = weight.abs().amax()
        elif write in OPTIMIZERS:
            amax = before[name].abs().amax().maximum(amaxes[name])  # rolled in
        else:
            amax = amaxes[name]  # of the training before: the scale is behind the write
        scale = scale_from_amax(amax, torch.float8_e4m3fn)
        assert same_bytes(gathered_weights[name][1], scale), (
            name,
            gathered_weights[name][1],
            scale,
        )
        quantized, _ = torch.ops.fp8rs.quantize(weight, scale, torch.float8_e4m3fn)
        assert same_bytes(gathered_weights[name][0], quantized), name


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
@pytest.mark.parametrize("writer", ["all ranks", "one rank"])
def test_the_backward_casts_a_written_shard_with_the_forwards_scale(rig, writer, recipe):
    """Scales of rows and of blocks that no shard boundary splits come from the new values."""
    model = make(EVEN_BLOCKS, recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)
    forward = {}
    backward = {}
    watch_weights(model, lambda name, w: forward.update({name: w.rowwise.map(torch.clone)}))
    for name, layer in linears(model).items():
        layer.register_full_backward_pre_hook(
            lambda module, grads, name=name: backward.update(
                {name: module.weight.rowwise.map(torch.clone)}
            )
        )
    loss = model(batch(rig)).sum()
    with torch.no_grad():
        for block in model.blocks:
            for p in weights(block):
                if writer == "all ranks" or rig.rank == 1:
                    local_of(p).add_(0.01).mul_(3)
    written = full_weights(model)
    with Collectives() as collectives:
        loss.backward()
    assert reduces(collectives) == []
    for name in ("blocks.0.up", "blocks.1.up"):
        codes, scale, *_ = whole_planes(written[name], recipe)
        if recipe in ("current", "delayed"):
            scale = forward[name].scale
            codes, _ = torch.ops.fp8rs.quantize(written[name], scale, torch.float8_e4m3fn)
        assert same_bytes(backward[name].scale, scale), name
        assert same_bytes(backward[name].data, codes), name
        assert not same_bytes(backward[name].data, forward[name].data)


@ranks(1, 2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
def test_the_backward_has_the_forwards_bytes_after_a_write_without_an_operator(rig, recipe):
    model = make(EVEN_BLOCKS, recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)
    planes = []
    up = model.blocks[1].up
    up.register_forward_pre_hook(lambda m, args: planes.append(m.weight.rowwise.map(torch.clone)))
    up.register_full_backward_pre_hook(
        lambda m, grads: planes.append(m.weight.rowwise.map(torch.clone))
    )
    loss = model(batch(rig)).sum()
    local_of(up.weight).high_precision.mul_(-0.3)
    loss.backward()
    assert same_bytes(planes[0].data, planes[1].data)
    assert same_bytes(planes[0].scale, planes[1].scale)
    written = full_weights(model)["blocks.1.up"]
    model(batch(rig))
    codes, scale, *_ = whole_planes(written, recipe)
    assert same_bytes(planes[2].data, codes)
    assert same_bytes(planes[2].scale, scale)
    assert not same_bytes(planes[1].data, planes[2].data)


@ranks(2)
def test_a_written_split_block_has_the_forwards_scale_in_the_backward(rig):
    model = shard(make((96, 96), recipe=RECIPES["block"], device=rig.device), rig)
    scales = []
    up = model.blocks[1].up
    up.register_forward_pre_hook(lambda m, args: scales.append(m.weight.rowwise.scale.clone()))
    up.register_full_backward_pre_hook(
        lambda m, grads: scales.append(m.weight.rowwise.scale.clone())
    )
    loss = model(batch(rig)).sum()
    if rig.rank == 1:
        with torch.no_grad():
            local_of(up.weight).mul_(3)
    loss.backward()
    assert same_bytes(*scales)


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "delayed", "block"])
def test_a_backward_after_a_forward_that_gathered_nothing_has_the_forwards_bytes(rig, recipe):
    """All scales are of an earlier forward then, but a backward computes none."""
    model = make(EVEN_BLOCKS, recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)
    forward = {}
    backward = {}
    for name, layer in linears(model).items():
        layer.register_forward_pre_hook(
            lambda module, args, name=name: forward.update(
                {name: module.weight.rowwise.map(torch.clone)}
            )
        )
        layer.register_full_backward_pre_hook(
            lambda module, grads, name=name: backward.update(
                {name: module.weight.rowwise.map(torch.clone)}
            )
        )
    loss = model(batch(rig)).sum()
    model.forward = lambda x: x
    model(batch(rig))
    del model.forward
    with Collectives() as collectives:
        loss.backward()
    assert reduces(collectives) == []
    for name in ("blocks.0.up", "blocks.1.up"):
        assert same_bytes(backward[name].scale, forward[name].scale), name
        assert same_bytes(backward[name].data, forward[name].data), name
