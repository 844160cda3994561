"""The harness itself: failures and hangs on a rank must be loud."""

import time

import pytest
import torch
from torch import distributed as dist

from distributed import ranks
from distributed.pool import RankFailure, pool


@ranks(1, 2, 4)
def test_every_rank_takes_part(rig):
    total = torch.ones((), device=rig.device)
    dist.all_reduce(total)
    assert total.item() == rig.world_size == dist.get_world_size()


@ranks(2, cuda=False)
@pytest.mark.parametrize("value", [3, 4])
def test_parameters_reach_the_ranks(rig, value):
    assert value in (3, 4)


def fail_on_rank_1(rig):
    if rig.rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def hang_on_rank_0(rig):
    if rig.rank == 0:
        time.sleep(1000)


def test_a_failing_rank_is_reported_with_its_traceback():
    with pytest.raises(RankFailure, match=r"(?s)rank \[1\].*fail_on_rank_1.*the reason"):
        pool().run(__name__, "fail_on_rank_1", 2, "cpu", {}, seconds=20)


def test_a_hang_is_reported_with_the_stacks():
    with pytest.raises(RankFailure, match=r"(?s)hung.*rank 0 is at.*hang_on_rank_0"):
        pool().run(__name__, "hang_on_rank_0", 2, "cpu", {}, seconds=2)
