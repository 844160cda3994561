"""The launcher of the benchmarks, which tests use too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import launch_jobs

sys.path.append(str(Path(__file__).parents[2] / "benches"))
import launch as launch_module
from launch import RankFailed, launch, threads_per_rank

ROOT = Path(__file__).parents[2]


def run_on_two_ranks(
    function: Callable[..., Any], on_event: Callable[..., Any] = lambda _: None, **arguments: Any
) -> list[Any]:
    return launch(function, arguments, ranks=2, device="cpu", on_event=on_event)


@pytest.mark.newest_torch
def test_launch_returns_results_in_rank_order_and_forwards_events() -> None:
    events: list[dict[str, Any]] = []
    results = run_on_two_ranks(launch_jobs.add, events.append, given="this")
    assert results == [{"rank": rank, "total": 1.0, "given": "this"} for rank in range(2)]
    assert events == [{"step": 1}, {"step": 2}]


@pytest.mark.newest_torch
def test_a_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankFailed, match="rank 0 failed") as caught:
        run_on_two_ranks(launch_jobs.fail_on_one)
    assert caught.value.rank == 0
    assert "ValueError: the planned failure" in str(caught.value)
    assert "in fail_on_one" in str(caught.value)


@pytest.mark.newest_torch
def test_a_killed_rank_is_named() -> None:
    with pytest.raises(RankFailed, match=r"rank 1 failed:\nended by SIGKILL"):
        run_on_two_ranks(launch_jobs.die_on_one)


@pytest.mark.newest_torch
def test_a_job_past_its_limit_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = 0.0

    class Clock:
        """Exceeds the limit once both ranks have started, however long that takes."""

        sleep = time.sleep

        @staticmethod
        def monotonic() -> float:
            return time.monotonic() + passed

    def start(event: dict[str, Any]) -> None:
        nonlocal passed
        passed = 2000.0

    monkeypatch.setattr(launch_module, "time", Clock)
    with pytest.raises(TimeoutError, match="not done after 1000 s"):
        launch(
            launch_jobs.hang,
            {"folder": str(tmp_path)},
            ranks=2,
            device="cpu",
            on_event=start,
            limit_seconds=1000,
        )
    assert_ended(tmp_path)


@pytest.mark.newest_torch
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_launcher_leaves_no_process(
    tmp_path: Path, sign: signal.Signals
) -> None:
    code = (
        # A shell that starts processes in the background ignores SIGINT in them.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"import sys; sys.path += {[str(ROOT / 'tests'), str(ROOT / 'benches')]!r}\n"
        "from launch import launch\n"
        "import launch_jobs\n"
        f"launch(launch_jobs.hang, {{'folder': {str(tmp_path)!r}}}, ranks=2, device='cpu',"
        " on_event=lambda event: print(event, flush=True))"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with launcher:
        assert launcher.stdout is not None
        assert b"hanging" in launcher.stdout.readline()
        launcher.send_signal(sign)
        assert launcher.wait(60) != 0
    assert_ended(tmp_path)


def assert_ended(folder: Path) -> None:
    started = [int(path.name) for path in folder.iterdir()]
    assert len(started) == 2
    deadline = time.monotonic() + 30
    while any(map(is_running, started)):
        assert time.monotonic() < deadline, "a rank outlived its launcher"
        time.sleep(0.1)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [threads_per_rank(ranks) for ranks in (1, 2, 3, 16)] == [8, 4, 2, 1]
