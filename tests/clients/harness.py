"""Runs an example of ``examples/`` as its user would, on two ranks, and says what happened.

    from harness import need, run_example

    need("accelerate", "1.15")  # at the top of a test file: skips it where the client is missing

    def test_it_trains(tmp_path):
        reference = run_example("accelerate_fsdp2", "--recipe", "bf16")
        run = run_example("accelerate_fsdp2", "--recipe", "current")
        assert run.returned["losses"] == pytest.approx(reference.returned["losses"], rel=0.02)
        assert not run.still  # every trainable parameter moved
        assert_gathers_are_fp8(run, reference, passes=2 * 6)

An example defines ``main(argv: list[str] | None = None)`` that returns a dictionary of plain values
(losses as floats). ``run_example`` starts ``torchrun --nproc-per-node 2`` with gloo on the CPU;
each rank calls ``main`` under `observe.py`, which counts what its collectives gather and watches
the parameters of the first module whose forward runs with gradients. Nothing of it is in the
example.

A job that is no example is a file of its own beside the tests: ``run_file(path, *arguments)``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

#: A run's time-out: the slowest takes a minute on two busy cores, most of it imports.
SECONDS = 240


@dataclass(frozen=True)
class Run:
    """What two ranks did."""

    #: What ``main`` returned on rank 0.
    returned: dict[str, Any]
    #: The same of every rank.
    by_rank: list[dict[str, Any]]
    #: Bytes that rank 0 held after its all-gathers, in the whole run, by dtype. Empty where the
    #: environment had OBSERVE_GATHERS=0.
    gathered: dict[str, int]
    #: Trainable parameters that some rank's shard of changed.
    moved: set[str]
    #: Trainable parameters that no rank's shard of changed.
    still: set[str]
    #: Parameters that do not require gradients and changed nevertheless.
    frozen_moved: set[str]
    #: Converted layers, with the elements that a gather of their weight holds, padding included.
    converted: dict[str, int]
    #: What the ranks printed and logged.
    output: str

    @property
    def gathered_bytes(self) -> int:
        """All bytes that rank 0 gathered."""
        return sum(self.gathered.values())


def need(distribution: str, at_least: str) -> str:
    """The version of an installed client; skips the caller where there is none or an older one."""
    reason = _lacking(distribution, at_least)
    if reason:
        pytest.skip(reason, allow_module_level=True)
    return importlib.metadata.version(distribution)


def needs(distribution: str, at_least: str) -> pytest.MarkDecorator:
    """`need` as a mark, for a case that runs on ranks: a skip there would be a failure."""
    reason = _lacking(distribution, at_least)
    return pytest.mark.skipif(bool(reason), reason=reason)


def _lacking(distribution: str, at_least: str) -> str:
    """Why an installed client does not serve, or nothing."""
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} is not installed"
    if Version(version) < Version(at_least):
        return f"{distribution} {version} is older than {at_least}"
    return ""


def run_example(name: str, *arguments: str, **options: Any) -> Run:
    """Run ``examples/NAME.py``; see `run_file`."""
    return run_file(ROOT / "examples" / f"{name}.py", *arguments, **options)


def run_file(
    path: Path,
    *arguments: str,
    ranks: int = 2,
    environment: dict[str, str] | None = None,
    seconds: float = SECONDS,
) -> Run:
    """Call ``main(arguments)`` of a file on each of ``ranks`` ranks (CPU, gloo).

    Raises:
        AssertionError: a rank failed or took too long; the message holds what they wrote.
    """
    with tempfile.TemporaryDirectory(prefix="fp8rs-client-") as folder:
        code, output = torchrun(
            [str(HERE / "observe.py"), folder, str(path), *arguments], ranks, environment, seconds
        )
        if code != 0:
            errors = [f"\n--- {e.name}\n{e.read_text()}" for e in Path(folder).glob("*.error")]
            raise AssertionError(
                f"{path.name} ended with {code}:{''.join(sorted(errors)) or output[-8000:]}"
            )
        found = [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(ranks)]
    return _merged(found, output)


@functools.cache
def reference_run(name: str, *arguments: str) -> Run:
    """`run_example`, once a session for the same arguments: what several tests compare with."""
    return run_example(name, *arguments)


def assert_gathers_are_fp8(run: Run, reference: Run, passes: int) -> None:
    """Each converted weight was gathered ``passes`` times, at 1 byte an element where bf16 has 2.

    ``reference`` is the same run in bf16: what is not converted is gathered alike in both, so the
    difference of all bytes is that of the converted weights. (For recipes that gather no scales.)
    """
    assert run.converted
    saved = reference.gathered_bytes - run.gathered_bytes
    assert saved == passes * sum(run.converted.values()), (run.gathered, reference.gathered)


def assert_losses_close(run: Run, reference: Run) -> None:
    """Assert that the losses of a run agree with those of the bf16 reference to 2%.

    The loss is rounded to bf16, which alone moves it by 0.4% to 0.8% between 4 and 6. Six steps
    amplify the rounding to E4M3. A weight that is not trained ends 10% higher, and a wrong
    all-gather ends at the loss of a random model.
    """
    expected = reference.returned
    assert expected["losses"][-1] < 0.85 * expected["losses"][0]
    assert run.returned["losses"] == pytest.approx(expected["losses"], rel=0.02)
    if "evaluation" in expected:
        assert run.returned["evaluation"] == pytest.approx(expected["evaluation"], rel=0.02)


def torchrun(
    command: list[str],
    ranks: int = 2,
    environment: dict[str, str] | None = None,
    seconds: float = SECONDS,
) -> tuple[int, str]:
    """Start a script and its arguments under torchrun; its exit code and what it wrote.

    Raises:
        AssertionError: it took too long, and was ended with its ranks.
    """
    # `--standalone` picks a free port.
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(ranks)),
        *command,
    ]
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            command,
            env=_environment(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"no end after {seconds:.0f} s"
        finally:
            # torchrun ends its ranks at SIGTERM; what is left of the group goes after it.
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        output.seek(0)
        text = output.read()
    if isinstance(code, str):
        raise AssertionError(f"{code}:\n{text[-8000:]}")
    return code, text


def _environment(more: dict[str, str]) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": "1",
        "RAYON_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        # A machine with GPUs runs these on the CPU too: bytes and losses are then those of CI.
        "CUDA_VISIBLE_DEVICES": "",
        # Nothing is downloaded.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }


def _merged(found: list[dict[str, Any]], output: str) -> Run:
    names: dict[str, dict[str, bool]] = {}
    for rank in found:
        for name, parameter in rank["parameters"].items():
            entry = names.setdefault(name, {"trainable": parameter["trainable"], "moved": False})
            entry["moved"] |= parameter["moved"]
    trainable = {n for n, p in names.items() if p["trainable"]}
    moved = {n for n, p in names.items() if p["moved"]}
    return Run(
        returned=found[0]["returned"],
        by_rank=[rank["returned"] for rank in found],
        gathered=found[0]["gathered"],
        moved=moved & trainable,
        still=trainable - moved,
        frozen_moved=moved - trainable,
        converted=found[0]["converted"],
        output=output,
    )
