"""Pages' blocks of code and the examples run as they stand, on two ranks."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8rs.demo.launch import Job, launch

ROOT = Path(__file__).parents[2]
PAGES = ["docs/fp8-weights.md", "docs/checkpoints.md"]
RANKS = 2

pytestmark = [pytest.mark.timeout(900), pytest.mark.newest_torch]


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.fixture
def device() -> str:
    if not torch.cuda.is_available():
        return "cpu"
    if torch.cuda.device_count() < RANKS:
        pytest.skip(f"needs {RANKS} GPUs: FSDP2 shards over the GPUs where there are some")
    return "cuda"


@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_code_run(page: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"), prepend=":")
    code = blocks(page)
    assert code
    job = Job("demo_jobs:page", {"blocks": code, "device": device}, device)
    for run in launch(job, RANKS, lambda _: None):
        # What a block leaves behind: the bytes a parameter at rest of each FP8 weight.
        assert len(run) == len(code)
        for at_rest in run:
            assert at_rest
            assert all(1 <= each < 1.07 for each in at_rest)


@pytest.mark.long
def test_the_example_of_fp8_weights_trains(device: str) -> None:
    script = ROOT / "examples" / "fp8_weights.py"
    assert len(script.read_text().splitlines()) <= 60
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", str(RANKS), str(script)],
        capture_output=True,
        text=True,
        check=False,
        env={"GLOO_SOCKET_IFNAME": "lo", **os.environ},
    )
    assert done.returncode == 0, done.stderr
    first, last = (float(loss) for loss in re.findall(r"loss (\S+)", done.stdout))
    assert last < 0.3 * first
