"""Gathers and reductions through memory that ranks read from each other: order and lifetime.

On the CPU a stand-in of files takes the place of the GPUs' memory; on two GPUs it is the memory.
"""

import random
import time
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8rs
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import EVEN, HIDDEN, RECIPES, batch, make, same_bytes, shard
from fp8rs.fsdp import set_links, symmetric
from fsdp.gradients import backward, check, grads_of, sum_in_order, twice
from fsdp.shared_memory import SharedBlock

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SOON = timedelta(seconds=2)


@contextmanager
def memory_of(rig):
    """Memory that ranks share: the GPUs' own, or the stand-in."""
    if rig.device_type == "cuda":
        yield
        return
    SharedBlock.made = 0
    with (
        mock.patch.object(symmetric, "Block", SharedBlock),
        mock.patch.object(symmetric, "lacks", return_value=("", "")),
    ):
        yield


def ways(links):
    return {(link.gather, link.reduction) for link in links.units}


@ranks(2, 4)
@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("hidden", list(HIDDEN))
def test_gathers_and_gradients_are_the_same_bytes(rig, recipe, hidden):
    """Of three steps, so that each half is used again."""

    def run(model, rig):
        for step in range(3):
            backward(model, rig, step)

    def build():
        model = make(HIDDEN[hidden], recipe=RECIPES.get(recipe), device=rig.device)
        return shard(model, rig, mp_policy=BF16)

    models = [build(), build()]
    sum_in_order(models[0])
    with memory_of(rig):
        links = set_links(models[1])
        assert ways(links) == {("symmetric", "symmetric")}
        for model in models:
            run(model, rig)
        with Collectives() as seen:
            backward(models[1], rig)
        backward(models[0], rig)
    assert {c.kind for c in seen.seen} <= {"reduce"}  # of largest values
    for name, grad in grads_of(models[0]).items():
        assert same_bytes(grads_of(models[1])[name], grad), name


@ranks(2)
def test_what_micro_batches_add_up_takes_torchs_way(rig):
    def build():
        return shard(make(EVEN, device=rig.device), rig, mp_policy=BF16)

    with memory_of(rig):
        links = check(rig, build, lambda model, rig: twice(model, rig, synced=False))
    assert links.reductions == {"float32": 3}
    assert links.reduction_bytes == 0


@ranks(2)
def test_memory_is_made_once_for_the_largest_and_counted(rig):
    """Reductions hold what FSDP2's own float32 input would; gathers two shards."""
    model = shard(make((16, 64, 32), recipe=None, device=rig.device), rig, mp_policy=BF16)
    with memory_of(rig):
        links = set_links(model)
        assert (links.gather_bytes, links.reduction_bytes) == (0, 0)
        for step in range(2):
            backward(model, rig, step)
        assert rig.device_type == "cuda" or SharedBlock.made == 2
    largest = sum(p.numel() for p in make((64,), recipe=None).blocks[0].parameters())
    padding = 64 * rig.world_size
    assert 4 * largest <= links.reduction_bytes <= 4 * largest + padding
    assert 2 * largest * 2 // 2 <= links.gather_bytes <= 2 * largest * 2 // 2 + padding
    assert f"{links.reduction_bytes:,} B for reductions" in str(links)


@ranks(2)
def test_the_report_has_links_and_their_memory(rig):
    """Before the first step, and as much as there is after it. It is no more than it replaces."""
    model = shard(make((16, 64, 32), recipe=None, device=rig.device), rig, mp_policy=BF16)
    before = fp8rs.report(model)
    assert before.links == ()
    with memory_of(rig):
        links = set_links(model)
        found = fp8rs.report(model)
        backward(model, rig)
    assert found.links == links.units == fp8rs.report(model).links
    made = links.gather_bytes + links.reduction_bytes
    assert found.memory.symmetric == fp8rs.report(model).memory.symmetric == made
    assert found.scattered == links.reduced["bfloat16"] == before.scattered // 2
    added = found.memory.total - before.memory.total
    padding = 64 * rig.world_size
    assert links.gather_bytes <= added <= links.gather_bytes + padding
    text = str(found).splitlines()
    assert "    gathers: symmetric" in text
    assert any(line.split()[:2] == ["symmetric", "memory"] for line in text)
    assert fp8rs.report(model.blocks[1]).links[0].unit == ""


@ranks(4)
def test_replicas_and_several_meshes(rig):
    """Each group of ranks has memory of its own."""

    def build():
        model = make((64, 48), device=rig.device)
        for block, mesh in zip(model.blocks, (rig.mesh(), rig.mesh(2, 2)), strict=True):
            fully_shard(block, mesh=mesh, mp_policy=BF16)
        return fully_shard(model, mesh=rig.mesh(2, 2), mp_policy=BF16)

    models = [build(), build()]
    sum_in_order(models[0])
    with memory_of(rig):
        links = set_links(models[1])
        assert ways(links) == {("symmetric", "symmetric")}
        for step in range(3):
            for model in models:
                backward(model, rig, step)
    for name, grad in grads_of(models[0]).items():
        assert same_bytes(grads_of(models[1])[name], grad), name
    assert links.reductions == {"bfloat16": 9}


@ranks(2)
def test_several_models_take_turns(rig):
    """Their memory is each one's own, also where their steps are interleaved."""
    models = [shard(make(EVEN, device=rig.device), rig, mp_policy=BF16) for _ in range(3)]
    sum_in_order(models[0])
    with memory_of(rig):
        for model in models[1:]:
            set_links(model)
        losses = [m(batch(rig)).float().square().mean() for m in models]
        for loss in reversed(losses):
            loss.backward()
    expected = grads_of(models[0])
    for model in models[1:]:
        assert all(same_bytes(grads_of(model)[n], g) for n, g in expected.items())


@ranks(2)
@pytest.mark.newest_torch
def test_reductions_over_a_group_of_their_own_two_of_them_in_flight(rig):
    """FSDP2's own order is then looser: what holds each half until it is free is `Halves.wait`."""

    def build():
        blocks = shard(make((64, 48, 32), device=rig.device), rig, mp_policy=BF16)
        blocks.set_separate_reduce_scatter_group()
        blocks.set_reduce_scatter_max_input_buffers(2)
        return blocks

    def run(model, rig):
        for step in range(3):
            backward(model, rig, step)

    with memory_of(rig):
        links = check(rig, build, run)
    assert links.reductions == {"bfloat16": 12}


@ranks(2)
def test_modules_that_are_one_unit(rig):
    def build():
        model = make((64, 48), device=rig.device)
        fully_shard(list(model.blocks), mesh=rig.mesh(), mp_policy=BF16)
        return fully_shard(model, mesh=rig.mesh(), mp_policy=BF16)

    with memory_of(rig):
        links = check(rig, build)
    assert links.reductions == {"bfloat16": 2}


# --- order ---------------------------------------------------------------------------------------


def hurry(rig, seconds):
    """Have this rank sleep at random points: around each barrier and copy."""
    chance = random.Random(rig.rank)

    def slow(function):
        def run(*args, **kwargs):
            for moment in (0, 1):
                if chance.random() < 0.1:
                    if rig.device_type == "cuda":
                        torch.cuda._sleep(int(chance.random() * seconds * 2e9))
                    time.sleep(chance.random() * seconds)
                if moment == 0:
                    result = function(*args, **kwargs)
            return result

        return run

    halves = symmetric.Halves
    names = ("reserve", "half", "barrier", "wait", "finish")
    return [mock.patch.object(halves, name, slow(getattr(halves, name))) for name in names]


def steps_with_a_slow_rank(rig, steps):
    """Every gathered byte and every sum is checked at each step."""
    halves = symmetric.Halves(dist.group.WORLD, rig.device, timedelta(minutes=2))
    sums = symmetric.Halves(dist.group.WORLD, rig.device, timedelta(minutes=2))
    halves.reserve(4 * 64)  # now: a rank that finds a torn byte makes no more memory
    sums.reserve(2 * 64 * rig.world_size)
    patches = hurry(rig, 0.002)
    for patch in patches:
        patch.start()
    try:
        for step in range(steps):
            n = (64, 40, 9)[step % 3]
            gather = symmetric.CopyEngineGather(halves, step % 3)
            wire = symmetric.CopyEngineWire(sums, step % 3)
            everyone = [
                torch.full((n,), 131 * step + 17 * rank, dtype=torch.int32, device=rig.device)
                for rank in range(rig.world_size)
            ]
            whole = gather.allocate((n * rig.world_size,), dtype=torch.int32, device=rig.device)
            own = whole.view(rig.world_size, n)[rig.rank]
            own.copy_(everyone[rig.rank])
            gather(whole, own, dist.group.WORLD)
            assert torch.equal(whole, torch.cat(everyone)), step
            sent = wire.room(n * rig.world_size, rig.device, dist.group.WORLD)
            values = [
                (torch.arange(n * rig.world_size) % 7 + step % 64 + rank).bfloat16()
                for rank in range(rig.world_size)
            ]
            sent.copy_(values[rig.rank])
            out = torch.empty(n, device=rig.device)
            wire.sum([out], sent, 1.0, dist.group.WORLD)
            total = torch.stack(values).float().sum(0).view(rig.world_size, n)[rig.rank]
            assert torch.equal(out.cpu(), total), step
    finally:
        for patch in patches:
            patch.stop()


@ranks(2, 4)
def test_no_byte_is_torn_by_a_slow_rank(rig):
    with memory_of(rig):
        steps_with_a_slow_rank(rig, 40)


@pytest.mark.long
@pytest.mark.timeout(900)
@ranks(2, 4, seconds=900)
def test_no_byte_is_torn_in_500_steps(rig):
    with memory_of(rig):
        steps_with_a_slow_rank(rig, 500)


@ranks(2)
def test_a_torn_byte_would_be_seen(rig):
    """Without barriers the slow ranks' test fails: it can."""
    if rig.device_type == "cuda":
        return
    with (
        memory_of(rig),
        mock.patch.object(SharedBlock, "barrier", return_value=None),
    ):
        try:
            steps_with_a_slow_rank(rig, 100)
            torn = False
        except AssertionError:
            torn = True
    said = [None, None]
    dist.all_gather_object(said, torn)
    assert any(said)


# --- ranks that do not come ----------------------------------------------------------------------


@ranks(2, cuda=False)  # a GPU's barrier ends its process
def test_a_rank_that_gathers_once_more_runs_into_the_time_out(rig):
    """And not into the bytes of what the others gather next, which are as many."""
    model = shard(make((64, 64), recipe=None, device=rig.device), rig, mp_policy=BF16)
    with memory_of(rig):
        set_links(model, timeout=SOON)
        backward(model, rig)
        mine = rig.rank  # the block that this rank believes is next
        message = f"rank {mine} waited in vain on channel {mine + 1}"
        with pytest.raises(TimeoutError, match=message):
            model.blocks[mine].unshard()


@ranks(2, cuda=False)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_rank_that_raises_leaves_the_others_a_time_out(rig, where):
    model = shard(make(EVEN, recipe=None, device=rig.device), rig, mp_policy=BF16)
    with memory_of(rig):
        set_links(model, timeout=SOON)
        backward(model, rig)

        def refuse(*args):
            raise ArithmeticError("not today")

        if rig.rank == 0:
            if where == "forward":
                model.register_forward_pre_hook(refuse, prepend=True)
            else:
                model.head.register_forward_hook(
                    lambda module, args, out: out.register_hook(refuse) and None
                )
            with pytest.raises(ArithmeticError):
                backward(model, rig)
        else:
            # In the backward the root's parameters are there still: the first to come is a block.
            channel = 0 if where == "forward" else len(model.blocks)
            message = f"rank 1 waited in vain on channel {channel}"
            with pytest.raises(TimeoutError, match=message):
                backward(model, rig)


def test_a_graph_capture_is_refused():
    halves = symmetric.Halves(None, torch.device("cuda", 0), SOON)
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"),
    ):
        halves.reserve(16)
