"""All-gathers and reduce-scatters through symmetric memory: bytes, order and lifetime.

On the CPU, `SharedFiles` replaces the memory of the GPUs.
"""

import random
import time
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from comm.gradients import (
    backward,
    check,
    check_same_gradients,
    sum_in_order,
    two_micro_batches,
)
from comm.shared_files import SharedFiles
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import EVEN, HIDDEN, RECIPES, batch, make, shard
from distributed.versions import needs
from fp8rs.comm import set_fsdp_comm, symmetric

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SOON = timedelta(seconds=2)


@contextmanager
def peer_memory(rig):
    """Use the memory of the GPUs, or `SharedFiles` on the CPU."""
    if rig.device_type == "cuda":
        yield
        return
    SharedFiles.allocated = 0
    with (
        mock.patch.object(symmetric, "PeerMemory", SharedFiles),
        mock.patch.object(symmetric, "unavailable", return_value=("", "")),
    ):
        yield


def is_symmetric(comm):
    chosen = {(choice.all_gather, choice.reduce_scatter) for choice in comm.choices}
    return chosen == {("symmetric", "symmetric")}


def test_memory_is_zeroed_before_other_ranks_can_signal():
    """torch zeroes it on the default stream, where other work may be pending."""
    calls = mock.Mock()
    group = mock.Mock(**{"rank.return_value": 0, "size.return_value": 2})
    calls.memory.get_signal_pad_size.return_value = 2048
    with (
        mock.patch.object(symmetric, "symmetric_memory", return_value=calls.memory),
        mock.patch.object(torch.cuda, "synchronize", calls.synchronize),
    ):
        symmetric.PeerMemory(group, torch.device("cuda", 0), 64, SOON)
    names = [name for name, _, _ in calls.mock_calls]
    assert names[:3] == ["memory.empty", "synchronize", "memory.rendezvous"]


@ranks(2, 4)
@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("hidden", list(HIDDEN))
def test_gradients_have_the_same_bytes_in_each_step(rig, recipe, hidden):
    """Four steps use each half of the buffers several times."""

    def build():
        model = make(HIDDEN[hidden], recipe=RECIPES.get(recipe), device=rig.device)
        return shard(model, rig, mp_policy=BF16)

    expected, model = build(), build()
    sum_in_order(expected)
    with peer_memory(rig):
        assert is_symmetric(set_fsdp_comm(model))
        for step in range(3):
            backward(expected, rig, step)
            backward(model, rig, step)
        with Collectives() as seen:
            backward(model, rig)
        backward(expected, rig)
    # Collectives of torch reduce only amaxes, which are smaller than FP8 weights.
    assert sum(c.nbytes for c in seen.seen) < sum(p.numel() for p in model.parameters())
    check_same_gradients(model, expected)


@ranks(2)
def test_accumulated_gradients_are_reduced_by_torch(rig):
    def build():
        return shard(make(EVEN, device=rig.device), rig, mp_policy=BF16)

    def run(model, rig):
        two_micro_batches(model, rig, synced=False)

    with peer_memory(rig):
        comm = check(rig, build, run)
    assert comm.reduce_scatters == {"float32": 3}
    assert comm.symmetric_memory == 0


@ranks(2)
def test_the_first_step_allocates_symmetric_memory(rig):
    """Reduce-scatters need as much as FSDP2's float32 input, all-gathers need two shards."""
    model = shard(make((16, 64, 32), recipe=None, device=rig.device), rig, mp_policy=BF16)
    with peer_memory(rig):
        comm = set_fsdp_comm(model)
        assert comm.symmetric_memory == 0
        backward(model, rig)
        allocated = SharedFiles.allocated
        backward(model, rig)
    assert SharedFiles.allocated == allocated  # The second step allocates nothing.
    largest = sum(p.numel() for p in make((64,), recipe=None).blocks[0].parameters())
    padding = 64 * rig.world_size
    assert 6 * largest <= comm.symmetric_memory <= 6 * largest + 2 * padding
    assert f"symmetric memory: {comm.symmetric_memory:,} B" in str(comm)


@ranks(4)
def test_each_process_group_has_its_own_memory(rig):
    def build():
        model = make((64, 48), device=rig.device)
        for block, mesh in zip(model.blocks, (rig.mesh(), rig.mesh(2, 2)), strict=True):
            fully_shard(block, mesh=mesh, mp_policy=BF16)
        return fully_shard(model, mesh=rig.mesh(2, 2), mp_policy=BF16)

    expected, model = build(), build()
    sum_in_order(expected)
    with peer_memory(rig):
        comm = set_fsdp_comm(model)
        assert is_symmetric(comm)
        for step in range(3):
            backward(expected, rig, step)
            backward(model, rig, step)
    check_same_gradients(model, expected)
    assert comm.reduce_scatters == {"bfloat16": 9}


@ranks(2)
def test_models_with_interleaved_steps_have_their_own_memory(rig):
    models = [shard(make(EVEN, device=rig.device), rig, mp_policy=BF16) for _ in range(3)]
    sum_in_order(models[0])
    with peer_memory(rig):
        for model in models[1:]:
            set_fsdp_comm(model)
        losses = [m(batch(rig)).float().square().mean() for m in models]
        for loss in reversed(losses):
            loss.backward()
    for model in models[1:]:
        check_same_gradients(model, models[0])


@ranks(2)
@needs(FSDPModule, "set_separate_reduce_scatter_group")
def test_two_reduce_scatters_over_a_separate_group_are_in_flight(rig):
    """FSDP2 orders less in this case. `DoubleBuffer.wait` keeps each half until it is free."""

    def build():
        blocks = shard(make((64, 48, 32), device=rig.device), rig, mp_policy=BF16)
        blocks.set_separate_reduce_scatter_group()
        blocks.set_reduce_scatter_max_input_buffers(2)
        return blocks

    def run(model, rig):
        for step in range(3):
            backward(model, rig, step)

    with peer_memory(rig):
        comm = check(rig, build, run)
    assert comm.reduce_scatters == {"bfloat16": 12}


@ranks(2)
def test_modules_that_are_sharded_together(rig):
    def build():
        model = make((64, 48), device=rig.device)
        fully_shard(list(model.blocks), mesh=rig.mesh(), mp_policy=BF16)
        return fully_shard(model, mesh=rig.mesh(), mp_policy=BF16)

    with peer_memory(rig):
        comm = check(rig, build)
    assert comm.reduce_scatters == {"bfloat16": 2}


# --- order ---------------------------------------------------------------------------------------


def random_delays(rig, seconds):
    """Return patches that make this rank sleep at random points, around barriers and copies."""
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

    buffer = symmetric.DoubleBuffer
    names = ("reserve", "half", "barrier", "wait", "finish")
    return [mock.patch.object(buffer, name, slow(getattr(buffer, name))) for name in names]


def steps_with_a_slow_rank(rig, steps):
    """Check every gathered byte and every sum in each step."""
    gathers = symmetric.DoubleBuffer(dist.group.WORLD, rig.device, timedelta(minutes=2))
    sums = symmetric.DoubleBuffer(dist.group.WORLD, rig.device, timedelta(minutes=2))
    # Allocate now: a rank that finds a wrong byte stops, and the others would wait for it.
    gathers.reserve(4 * 64)
    sums.reserve(2 * 64 * rig.world_size)
    patches = random_delays(rig, 0.002)
    for patch in patches:
        patch.start()
    try:
        for step in range(steps):
            n = (64, 40, 9)[step % 3]
            gather = symmetric.CopyEngineAllGather(gathers, step % 3)
            transport = symmetric.CopyEngineTransport(sums, step % 3)
            everyone = [
                torch.full((n,), 131 * step + 17 * rank, dtype=torch.int32, device=rig.device)
                for rank in range(rig.world_size)
            ]
            whole = gather.allocate((n * rig.world_size,), dtype=torch.int32, device=rig.device)
            own = whole.view(rig.world_size, n)[rig.rank]
            own.copy_(everyone[rig.rank])
            gather(whole, own, dist.group.WORLD)
            assert torch.equal(whole, torch.cat(everyone)), step
            sent = transport.allocate(n * rig.world_size, rig.device, dist.group.WORLD)
            values = [
                (torch.arange(n * rig.world_size) % 7 + step % 64 + rank).bfloat16()
                for rank in range(rig.world_size)
            ]
            sent.copy_(values[rig.rank])
            out = torch.empty(n, device=rig.device)
            transport.reduce([out], sent, 1.0, dist.group.WORLD)
            total = torch.stack(values).float().sum(0).view(rig.world_size, n)[rig.rank]
            assert torch.equal(out.cpu(), total), step
    finally:
        for patch in patches:
            patch.stop()


@ranks(2, 4)
def test_a_slow_rank_reads_the_right_bytes(rig):
    with peer_memory(rig):
        steps_with_a_slow_rank(rig, 40)


@pytest.mark.long
@pytest.mark.timeout(900)
@ranks(2, 4, seconds=900)
def test_a_slow_rank_reads_the_right_bytes_in_500_steps(rig):
    with peer_memory(rig):
        steps_with_a_slow_rank(rig, 500)


@ranks(2)
def test_the_test_of_a_slow_rank_fails_without_barriers(rig):
    if rig.device_type == "cuda":
        return
    with (
        peer_memory(rig),
        mock.patch.object(SharedFiles, "barrier", return_value=None),
    ):
        try:
            steps_with_a_slow_rank(rig, 100)
            wrong = False
        except AssertionError:
            wrong = True
    found = [None, None]
    dist.all_gather_object(found, wrong)
    assert any(found)


# --- errors on one rank --------------------------------------------------------------------------


@ranks(2, cuda=False)  # On a GPU, the time-out of a barrier ends the process.
def test_a_rank_that_gathers_another_module_times_out(rig):
    """It does not read the bytes of the other ranks' module, which has the same size."""
    model = shard(make((64, 64), recipe=None, device=rig.device), rig, mp_policy=BF16)
    with peer_memory(rig):
        set_fsdp_comm(model, timeout=SOON)
        backward(model, rig)
        mine = rig.rank  # Each rank gathers another block.
        message = f"rank {mine} timed out on channel {mine + 1}"
        with pytest.raises(TimeoutError, match=message):
            model.blocks[mine].unshard()


@ranks(2, cuda=False)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_other_ranks_time_out_after_an_error_on_one(rig, where):
    model = shard(make(EVEN, recipe=None, device=rig.device), rig, mp_policy=BF16)
    with peer_memory(rig):
        set_fsdp_comm(model, timeout=SOON)
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
            # In the backward, the root is still unsharded. The last block is gathered first.
            channel = 0 if where == "forward" else len(model.blocks)
            message = f"rank 1 timed out on channel {channel}"
            with pytest.raises(TimeoutError, match=message):
                backward(model, rig)


def test_a_graph_capture_is_refused():
    buffer = symmetric.DoubleBuffer(None, torch.device("cuda", 0), SOON)
    with (
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=True),
        pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"),
    ):
        buffer.reserve(16)
