"""Runs an example of ``examples/`` as its user would, on two ranks, and reports what happened.

    from harness import need, run_example

    need("accelerate", "1.15")  # at the top of a test file: skips it if the client is missing

    def test_it_trains(tmp_path):
        reference = run_example("accelerate_fsdp2", "--recipe", "bf16")
        run = run_example("accelerate_fsdp2", "--recipe", "current")
        assert run.returned["losses"] == pytest.approx(reference.returned["losses"], rel=0.02)
        assert not run.still  # every trainable parameter moved
        assert_gathers_are_fp8(run, reference, passes=2 * 6)

An example defines ``main(argv: list[str] | None = None)``, which returns a dictionary of plain
values (losses as floats). ``run_example`` starts ``torchrun --nproc-per-node 2`` with gloo on CPU.
Each rank calls ``main`` under `observe.py`, which counts the bytes of all-gathers and watches the
parameters of the first module whose forward runs with gradients. The example contains no test code.

A job that is not an example is a separate file in this folder: ``run_file(path, *arguments)``.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from processes import kill_with_children

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

#: The timeout of a run. The slowest takes a minute on two busy cores, mostly for imports.
SECONDS = 240


@dataclass(frozen=True)
class Run:
    """The results of a run on two ranks."""

    #: The return value of ``main`` on rank 0.
    returned: dict[str, Any]
    #: The return value of ``main`` on each rank.
    by_rank: list[dict[str, Any]]
    #: The bytes that rank 0 gathered in the whole run, by dtype. Empty with OBSERVE_GATHERS=0.
    gathered: dict[str, int]
    #: Trainable parameters that changed on some rank.
    moved: set[str]
    #: Trainable parameters that changed on no rank.
    still: set[str]
    #: Parameters without gradients that changed nevertheless.
    frozen_moved: set[str]
    #: Converted layers, with the number of elements in a gather of their weight, including padding.
    converted: dict[str, int]
    #: The output and logs of the ranks.
    output: str

    @property
    def gathered_bytes(self) -> int:
        """All bytes that rank 0 gathered."""
        return sum(self.gathered.values())


def need(distribution: str, at_least: str) -> str:
    """Return the version of an installed client. Skip the caller if it is missing or too old."""
    reason = _lacking(distribution, at_least)
    if reason:
        pytest.skip(reason, allow_module_level=True)
    return importlib.metadata.version(distribution)


def needs(distribution: str, at_least: str) -> pytest.MarkDecorator:
    """Return `need` as a mark.

    Multi-rank cases need it, because a skip on a rank counts as a failure.
    """
    reason = _lacking(distribution, at_least)
    return pytest.mark.skipif(bool(reason), reason=reason)


def _lacking(distribution: str, at_least: str) -> str:
    """Return why an installed client cannot be used, or an empty string."""
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} is not installed"
    if Version(version) < Version(at_least):
        return f"{distribution} {version} is older than {at_least}"
    return ""


def run_example(name: str, *arguments: str, **options: Any) -> Run:
    """Run ``examples/NAME.py``. See `run_file`."""
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
        AssertionError: A rank failed or took too long. The message contains the ranks' output.
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
        results_of_ranks = [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(ranks)]
    return _merged(results_of_ranks, output)


@functools.cache
def reference_run(name: str, *arguments: str) -> Run:
    """Call `run_example` once per session for equal arguments.

    Several tests compare with the result.
    """
    return run_example(name, *arguments)


def assert_gathers_are_fp8(run: Run, reference: Run, passes: int) -> None:
    """Assert that each converted weight was gathered ``passes`` times with 1 byte per element.

    ``reference`` is the same run in bf16, with 2 bytes per element. Both runs gather unconverted
    parameters alike, so the difference of all bytes comes from the converted weights. This holds
    only for recipes that gather no scales.
    """
    assert run.converted
    saved = reference.gathered_bytes - run.gathered_bytes
    assert saved == passes * sum(run.converted.values()), (run.gathered, reference.gathered)


def assert_losses_close(run: Run, reference: Run) -> None:
    """Assert that the losses of a run agree with the losses of the bf16 reference to 2%.

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
    """Start a script and its arguments under torchrun. Return its exit code and its output.

    Raises:
        AssertionError: It took too long and was ended with its ranks.
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
        )
        try:
            code: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = f"no end after {seconds:.0f} s"
        finally:
            if process.poll() is None:
                kill_with_children(process)
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
        # Use the CPU even if there are GPUs, so that bytes and losses equal those in CI.
        "CUDA_VISIBLE_DEVICES": "",
        # Do not download anything.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }


def _merged(results_of_ranks: list[dict[str, Any]], output: str) -> Run:
    names: dict[str, dict[str, bool]] = {}
    for rank in results_of_ranks:
        for name, parameter in rank["parameters"].items():
            entry = names.setdefault(name, {"trainable": parameter["trainable"], "moved": False})
            entry["moved"] |= parameter["moved"]
    trainable = {n for n, p in names.items() if p["trainable"]}
    moved = {n for n, p in names.items() if p["moved"]}
    return Run(
        returned=results_of_ranks[0]["returned"],
        by_rank=[rank["returned"] for rank in results_of_ranks],
        gathered=results_of_ranks[0]["gathered"],
        moved=moved & trainable,
        still=trainable - moved,
        frozen_moved=moved - trainable,
        converted=results_of_ranks[0]["converted"],
        output=output,
    )
