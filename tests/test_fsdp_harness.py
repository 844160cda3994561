"""The harness itself: failures and hangs on a rank must be loud."""

import time

import pytest
import torch
from torch import distributed as dist

from distributed import ranks
from distributed.pool import RankFailure, pool
from distributed.ranks import SECONDS


@ranks(1, 2, 4)
def test_every_rank_takes_part(rig):
    total = torch.ones((), device=rig.device)
    dist.all_reduce(total)
    assert total.item() == rig.world_size == dist.get_world_size()


def name_itself(rig, value):
    return rig.rank, rig.world_size, value


@pytest.mark.parametrize("value", [3, "four"])
def test_arguments_reach_the_ranks_and_results_come_back_by_rank(value):
    results = pool().run(__name__, "name_itself", 2, "cpu", {"value": value}, SECONDS)
    assert results == [(0, 2, value), (1, 2, value)]


@ranks(2, cuda=False)
@pytest.mark.parametrize("value", [3, 4])
def wrong_for_four(rig, value):
    assert value == 3


def test_a_case_takes_the_values_of_its_parametrize_marks():
    """Through what `ranks` makes of a case, which pytest calls with keyword arguments."""
    wrong_for_four(world_size=2, device_type="cpu", value=3)
    with pytest.raises(RankFailure, match="wrong_for_four"):
        wrong_for_four(world_size=2, device_type="cpu", value=4)


def fail_on_rank_1(rig):
    if rig.rank == 1:
        raise ValueError("the reason")
    dist.barrier()


def hang_on_rank_0(rig):
    if rig.rank == 0:
        time.sleep(1000)


def test_a_failing_rank_is_reported_with_its_traceback():
    with pytest.raises(RankFailure, match=r"(?s)rank \[1\].*fail_on_rank_1.*the reason"):
        pool().run(__name__, "fail_on_rank_1", 2, "cpu", {}, SECONDS)


def test_a_hang_is_reported_with_the_stacks():
    with pytest.raises(RankFailure, match=r"(?s)hung.*rank 0 is at.*hang_on_rank_0"):
        pool().run(__name__, "hang_on_rank_0", 2, "cpu", {}, seconds=5)
