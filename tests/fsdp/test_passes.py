"""Which gathers share a pass's bytes: in forwards, outside of them and in backwards."""

import gc
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

import fp8rs
import fp8rs.fsdp.gathered
import fp8rs.fsdp.passes
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import (
    HIDDEN,
    RECIPES,
    UNEVEN,
    Stack,
    as_if_large,
    batch,
    bits,
    expected,
    full_weights,
    large_too,
    linears,
    make,
    recipes,
    reduces,
    same_bytes,
    shard,
    shardings,
    train_with_histories,
    watch_weights,
    whole_planes,
)
from oracle.tensorwise import scale_from_amax


@ranks(2)
@large_too
def test_unshard_outside_a_forward(rig):
    model = make(UNEVEN, device=rig.device)
    shard(model, rig)
    whole = full_weights(model)
    with torch.no_grad():
        model(batch(rig))  # lazy init belongs to the root
        block = model.blocks[1]
        block.unshard()
        codes, scale = expected(whole["blocks.1.up"])
        assert same_bytes(block.up.weight.rowwise.data, codes)
        assert same_bytes(block.up.weight.rowwise.scale, scale)
        block.reshard()


@ranks(2)
@recipes
@large_too
def test_a_submodule_called_by_itself(rig, recipe):
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    for block in model.blocks:
        fully_shard(block, mesh=rig.mesh())
    whole = full_weights(model)
    block = model.blocks[0]
    seen = {}
    watch_weights(block, lambda name, w: seen.update({name: w.rowwise.map(torch.clone)}))
    x = batch(rig).requires_grad_()
    for _ in range(2):
        block(x).sum().backward()
    for name in ("up", "down"):
        codes, scale, *_ = whole_planes(whole[f"blocks.0.{name}"], recipe)
        assert same_bytes(seen[name].data, codes)
        assert same_bytes(seen[name].scale, scale)
    assert x.grad is not None
    assert block.up.weight.grad is not None


def watch_fp8(model, seen):
    """Keep the codes that converted layers work on."""
    for name, layer in linears(model).items():
        if isinstance(layer, fp8rs.nn.Linear):
            layer.register_forward_pre_hook(
                lambda layer, args, name=name: seen.update(
                    {name: layer.weight.rowwise.data.clone()}
                )
            )


def check_passes_of(run, model, rig):
    """Each run has one all-reduce and the masters' bytes, though no forward is announced."""
    seen = {}
    watch_fp8(model, seen)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        seen.clear()
        whole = full_weights(model)
        with Collectives() as forward:
            y = run(batch(rig))
        assert len(reduces(forward)) == 1, forward.seen
        with Collectives() as back:
            y.sum().backward()
        assert reduces(back) == []
        assert seen
        for name, codes in seen.items():
            assert same_bytes(codes, expected(whole[name])[0]), name
        optimizer.step()


@ranks(2)
def test_a_converted_list_of_blocks_has_one_pass_a_forward(rig):
    """Its forward cannot run: nothing but the gathers tells the weights' passes apart."""
    model = make(UNEVEN, recipe=None, device=rig.device)
    fp8rs.convert_to_float8_training(model.blocks, recipe="current")
    shard(model, rig)
    check_passes_of(model, model, rig)


@ranks(2)
def test_training_through_another_method_has_one_pass_a_forward(rig):
    class Encoder(Stack):
        def encode(self, x):
            return self.head(self.blocks[0](x))

    torch.manual_seed(0)
    model = Encoder().to(rig.device)
    fp8rs.convert_to_float8_training(model, recipe="current")
    shard(model, rig)
    register_fsdp_forward_method(model, "encode")
    check_passes_of(model.encode, model, rig)


@ranks(2)
@large_too
def test_an_early_unshard_changes_nothing(rig):
    found = []
    for early in (True, False):
        model = make(UNEVEN, device=rig.device)
        for block in model.blocks:
            fully_shard(block, mesh=rig.mesh())
            if early:
                block.unshard()
                block.reshard()
        y = model(batch(rig))
        y.square().sum().backward()
        gradients = {
            n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
            for n, p in model.named_parameters()
        }
        found.append({"y": y.detach(), **gradients})
    assert found[0].keys() == found[1].keys()
    for name, value in found[1].items():
        assert value.any() and torch.equal(found[0][name], value), name


@ranks(2)
@recipes
def test_a_pass_that_was_not_used_up_is_freed_at_once(rig, recipe):
    """Of a large model, some of whose layers no forward runs. Nothing waits for the collector."""

    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = make(UNEVEN, recipe=None)

        def forward(self, x):
            return self.stack.blocks[0](x)

    model = Part().to(rig.device)
    fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe])
    shard(model.stack, rig)
    state = model.stack.head._fp8_state
    gc.collect()
    gc.disable()
    try:
        with as_if_large():
            for _ in range(4):
                model(batch(rig)).sum().backward()
        mine = [
            found
            for found in gc.get_objects()
            if type(found) is fp8rs.fsdp.gathered.Shard and found.weight.state is state
        ]
        assert len(mine) == 5
    finally:
        gc.enable()


@ranks(2)
def test_writes_are_marked_where_a_forward_begins(rig):
    """What gathers wait for is what was written before, not what the forward has launched."""
    marked = []
    real = fp8rs.fsdp.passes.mark_writes
    fp8rs.fsdp.passes.mark_writes = lambda weights: marked.append(len(list(weights)))
    try:
        model = make(UNEVEN, device=rig.device)
        shard(model, rig)
        for _ in range(3):
            model(batch(rig)).sum().backward()
    finally:
        fp8rs.fsdp.passes.mark_writes = real
    assert marked == [0, 5, 5], "from the second forward on, all weights"


def held(device):
    """Bytes of all uint8 tensors that live: those at hand for gathers, once FSDP2 has freed its."""
    gc.collect()
    storages = {}
    for t in gc.get_objects():
        if type(t) is torch.Tensor and t.dtype == torch.uint8 and t.device.type == device.type:
            storage = t.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@ranks(1, 2)
@recipes
@large_too
def test_a_weights_bytes_are_held_once(rig, recipe):
    """Whatever is gathered apart from the others: by itself, or left gathered by an evaluation."""
    before = held(rig.device)
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)

    def step():
        model(batch(rig)).sum().backward()

    step()
    once = held(rig.device) - before
    for _ in range(2):
        with torch.no_grad():
            model(batch(rig))  # the root's own weights stay gathered
        step()
        for block in model.blocks:
            block.unshard()
            block.reshard()
        model.unshard()
        model.reshard()
        with torch.no_grad():
            model(batch(rig))
        model.reshard()
        step()
    assert held(rig.device) - before == once


@ranks(2)
@shardings
@recipes
def test_of_a_large_model_each_gather_makes_what_it_gathers(rig, hidden, recipe):
    """No layer waits for the others' casts; there are as many all-reduces, and the same bytes."""
    found = {}
    for limit in (0, 1 << 26):
        model = make(HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device)
        shard(model, rig)
        latest = model.head._fp8_state.sharding.passes.latest
        unmade, seen = [], {}

        def watch(name, weight, latest=latest, unmade=unmade, seen=seen):
            unmade.append(sum(s.left_to is not None for s in latest.values()))
            seen[name] = [bits(t).clone() for t in (weight.rowwise.data, weight.rowwise.scale)]

        watch_weights(model, watch)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        results, counts = [], []
        with as_if_large(limit):
            for step in range(3):
                with Collectives() as forward:
                    y = model(batch(rig, step))
                counts.append(len(reduces(forward)))
                assert counts[-1] == 1 or recipe != "current", forward.seen
                y.square().mean().backward()
                optimizer.step()
                grads = [bits(p.grad.full_tensor()) for p in model.parameters()]
                results += [bits(y), *grads, *(t for planes in seen.values() for t in planes)]
                optimizer.zero_grad()
        # The root has gathered the head; then each block gathers its two layers, which run.
        steps = [2, 2, 0, 0, 0] if limit == 0 and recipe != "delayed" else [0] * 5
        assert unmade == 3 * steps
        found[limit] = results, counts
    (large, large_counts), (small, small_counts) = found.values()
    assert large_counts == small_counts
    for a, b in zip(large, small, strict=True):
        assert torch.equal(a, b)


@ranks(2)
@large_too
def test_a_layer_called_twice_in_one_forward(rig):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = make(UNEVEN, recipe=None)

        def forward(self, x):
            return self.stack(self.stack(x))

    torch.manual_seed(0)
    model = Twice().to(rig.device)
    fp8rs.convert_to_float8_training(model, recipe="current")
    shard(model.stack, rig)
    fully_shard(model, mesh=rig.mesh())
    whole = full_weights(model)
    count = []

    def check(name, weight):
        assert same_bytes(weight.rowwise.data, expected(whole[name])[0])
        count.append(name)

    watch_weights(model, check)
    model(batch(rig)).sum().backward()
    assert len(count) == 2 * len(whole)


@contextmanager
def offload_on_the_cpu():
    """Take shards for offloaded ones, which otherwise need an accelerator to be offloaded from."""
    before = fp8rs.fsdp.gathered.is_offloaded
    fp8rs.fsdp.gathered.is_offloaded = lambda data, device: True
    try:
        yield
    finally:
        fp8rs.fsdp.gathered.is_offloaded = before


@ranks(2)
@recipes
@pytest.mark.parametrize("histories", [True, False])
@large_too
def test_the_path_of_offloaded_weights(rig, recipe, histories):
    """The forward's gather quantizes the copy that FSDP2 made; the backward's takes those bytes."""
    with offload_on_the_cpu():
        model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
        shard(model, rig)
        amaxes = {}
        if histories and recipe == "delayed":
            amaxes = train_with_histories(model, rig)
        forward, backward = {}, {}
        watch_weights(model, lambda name, w: forward.update({name: w.rowwise.map(torch.clone)}))
        for name, layer in linears(model).items():
            layer.register_full_backward_pre_hook(
                lambda layer, grads, name=name: backward.update(
                    {name: layer.weight.rowwise.map(torch.clone)}
                )
            )
        whole = full_weights(model)
        y = model(batch(rig))
        for p in model.blocks.parameters():
            p.data.mul_(3)
        y.sum().backward()
        assert sorted(forward) == sorted(backward) == sorted(whole)
        for name, weight in whole.items():
            codes, scale, *_ = whole_planes(weight, recipe)
            if amaxes:
                scale = scale_from_amax(amaxes[name], torch.float8_e4m3fn)
                codes, _ = torch.ops.fp8rs.quantize(weight, scale, torch.float8_e4m3fn)
            for plane in (forward[name], backward[name]):
                assert same_bytes(plane.data, codes), name
                assert same_bytes(plane.scale, scale), name


@ranks(2)
@shardings
@recipes
def test_backward_gathers_the_same_bytes_again(rig, hidden, recipe):
    model = make(HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)
    seen = {}
    block = model.blocks[0]
    watch_weights(model, lambda name, w: seen.update({name: w.rowwise.data.clone()}))
    again = []
    block.down.register_full_backward_pre_hook(
        lambda module, grads: again.append(module.weight.rowwise.data.clone())
    )
    model(batch(rig)).sum().backward()
    assert len(again) == 1
    assert same_bytes(again[0], seen["blocks.0.down"])
