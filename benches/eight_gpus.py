"""Measure the whole Llama-3-8B on the GPUs of one host, within a time budget.

The model has 32 layers and a vocabulary of 128,256, with a sequence of 8,192 tokens per GPU and
without activation checkpointing. `end_to_end.py` trains it in these layouts: FSDP2 over all GPUs,
two replicas of it (hsdp), and tensor parallelism of 2 within FSDP2 (tp). `experts.py` trains the
model like Mixtral. With ``--tests``, the tests that require as many ranks as there are GPUs run at
the end.

    python benches/eight_gpus.py OUT                      # on every GPU
    python benches/eight_gpus.py OUT --tests --seconds 1500
    python benches/eight_gpus.py OUT --layers 8           # a rehearsal on two GPUs
    python benches/eight_gpus.py OUT --device cpu --ranks 4 --layers 2 --dim 256 --sequence 64 \
        --vocabulary 512 --steps 2                        # a smoke run without a GPU

OUT is a folder for JSON files. They are written after each variant, so a call that is cut off keeps
what it measured. A call with the same OUT and the same options measures only what is missing, and
the table at the end has the variants of all calls. The most important variants come first.

Estimate, not measured: on eight H200, a variant takes 50 to 70 s, of which 25 s are its 19 steps,
and the rest is for imports, initialization and compilation. All variants take 10 to 12 minutes, the
experts 1, and the tests 5. So two calls of nine minutes measure all variants and the experts.

torchao and TransformerEngine are skipped if they cannot be imported. If bf16 runs out of memory,
start again with another OUT and ``--recompute``, which lets compiled backwards recompute inputs of
GEMMs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from end_to_end import table

BENCHES = Path(__file__).parent

#: The most important first. Masters are the default of -fp8 variants.
VARIANTS = (
    "bf16-compiled",
    "current-compiled",
    "current-compiled+comm",
    "current-fp8-compiled+fp8-state",
    "torchao-compiled",
    "te-current",
    "current-compiled+tp",
    "current-compiled+hsdp",
    "bf16-compiled+tp",
    "bf16-compiled+hsdp",
)
EXPERTS_VARIANTS = ("bf16+comm", "auto+comm")

#: A command that has less time is not started.
LEAST_SECONDS = 20


def main(argv: list[str] | None = None) -> int:
    """Measure what OUT does not have yet, and print tables of all that it has."""
    options = _options(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + options.seconds

    measured = _report(options.out)["variants"]
    missing = []
    for name in options.variants:
        if name not in measured or "error" in measured[name]:
            missing.append(name)
    if missing:
        _run(_end_to_end(options, missing), deadline)

    experts_file = options.out / "experts.json"
    if not _has_experts(experts_file):
        _run(_experts(options, experts_file), deadline)

    if options.tests:
        tests = BENCHES.parent / "tests"
        marks = ["-m", "gpu", "-k", f"{options.ranks}ranks"]
        _run([sys.executable, "-m", "pytest", str(tests), "-q", *marks], deadline)

    report = _report(options.out)
    print(table(report))
    for name, result in report["variants"].items():
        if "losses" in result:
            print(f"losses of {name}: {_agreement(result['losses'])}")
    return 0 if report["variants"] else 1


def _run(command: list[str], deadline: float) -> None:
    """Run a command until the deadline. It prints its progress."""
    seconds = deadline - time.monotonic()
    print(f"{seconds:.0f} s left: {' '.join(command[1:])}", flush=True)
    if seconds < LEAST_SECONDS:
        print("not started: the time is over", flush=True)
        return
    try:
        # Ranks end with the process that launched them.
        subprocess.run(command, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        print("stopped: the time is over", flush=True)


def _end_to_end(options: argparse.Namespace, variants: list[str]) -> list[str]:
    """Return the command that measures variants, in a JSON file that does not exist yet."""
    call_number = len(list(options.out.glob("end_to_end-*.json"))) + 1
    command = [sys.executable, str(BENCHES / "end_to_end.py"), "--variants", ",".join(variants)]
    command += ["--out", str(options.out / f"end_to_end-{call_number}.json")]
    command += ["--device", options.device, "--ranks", str(options.ranks)]
    command += ["--layers", str(options.layers), "--dim", str(options.dim)]
    command += ["--vocabulary", str(options.vocabulary), "--sequence", str(options.sequence)]
    command += ["--steps", str(options.steps)]
    if options.recompute:
        command.append("--recompute")
    return command


def _experts(options: argparse.Namespace, file: Path) -> list[str]:
    command = [sys.executable, str(BENCHES / "experts.py"), "--model", "mixtral"]
    command += ["--variants", ",".join(EXPERTS_VARIANTS), "--json", str(file)]
    command += ["--device", options.device, "--ranks", str(options.ranks)]
    if options.device == "cpu":
        command += ["--tiny", "--tokens", "32", "--steps", "1"]
    return command


def _has_experts(file: Path) -> bool:
    """Return whether an earlier call measured all variants of the experts."""
    if not file.exists():
        return False
    results = json.loads(file.read_text())["results"]
    return {result["variant"] for result in results} == set(EXPERTS_VARIANTS)


def _report(out: Path) -> dict[str, Any]:
    """Merge the reports of all calls. A measurement replaces an earlier error."""
    variants: dict[str, Any] = {}
    for file in sorted(out.glob("end_to_end-*.json")):
        variants.update(json.loads(file.read_text())["variants"])

    in_order = {}
    for name in sorted(variants, key=_position):
        in_order[name] = variants[name]
    return {"variants": in_order}


def _position(name: str) -> int:
    """Return a variant's place in the table. Others follow those of `VARIANTS`."""
    return VARIANTS.index(name) if name in VARIANTS else len(VARIANTS)


def _agreement(losses: list[float]) -> str:
    if len(set(losses)) == 1:
        return f"{losses[0]:.6f}, equal on {len(losses)} ranks"
    return f"different, {losses}"


def _options(argv: list[str] | None) -> argparse.Namespace:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpus else "cpu")
    parser.add_argument("--ranks", type=int, default=gpus or 4)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--seconds", type=float, default=540, help="time budget")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--recompute", action="store_true", help="as in end_to_end.py")
    parser.add_argument(
        "--tests", action="store_true", help="run tests with this number of ranks at the end"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
