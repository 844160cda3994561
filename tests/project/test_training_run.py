"""The benchmark that trains on the text of installed packages, on a small text and model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.newest_torch


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return the benchmark, whose trainings run in this process."""
    monkeypatch.syspath_prepend(ROOT / "benches")
    import training_run

    def launch(function: Callable[..., Any], *arguments: Any, on_event: Any, **_: Any) -> list[Any]:
        return [function(*arguments, on_event)]

    monkeypatch.setattr(training_run, "launch", launch)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield training_run
    dist.destroy_process_group()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Return a folder with text, a part of which is held out."""
    folder = tmp_path / "text"
    folder.mkdir()
    for index in range(200):
        (folder / f"module{index}.py").write_text(f"def function{index}():\n    return 1\n" * 20)
    (folder / "copy.py").write_text((folder / "module0.py").read_text())
    (folder / "short.py").write_text("1\n")
    (folder / "binary.txt").write_bytes(b"\xff" * 300)
    (folder / "data.json").write_text("0" * 300)
    return folder


def train(bench: Any, out: Path, variant: str, *options: str) -> int:
    sizes = ["--size", "tiny", "--steps", "4", "--every", "2", "--rows", "4", "--length", "32"]
    code: int = bench.main(
        ["train", str(out), variant, "--device", "cpu", "--no-compile", *sizes, *options]
    )
    return code


def losses(out: Path, variant: str) -> list[list[float]]:
    run = json.loads((out / f"{variant}.json").read_text())
    assert [step for step, _ in run["held_out"]] == [0, 2, 4]
    return [*run["train"], *run["held_out"]]


def test_every_text_is_taken_once(bench: Any, text: Path) -> None:
    texts = dict(bench.texts([text]))
    assert len(texts) == 200
    assert "short.py" not in texts
    assert sum(name in texts for name in ("copy.py", "module0.py")) == 1
    assert list(texts) == sorted(texts)


def test_tokens_are_bytes_or_those_of_a_trained_tokenizer(
    bench: Any, text: Path, tmp_path: Path
) -> None:
    data = ["data", str(tmp_path), "--roots", str(text), "--vocabulary"]
    assert bench.main([*data, "256"]) == 0
    tokens = torch.load(tmp_path / "tokens.pt", weights_only=True)
    assert tokens["train"].numel() + tokens["held_out"].numel() == tokens["bytes"]
    assert tokens["held_out"].numel() > 0
    assert bytes(tokens["train"][:4].tolist()) == b"def "
    pytest.importorskip("tokenizers")
    assert bench.main([*data, "300"]) == 0
    fewer = torch.load(tmp_path / "tokens.pt", weights_only=True)
    assert fewer["train"].numel() < 0.5 * tokens["train"].numel()
    assert 256 <= fewer["train"].max() < 300


def test_an_interrupted_run_resumes_with_equal_losses(
    bench: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uninterrupted = tmp_path / "whole"
    interrupted = tmp_path / "parts"
    for out in (uninterrupted, interrupted):
        bench.main(["data", str(out), "--roots", str(text), "--vocabulary", "256"])
    variant = "fp8-weights"
    assert train(bench, uninterrupted, variant) == 0
    assert train(bench, interrupted, variant, "--seconds", "0") == 3
    assert (interrupted / variant / "step-2").is_dir()
    assert train(bench, interrupted, variant) == 0
    assert losses(interrupted, variant) == losses(uninterrupted, variant)
    assert [path.name for path in (interrupted / variant).iterdir()] == ["step-4"]
    with pytest.raises(ValueError, match="is of a run with other settings: remove"):
        train(bench, interrupted, variant, "--learning-rate", "1")
    assert train(bench, interrupted, "bf16-0") == 0
    assert train(bench, interrupted, "bf16-1") == 0
    assert losses(interrupted, "bf16-0") != losses(interrupted, "bf16-1")
    capsys.readouterr()
    pytest.importorskip("matplotlib")
    assert bench.main(["report", str(interrupted)]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [
        "| bf16",
        "| bf16, seed 1",
        "| fp8rs current, FP8 weights",
    ]
    report = json.loads((interrupted / "report.json").read_text())
    summary = report["summary"]
    runs = report["runs"]
    assert summary["bf16-0"]["above_bf16"] == pytest.approx(-summary["bf16-1"]["above_bf16"])
    assert (interrupted / "report.svg").read_text().startswith("<?xml")

    # A stopped run is compared with references at its own steps, if they reached them.
    runs["fp8-weights"] |= {"step": 2, "held_out": runs["fp8-weights"]["held_out"][:2]}
    sums = {name: run["held_out"][0][1] + run["held_out"][1][1] for name, run in runs.items()}
    ratio = sums["fp8-weights"] / ((sums["bf16-0"] + sums["bf16-1"]) / 2)
    assert bench.summary(runs)["fp8-weights"]["above_bf16"] == pytest.approx(ratio - 1)
    runs["bf16-0"] |= {"step": 0, "held_out": runs["bf16-0"]["held_out"][:1]}
    ratio = sums["fp8-weights"] / sums["bf16-1"]
    assert bench.summary(runs)["fp8-weights"]["above_bf16"] == pytest.approx(ratio - 1)


def test_without_checkpoints_a_run_writes_results_and_begins_again(
    bench: Any, text: Path, tmp_path: Path
) -> None:
    bench.main(["data", str(tmp_path), "--roots", str(text), "--vocabulary", "256"])
    no_checkpoints = ["--save-every", "0"]
    assert train(bench, tmp_path, "bf16-0", "--seconds", "0", *no_checkpoints) == 3
    partial = json.loads((tmp_path / "bf16-0.json").read_text())
    assert partial["step"] == 2
    assert not list(tmp_path.rglob("*.distcp"))
    assert train(bench, tmp_path, "bf16-0", *no_checkpoints) == 0
    assert partial["train"][0] in losses(tmp_path, "bf16-0")


def test_variants_with_8_bit_moments_train_and_resume(
    bench: Any, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.main(["data", str(tmp_path), "--roots", str(text), "--vocabulary", "256"])
    assert train(bench, tmp_path, "bf16-0") == 0
    assert train(bench, tmp_path, "fp8-moments", "--seconds", "0") == 3
    for name in ("fp8-moments", "fp8-moments-no-masters-999", "8bit-fp8rs", "fine-tune"):
        assert train(bench, tmp_path, name) == 0
    assert losses(tmp_path, "tune-fp8-moments")[2][1] < losses(tmp_path, "bf16-0")[2][1]

    capsys.readouterr()
    pytest.importorskip("matplotlib")
    assert bench.main(["report", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "report.json").read_text())["summary"]
    state_bytes = {name: row["state_bytes_per_parameter"] for name, row in summary.items()}
    assert state_bytes["8bit-fp8rs"] < state_bytes["bf16-0"]
    assert state_bytes["fp8-moments-no-masters-999"] < state_bytes["fp8-moments"] - 2
    assert state_bytes["tune-fp8-moments"] < state_bytes["tune-fp32"]
    assert summary["tune-fp32"]["above_bf16"] == 0
    assert summary["fp8-moments-no-masters-999"]["above_bf16"] is None


def test_an_optimizer_of_local_tensors_takes_the_steps_of_one_of_dtensors(bench: Any) -> None:
    options = {"lr": 0.1, "weight_decay": 0.1}
    results = []
    for make in (
        lambda model: torch.optim.AdamW(model.parameters(), **options),
        lambda model: bench._on_local_tensors(model, torch.optim.AdamW, options),
    ):
        torch.manual_seed(0)
        model = fully_shard(torch.nn.Linear(8, 4), mesh=init_device_mesh("cpu", (1,)))
        optimizer = make(model)
        for _ in range(2):
            model(torch.randn(3, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([param.full_tensor() for param in model.parameters()])
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_report_without_results_is_an_error(
    bench: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["report", str(tmp_path)]) == 2
    assert "run the train command first" in capsys.readouterr().err


def test_the_page_has_the_numbers_of_the_published_curves(bench: Any) -> None:
    published = json.loads((ROOT / "docs/figures/training_moments.json").read_text())["runs"]
    # Trainings that shared a GPU have no speeds.
    runs = {name: run | {"speeds": [0.0]} for name, run in published.items()}
    at_1050 = {}
    for name, run in runs.items():
        held_out = [[step, loss] for step, loss in run["held_out"] if step <= 1050]
        at_1050[name] = run | {"step": 1050, "held_out": held_out}
    summary = bench.summary(runs)
    summary_at_1050 = bench.summary(at_1050)

    results = (ROOT / "benches/RESULTS.md").read_text()
    section = results.split("### Training with 8-bit moments\n")[1].split("\n## ")[0]
    for name, row in summary.items():
        if bench.VARIANTS[name].start is not None:
            for _, loss in runs[name]["held_out"]:
                assert f"{loss:.4f}" in section, name
            continue
        cells = [
            row["title"],
            f"{row['step']:,}",
            f"{row['loss']:.4f}",
            f"{row['above_bf16']:+.2%}",
            f"{summary_at_1050[name]['above_bf16']:+.2%}",
            f"{row['state_bytes_per_parameter']:.2f}",
            f"{row['peak_memory'] / 1e9:.1f}",
        ]
        assert f"| {' | '.join(cells)} |\n" in section, name
