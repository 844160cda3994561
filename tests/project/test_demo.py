"""The demo: its text, its model, its ranks, and its report."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import launch_jobs
from distributed import ranks
from fp8rs.__main__ import main
from fp8rs.demo import launch as launch_module
from fp8rs.demo import report
from fp8rs.demo.data import load_corpus
from fp8rs.demo.launch import RankFailed, launch, threads_per_rank
from fp8rs.demo.model import Llama, LlamaConfig, parameter_count
from fp8rs.demo.train import (
    DTYPES,
    Result,
    Settings,
    convert,
    converted_weights,
    faster_dtype,
    learning_rate,
    make_optimizer,
    shard,
)
from fp8rs.optim import AdamW

FIELDS = [
    "ranks",
    "device",
    "dtype",
    "recipe",
    "weights",
    "steps",
    "reference",
    "fp8",
    "seconds",
]
#: Variables that restrict torch, oneDNN and MKL to instructions of CPUs without AVX-512.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
TINY = LlamaConfig(vocabulary=256, dim=32, layers=2, heads=4, kv_heads=2, hidden=64)


ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benches"))


def run_on_two_ranks(
    function: Callable[..., Any], on_event: Callable[..., Any] = lambda _: None, **arguments: Any
) -> list[Any]:
    return launch(function, arguments, ranks=2, device="cpu", on_event=on_event)


# Text


def test_the_corpus_is_reproducible_and_split_by_file(tmp_path: Path) -> None:
    for index in range(80):
        (tmp_path / f"module{index}.py").write_text(f"<{index}>" * 4000)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("?" * 4000)
    first, second = load_corpus(tmp_path), load_corpus(tmp_path)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)
    parts = [bytes(part.tolist()) for part in (first.train, first.held_out)]
    for index in range(80):
        assert sum(f"<{index}>".encode() in part for part in parts) == 1
    assert not any(b"?" in part for part in parts)
    assert first.files == 80


def test_batches_depend_only_on_seed_and_step() -> None:
    corpus = load_corpus()
    batch = corpus.batch(seed=3, step=5, rows=4, length=64)
    assert batch.shape == (4, 65)
    assert batch.dtype == torch.int64
    assert torch.equal(batch, corpus.batch(3, 5, 4, 64))
    assert not torch.equal(batch, corpus.batch(3, 6, 4, 64))
    assert not torch.equal(batch, corpus.batch(4, 5, 4, 64))
    assert bytes(batch[0].tolist()) in bytes(corpus.train.tolist())


def test_too_little_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "only.py").write_text("x" * 1000)
    with pytest.raises(ValueError, match="too little text"):
        load_corpus(tmp_path)


# Model


def test_the_model_is_causal_and_starts_at_chance() -> None:
    model = Llama(TINY)
    model.init_weights(torch.Generator().manual_seed(0))
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(1))
    assert model.loss(tokens).item() == pytest.approx(math.log(256), abs=0.1)
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:], atol=1e-6)


def test_attention_depends_on_positions() -> None:
    model = Llama(TINY)
    model.init_weights(torch.Generator().manual_seed(0))
    with torch.no_grad():
        forward = model(torch.tensor([[1, 2, 3, 4]]))[0, -1]
        swapped = model(torch.tensor([[2, 1, 3, 4]]))[0, -1]
    assert not torch.allclose(forward, swapped, atol=1e-6)


def test_the_learning_rate_warms_up_and_decays() -> None:
    settings = Settings.choose("cpu", 2, steps=100)
    rates = [learning_rate(settings, step) for step in range(100)]
    assert rates[0] < rates[5] < max(rates) == pytest.approx(settings.learning_rate)
    assert rates[99] == pytest.approx(settings.learning_rate / 10, rel=0.05)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_all_ranks_have_equally_many_rows(ranks: int) -> None:
    assert Settings.choose("cpu", ranks).rows % ranks == 0


# Ranks


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
        f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n"
        "from fp8rs.demo.launch import launch\n"
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


# The whole demo


@dataclasses.dataclass(frozen=True)
class DemoRun:
    """What `fp8rs demo` printed and wrote."""

    result: dict[str, Any]
    output: str
    plot: bytes

    def losses(self, training: str) -> list[float]:
        """Return the first and the last held-out loss of "reference" or "fp8"."""
        curve = self.result[training]["held_out"]
        return [curve[0][1], curve[-1][1]]

    def converted_bytes(self, training: str) -> int:
        """Return the bytes of the converted weights in the all-gathers of a step.

        The reference gathers each block twice. What is not converted is equal in both trainings.
        """
        config = Settings.choose("cpu", 2).model
        attention = 2 * config.dim * config.dim + 2 * config.dim * config.kv_heads * config.head_dim
        numel = config.layers * (attention + 3 * config.dim * config.hidden)
        reference_bytes = 2 * numel * DTYPES[self.result["dtype"]].itemsize
        other_bytes = self.result["reference"]["allgather_bytes"] - reference_bytes
        # Embedding and head are gathered once, and norms are small.
        embedding_bytes = 2 * config.vocabulary * config.dim * DTYPES[self.result["dtype"]].itemsize
        assert embedding_bytes < other_bytes < 1.05 * embedding_bytes
        return int(self.result[training]["allgather_bytes"] - other_bytes)

    def check_bytes(self) -> None:
        """Check that FP8 is gathered with one byte for each element, and with few scales."""
        ratio = self.converted_bytes("fp8") / self.converted_bytes("reference")
        itemsize = DTYPES[self.result["dtype"]].itemsize
        assert 0.98 < ratio * itemsize <= 1.04

    def check_losses(self) -> None:
        """Check that both trainings start with the same weights. Only rounding differs at first."""
        first, last = self.losses("reference")
        first_fp8, last_fp8 = self.losses("fp8")
        assert first_fp8 == pytest.approx(first, rel=2e-3)
        assert last_fp8 == pytest.approx(last, rel=1e-2)


def run_demo(
    folder: Path, *arguments: str, timeout: float = 300, env: dict[str, str] | None = None
) -> DemoRun:
    json_path = folder / "result.json"
    plot_path = folder / "loss.png"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "fp8rs", "demo", "--device", "cpu", *arguments),
            *("--json", str(json_path), "--plot", str(plot_path)),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **(env or {})},
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "result.json"]
    return DemoRun(json.loads(json_path.read_text()), done.stdout, plot_path.read_bytes())


@pytest.mark.newest_torch
@pytest.mark.second_tier
@pytest.mark.parametrize("cpu", ["this", "avx2"])
def test_the_demo_compares_both_trainings(cpu: str, tmp_path: Path) -> None:
    """Train two steps instead of 200. `make wheel-test` trains one in the first tier."""
    run = run_demo(tmp_path, "--steps", "2", env=AVX2 if cpu == "avx2" else {})
    result = run.result
    assert list(result) == FIELDS
    assert (result["ranks"], result["device"], result["steps"]) == (2, "cpu", 2)
    assert result["recipe"] == "current"
    assert result["seconds"] > 0
    for training in ("reference", "fp8"):
        measured = result[training]
        assert 1e6 < measured["params"] < 3e6
        assert [step for step, _ in measured["held_out"]] == [0, 1, 2]
        assert measured["peak_memory"] > 4 * measured["params"]
        assert 0 < measured["seconds"] < result["seconds"]
    run.check_losses()
    run.check_bytes()

    assert "step    2/2  training loss" in run.output
    assert "held-out loss, last" in run.output
    assert "gathered in a step" in run.output
    assert run.plot.startswith(b"\x89PNG")
    if cpu == "avx2":
        assert result["dtype"] == "fp32"
    assert ("multiplies bf16 matrices slower" in run.output) == (result["dtype"] == "fp32")
    assert f"training 2 steps in {result['dtype']}" in run.output


@pytest.mark.parametrize(("slower", "dtype"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_the_reference_has_the_dtype_of_the_faster_gemm(
    slower: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def linear(x: torch.Tensor, weight: torch.Tensor) -> None:
        if x.dtype == DTYPES[slower]:
            time.sleep(0.02)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    assert faster_dtype() == dtype


def test_slow_bf16_takes_fewer_steps() -> None:
    settings = {dtype: Settings.choose("cpu", 2, dtype=dtype) for dtype in DTYPES}
    assert settings["bf16"].steps == 200
    assert settings["fp32"].steps == 40
    assert settings["fp32"].model == settings["bf16"].model
    assert Settings.choose("cpu", 2, steps=7, dtype="fp32").steps == 7


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_fp8_learns_as_the_reference_does(tmp_path: Path) -> None:
    """Train all steps. After a fifth of them, rounding alone changes the loss by 3%."""
    run = run_demo(tmp_path, "--steps", "200", timeout=1800)
    assert run.result["steps"] == 200
    first, last = run.losses("reference")
    assert first == pytest.approx(math.log(256), rel=0.05)
    assert last < 0.4 * first
    assert run.losses("fp8") == pytest.approx([first, last], rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize(
    ("recipe", "fp8_weight_bytes"),
    [
        ("delayed", None),
        ("rowwise", None),
        ("block", None),
        ("mxfp8", None),
        # With FP8 weights, a rank stores codes and scales.
        ("delayed", 1),
        ("mxfp8", 1 + 1 / 1024),
    ],
)
def test_the_demo_trains_every_recipe(
    recipe: str, fp8_weight_bytes: float | None, tmp_path: Path
) -> None:
    weights = "master" if fp8_weight_bytes is None else "fp8"
    run = run_demo(tmp_path, "--recipe", recipe, "--weights", weights, "--steps", "3")
    assert list(run.result) == FIELDS
    assert run.result["weights"] == weights
    run.check_losses()
    run.check_bytes()
    stored = run.result["reference"]["at_rest"]
    assert stored == pytest.approx({"weights": 4, "optimizer": 8}, rel=0.01)
    if fp8_weight_bytes is None:
        return

    stored = run.result["fp8"]["at_rest"]
    # Scales of tensors and counters of steps add a few bytes.
    assert fp8_weight_bytes <= stored["weights"] <= fp8_weight_bytes + 0.01
    # The optimizer stores masters and two moments in fp32.
    assert 12 <= stored["optimizer"] <= 12.01
    assert f"{stored['weights']:.2f} B" in run.output


@ranks(2, cuda=False)
def test_benches_count_the_collectives_of_fp8_weights(rig: Any) -> None:
    from traffic import counted

    config = LlamaConfig(vocabulary=64, dim=64, layers=2, heads=2, kv_heads=1, hidden=128)
    model = Llama(config)
    model.init_weights(torch.Generator().manual_seed(0))
    names, elements = converted_weights(model), parameter_count(model)
    converted = sum(p.numel() for n, p in model.named_parameters() if n in names)
    convert(model, "current", fp8_weights=True)
    shard(model, rig.device_type, rig.world_size)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with counted(model, rig.world_size) as found:
        model.loss(torch.arange(66).reshape(2, 33) % 64).backward()
        optimizer.step()
    # One byte per element, in the forward and in the backward.
    assert found.handed_over == 2 * converted
    assert sum(found.scatters) == 4 * elements
    # Four fp32 values per weight synchronize the scales, then fp8rs.optim reduces its amax.
    assert found.all_reduces == [16 * len(names), 4 * len(names)]


def test_benches_count_a_copy_of_the_weights() -> None:
    from meter import Meter

    meter = Meter()
    model = Llama(TINY)
    model.init_weights(torch.Generator().manual_seed(0))
    names = converted_weights(model)
    elements = sum(p.numel() for n, p in model.named_parameters() if n in names)
    convert(model, "current", fp8_weights=True, preserve_high_precision_init_val=True)
    optimizer = make_optimizer(model, Settings.choose("cpu", 1), fp8_adamw={})
    # The values before quantization are kept until the masters are initialized with them.
    assert meter.at_rest(model, optimizer, names).weights == pytest.approx(5, rel=0.01)
    model.loss(torch.zeros(1, 9, dtype=torch.int64)).backward()
    optimizer.step()
    found = meter.at_rest(model, optimizer, names)
    assert found.weights == pytest.approx(1, rel=0.01)
    assert found.optimizer == pytest.approx(12, rel=0.01)
    kept = torch.zeros(elements)
    assert meter.at_rest(model, optimizer, names).weights == pytest.approx(5, rel=0.01)
    assert kept.numel() == elements


@pytest.mark.newest_torch
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "none"], "--recipe none: "),
        (["--json", "/nowhere/result.json"], "the folder /nowhere does not exist"),
        (["--plot", "loss.txt"], "must end in .png, .svg or .pdf"),
        (["--ranks", "0"], "must be at least 1"),
        (["--steps", "abc"], "argument --steps: must be a whole number, not 'abc'"),
        (["--json", "/"], "--json /: this is a folder: name a file"),
        (["--plot", "/"], "--plot /: this is a folder: name a file"),
    ],
)
def test_options_that_cannot_work_start_nothing(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert refused(["demo", "--device", "cpu", *arguments], monkeypatch) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert not printed.out


@pytest.mark.newest_torch
def test_an_unwritable_output_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    path = str(tmp_path / "result.json")
    assert refused(["demo", "--device", "cpu", "--json", path], monkeypatch) == 2
    assert f"--json {path}: it cannot be written" in capsys.readouterr().err


@pytest.mark.newest_torch
def test_a_plot_without_matplotlib_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from fp8rs.demo import run

    monkeypatch.setattr(run, "find_spec", lambda name: None)
    assert refused(["demo", "--device", "cpu", "--plot", "loss.png"], monkeypatch) == 2
    assert "--plot loss.png: matplotlib is not installed" in capsys.readouterr().err


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of a command line that must not launch ranks."""
    from fp8rs.demo import run

    monkeypatch.setattr(run, "launch", lambda *_, **__: pytest.fail("something was trained"))
    try:
        return main(arguments)
    except SystemExit as ended:
        # argparse exits if it refuses an option.
        return int(str(ended.code))


@pytest.mark.newest_torch
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(["demo", "--device", "cuda"], monkeypatch) == 2
    assert "--device cpu works" in capsys.readouterr().err


def test_a_recipe_that_the_gpu_cannot_run_trains_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8rs.demo import run
    from fp8rs.gemm import devices

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(devices, "capability", lambda index: (10, 0) if index else (9, 0))
    monkeypatch.setattr(devices, "check_cuda", devices.check_cuda.__wrapped__)
    monkeypatch.setattr(run, "launch", lambda *_, **__: pytest.fail("something was trained"))
    with pytest.raises(run.DemoError, match=r"--recipe block: .*cuda:1 .*mxfp8") as caught:
        run.run(None, "block", 3, None, None, None)
    assert caught.value.code == 2


# Report


@pytest.fixture
def outcome() -> report.Outcome:
    def result(last: float, gathered: int) -> Result:
        return Result(
            params=10,
            held_out=[(0, 5.5), (4, last)],
            allgather_bytes=gathered,
            peak_memory=1,
            at_rest={"weights": gathered / 100, "optimizer": 8.0},
            seconds=1.0,
        )

    return report.Outcome(
        ranks=2,
        device="cpu",
        dtype="bf16",
        recipe="current",
        weights="master",
        steps=4,
        reference=result(2.0, 100),
        fp8=result(2.02, 50),
        seconds=2.5,
    )


def test_the_table_shows_ratios(outcome: report.Outcome) -> None:
    text = report.table(outcome)
    assert "1.010" in text
    assert "0.500" in text
    assert "0.50 B" in text


def test_the_table_names_dtype_and_device(outcome: report.Outcome) -> None:
    on_cpu = report.table(outcome)
    assert "bf16" in on_cpu
    assert report.ON_CPU in on_cpu
    # The memory of a process on the CPU is mostly libraries.
    assert "peak memory" not in on_cpu

    on_gpu = report.table(dataclasses.replace(outcome, device="cuda"))
    assert "peak memory" in on_gpu
    assert report.ON_CPU not in on_gpu

    in_fp32 = report.table(dataclasses.replace(outcome, dtype="fp32"))
    assert "twice the bytes of bf16" in in_fp32
    assert "twice the bytes of bf16" not in on_cpu


def test_the_table_of_one_rank_has_no_gathers(outcome: report.Outcome) -> None:
    for result in (outcome.reference, outcome.fp8):
        result.allgather_bytes = 0
    assert "0.00 MB" in report.table(outcome)


def test_an_interrupted_plot_leaves_the_older_file(
    outcome: report.Outcome, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    def interrupted(figure: Any, path: Path, **options: Any) -> None:
        Path(path).write_bytes(b"half a plot")
        raise KeyboardInterrupt

    path = tmp_path / "loss.png"
    path.write_bytes(b"an older plot")
    monkeypatch.setattr(Figure, "savefig", interrupted)
    with pytest.raises(KeyboardInterrupt):
        report.plot(outcome, path)
    assert path.read_bytes() == b"an older plot"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("live", [True, False])
def test_progress_ends_with_the_last_step(
    live: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: live, raising=False)
    show: Callable[[dict[str, Any]], None] = report.Progress("bf16", 30, sys.stdout)
    for step in range(1, 31):
        show({"step": step, "loss": 5.5 - step / 10})
    lines = capsys.readouterr().out.replace("\r", "\n").split("\n")
    assert "step   30/30  training loss 2.500" in lines[-2]
    assert "step    1/30  training loss 5.400" in lines[0] + lines[1]
    assert len(lines) >= 30 if live else len(lines) == 3
