"""The harness of multi-rank tests reports failures and hangs of any rank."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from distributed import ranks
from distributed.folders import shared_folder
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
    """Run it as `ranks` returns it. pytest calls it with keyword arguments."""
    wrong_for_four(world_size=2, device_type="cpu", value=3)
    with pytest.raises(RankFailure, match="wrong_for_four"):
        wrong_for_four(world_size=2, device_type="cpu", value=4)


def write_to_folder(rig):
    folder = Path(shared_folder(rig))
    (folder / str(rig.rank)).touch()
    dist.barrier()
    assert len(list(folder.iterdir())) == 2
    return folder


def test_a_shared_folder_is_removed_after_the_case():
    first, second = pool().run(__name__, "write_to_folder", 2, "cpu", {}, SECONDS)
    assert first == second
    assert not first.exists()


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


def end_rank_1(rig, path, times):
    if rig.rank == 1 and len(list(Path(path).iterdir())) < times:
        Path(path, str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGABRT)
    dist.barrier()
    return rig.rank


def test_a_case_is_repeated_once_if_a_signal_ends_a_rank(tmp_path):
    def run(times):
        return pool().run(
            __name__, "end_rank_1", 2, "cpu", {"path": str(tmp_path), "times": times}, SECONDS
        )

    with pytest.warns(UserWarning, match=r"(?s)rank of end_rank_1: .*exit code -6.*in end_rank_1"):
        assert run(times=1) == [0, 1]
    with (
        pytest.warns(UserWarning, match="rank of end_rank_1"),
        pytest.raises(RankFailure, match=r"(?s)rank \[1\].*exit code -6"),
    ):
        run(times=3)


def delay_the_next_case(rig):
    """Delay rank 0 by half a second when the next case creates its groups."""
    make = dist.init_process_group

    def slowly(*args, **kwargs):
        dist.init_process_group = make
        make(*args, **kwargs)
        time.sleep(0.5)
        dist.connected_at = time.monotonic()

    if rig.rank == 0:
        dist.init_process_group = slowly


def moments(rig):
    """Return when the case began and when its groups were created (None unless delayed)."""
    return time.monotonic(), vars(dist).pop("connected_at", None)


def test_no_rank_starts_before_all_are_connected():
    """A rank that fails at once would close connections that other ranks are opening."""
    pool().run(__name__, "delay_the_next_case", 2, "cpu", {}, SECONDS)
    (_, connected), (began, _) = pool().run(__name__, "moments", 2, "cpu", {}, SECONDS)
    assert connected is not None and began >= connected


def refuse_groups(rig):
    def refuse(*args, **kwargs):
        raise RuntimeError("no groups today")

    dist.init_process_group = refuse


def test_ranks_that_cannot_connect_are_reported_and_replaced():
    """torch names groups by a counter.

    If ranks had different counters, the next case would hang.
    """
    pool().run(__name__, "refuse_groups", 2, "cpu", {}, SECONDS)
    with pytest.raises(RankFailure, match=r"(?s)rank \[0, 1\].*no groups today"):
        pool().run(__name__, "name_itself", 2, "cpu", {"value": 3}, SECONDS)
    results = pool().run(__name__, "name_itself", 4, "cpu", {"value": 3}, SECONDS)
    assert results == [(rank, 4, 3) for rank in range(4)]
