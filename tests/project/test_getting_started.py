"""The first script in docs/getting-started.md trains as the page starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import demo_jobs

sys.path.append(str(Path(__file__).parents[2] / "benches"))
from launch import launch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "getting-started.md").read_text()


def script() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    return code


def quick_start() -> str:
    """Return the script's second part, which serves other models too."""
    head, _, second, _ = re.split(r"(?m)^(?=# \d\. )", script())
    needed = re.findall(
        r"^(?:import torch|from (?:fp8rs|torch\.distributed\.fsdp) .+)$", head, re.M
    )
    return "\n".join([*needed, "", second.strip()])


@pytest.mark.long
def test_the_script_trains_as_the_page_starts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (command,) = re.findall(r"^    torchrun (.+) train.py$", PAGE, re.MULTILINE)
    (tmp_path / "train.py").write_text(script())
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command.split(), "train.py"],
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
        cwd=tmp_path,
        env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"^step \d+: loss ([\d.]+)$", done.stdout, re.MULTILINE)]
    assert len(losses) == 6
    assert losses[0] > 5
    assert losses[-1] < 1.5
    assert "8 linear layers converted" in done.stderr


def test_quick_start_is_ten_lines() -> None:
    assert len(quick_start().split("\n\n", 1)[1].splitlines()) + 3 <= 10


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_quick_start_trains(ranks: int) -> None:
    device = "cpu"
    if torch.cuda.is_available():
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs: FSDP2 shards over the GPUs where there are some")
        device = "cuda"
    arguments = {"code": quick_start(), "device": device}
    for losses in launch(demo_jobs.quick_start, arguments, ranks=ranks, device=device):
        assert losses[-1] < 0.8 * losses[0]
