"""The demo: its text, its model, its training, and its report."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import ranks
from fp8rs import __main__ as command_line
from fp8rs.__main__ import main
from fp8rs.demo import report
from fp8rs.demo import run as run_module
from fp8rs.demo import train as train_module
from fp8rs.demo.data import load_corpus
from fp8rs.demo.model import Llama, LlamaConfig
from fp8rs.demo.run import faster_dtype
from fp8rs.demo.train import DTYPES, Result, Settings, learning_rate, steps_in, train, train_step
from fp8rs.gemm import devices

sys.path.append(str(Path(__file__).parents[2] / "benches"))
from traffic import counted

FIELDS = ["ranks", "device", "dtype", "recipe", "steps", "reference", "fp8"]
#: Variables that restrict torch, oneDNN and MKL to instructions of CPUs without AVX-512.
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
TINY = LlamaConfig(vocabulary=256, dim=32, layers=2, heads=4, kv_heads=2, hidden=64)


# Text


def test_the_corpus_is_reproducible_and_split_by_file(tmp_path: Path) -> None:
    for index in range(80):
        (tmp_path / f"module{index}.py").write_text(f"<{index}>" * 4000)
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "skipped.py").write_text("?" * 4000)
    first = load_corpus(tmp_path)
    second = load_corpus(tmp_path)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.held_out, second.held_out)
    parts = [bytes(part.tolist()) for part in (first.train, first.held_out)]
    for index in range(80):
        assert sum(f"<{index}>".encode() in part for part in parts) == 1
    assert not any(b"?" in part for part in parts)


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
        before = model(tokens)
        after = model(changed)
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


# Training


@pytest.fixture
def process_group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("steps", "shown"), [(1, [1]), (25, [3, 6, 9, 12, 15, 18, 21, 24, 25]), (2, [1, 2])]
)
def test_progress_names_the_training_loss_of_its_step(
    steps: int,
    shown: list[int],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    training_losses = []
    loss_of = Llama.loss

    def loss(model: Llama, tokens: torch.Tensor) -> torch.Tensor:
        value = loss_of(model, tokens)
        if value.requires_grad:
            training_losses.append(value.item())
        return value

    monkeypatch.setattr(Llama, "loss", loss)
    settings = Settings(TINY, "cpu", steps, rows=2, length=16, learning_rate=1e-2)
    result = train(settings, None)
    assert [step for step, _ in result.held_out] == [0, *shown]

    first, *lines = capsys.readouterr().out.splitlines()
    assert f"held-out loss {result.held_out[0][1]:.3f}" in first
    assert len(lines) == len(shown)
    for line, (step, held_out_loss) in zip(lines, result.held_out[1:], strict=True):
        assert (
            f"bf16: step {step:>4}/{steps}  training loss {training_losses[step - 1]:.3f}  "
            f"held-out loss {held_out_loss:.3f}"
        ) in line


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("step_seconds", "steps"), [(0.01, 200), (0.5, 100), (0.7, 70), (100.0, 10)]
)
def test_slow_machines_train_fewer_steps(
    step_seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainings take 100 s in all, and all their evaluations have the same distance."""
    seconds = 0.0

    class Clock:
        @staticmethod
        def perf_counter() -> float:
            return seconds

    def train_step(*_: Any) -> None:
        nonlocal seconds
        seconds += step_seconds

    monkeypatch.setattr(train_module, "time", Clock)
    monkeypatch.setattr(train_module, "train_step", train_step)
    settings = Settings(TINY, "cpu", 200, rows=2, length=16, learning_rate=1e-2)
    assert steps_in(100, settings, "current") == steps


@ranks(2, cuda=False)
@pytest.mark.parametrize("recipe", [None, "current"])
def test_the_shown_bytes_are_those_of_the_collectives(rig: Any, recipe: Any) -> None:
    settings = Settings(TINY, rig.device_type, 1, rows=2, length=16, learning_rate=1e-2)
    result = train(settings, recipe)
    model, optimizer = train_module.prepare(settings, recipe)
    tokens = torch.zeros(1, 17, dtype=torch.int64)
    with counted(model, rig.world_size) as traffic:
        train_step(model, optimizer, settings, 0, tokens)
    assert result.gathered_bytes == traffic.total > 0


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
        other_bytes = self.result["reference"]["gathered_bytes"] - reference_bytes
        # Embedding and head are gathered once, and norms are small.
        embedding_bytes = 2 * config.vocabulary * config.dim * DTYPES[self.result["dtype"]].itemsize
        assert embedding_bytes < other_bytes < 1.05 * embedding_bytes
        return int(self.result[training]["gathered_bytes"] - other_bytes)

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
    for training in ("reference", "fp8"):
        assert [step for step, _ in result[training]["held_out"]] == [0, 1, 2]
        assert result[training]["seconds"] > 0
    run.check_losses()
    run.check_bytes()

    assert "step    2/2  training loss" in run.output
    assert "held-out loss, last" in run.output
    assert "gathered in a step" in run.output
    assert run.plot.startswith(b"\x89PNG")
    if cpu == "avx2":
        assert result["dtype"] == "fp32"
    assert ("multiplies bf16 matrices slower" in run.output) == (result["dtype"] == "fp32")
    assert f"training in {result['dtype']}, then with current, on 2 cpu ranks" in run.output


@pytest.mark.parametrize(("slower", "dtype"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_the_reference_has_the_dtype_of_the_faster_gemm(
    slower: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def linear(x: torch.Tensor, weight: torch.Tensor) -> None:
        if x.dtype == DTYPES[slower]:
            time.sleep(0.02)

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    assert faster_dtype() == dtype


@pytest.mark.newest_torch
@pytest.mark.second_tier
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_or_killed_demo_leaves_no_process(sign: signal.Signals) -> None:
    # A shell that starts processes in the background ignores SIGINT in them.
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from fp8rs.__main__ import main\n"
        "raise SystemExit(main(['demo', '--device', 'cpu', '--steps', '10000']))"
    )
    demo = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    with demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "before training" in line:
                break
        assert len(running_in_session(demo.pid)) >= 3
        demo.send_signal(sign)
        assert demo.wait(60) == (130 if sign == signal.SIGINT else -signal.SIGKILL)

    deadline = time.monotonic() + 30
    while running_in_session(demo.pid):
        assert time.monotonic() < deadline, "a rank outlived the demo"
        time.sleep(0.1)


def running_in_session(session: int) -> list[int]:
    processes = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, process_session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(process_session) == session and state != "Z":
            processes.append(int(path.parent.name))
    return processes


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
@pytest.mark.parametrize("recipe", ["delayed", "rowwise", "block", "mxfp8"])
def test_the_demo_trains_every_recipe(recipe: str, tmp_path: Path) -> None:
    run = run_demo(tmp_path, "--recipe", recipe, "--steps", "3")
    assert list(run.result) == FIELDS
    assert run.result["recipe"] == recipe
    run.check_losses()
    run.check_bytes()


@pytest.mark.newest_torch
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "none"], "argument --recipe: invalid choice: 'none'"),
        (["--json", "/nowhere/result.json"], "--json: the folder /nowhere does not exist"),
        (["--plot", "loss.txt"], "--plot: loss.txt must end in .png, .svg or .pdf"),
        (["--ranks", "0"], "must be at least 1"),
        (["--steps", "abc"], "argument --steps: must be a whole number, not 'abc'"),
        (["--json", "/"], "argument --json: / is a folder: name a file"),
        (["--plot", "/"], "argument --plot: / is a folder: name a file"),
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
    assert f"argument --json: {path} cannot be written" in capsys.readouterr().err


@pytest.mark.newest_torch
def test_a_plot_without_matplotlib_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command_line, "find_spec", lambda name: None)
    assert refused(["demo", "--device", "cpu", "--plot", "loss.png"], monkeypatch) == 2
    assert "argument --plot: matplotlib is not installed" in capsys.readouterr().err


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit code of a command line that must not start ranks."""
    monkeypatch.setattr(run_module, "spawn", lambda *_, **__: pytest.fail("something was trained"))
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


def test_a_recipe_that_the_gpu_cannot_run_trains_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(devices, "capability", lambda index: (10, 0) if index else (9, 0))
    monkeypatch.setattr(run_module, "check_cuda", devices.check_cuda.__wrapped__)
    assert refused(["demo", "--recipe", "block", "--steps", "3"], monkeypatch) == 2
    assert re.search(r"--recipe block: .*cuda:1 .*mxfp8", capsys.readouterr().err)


# Report


@pytest.fixture
def outcome() -> report.Outcome:
    return report.Outcome(
        ranks=2,
        device="cpu",
        dtype="bf16",
        recipe="current",
        steps=4,
        reference=Result([(0, 5.5), (4, 2.0)], gathered_bytes=100_000, seconds=1.0),
        fp8=Result([(0, 5.5), (4, 2.02)], gathered_bytes=50_000, seconds=1.0),
    )


def test_the_table_shows_ratios(outcome: report.Outcome) -> None:
    text = report.table(outcome)
    assert "1.010" in text
    assert "0.500" in text
    assert "0.05 MB" in text


def test_the_table_names_dtype_and_device(outcome: report.Outcome) -> None:
    on_cpu = report.table(outcome)
    assert "bf16" in on_cpu
    assert report.ON_CPU in on_cpu
    assert report.ON_CPU not in report.table(dataclasses.replace(outcome, device="cuda"))

    in_fp32 = report.table(dataclasses.replace(outcome, dtype="fp32"))
    assert "twice the bytes of bf16" in in_fp32
    assert "twice the bytes of bf16" not in on_cpu


def test_the_table_of_one_rank_has_no_gathers(outcome: report.Outcome) -> None:
    reference = dataclasses.replace(outcome.reference, gathered_bytes=0)
    fp8 = dataclasses.replace(outcome.fp8, gathered_bytes=0)
    one_rank = dataclasses.replace(outcome, ranks=1, reference=reference, fp8=fp8)
    assert "0.00 MB" in report.table(one_rank)


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
