"""The README's commands exist and its quick start runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fp8rs.demo.launch import Job, launch

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def quick_start() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    return code


def test_quick_start_is_ten_lines() -> None:
    assert len(quick_start().split("\n\n", 1)[1].splitlines()) + 3 <= 10


@pytest.mark.parametrize("ranks", [1, 2])
def test_quick_start_trains(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    device = "cpu"
    if torch.cuda.is_available():
        if torch.cuda.device_count() < ranks:
            pytest.skip(f"needs {ranks} GPUs: FSDP2 shards over the GPUs where there are some")
        device = "cuda"
    job = Job("demo_jobs:quick_start", {"code": quick_start(), "device": device}, device)
    for losses in launch(job, ranks, lambda _: None):
        assert losses[-1] < 0.8 * losses[0]


def test_targets_and_files_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:`|^    )make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / link).is_file(), link
    for script in re.findall(r"python (benches/\S+)", README):
        assert (ROOT / script).is_file(), script
