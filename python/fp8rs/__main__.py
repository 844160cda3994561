"""``python -m fp8rs``: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fp8rs.quantize.recipes import RECIPES


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m fp8rs", description="FP8 training under FSDP2")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small Llama in high precision and in FP8, and compare",
        description="Trains the same byte-level Llama twice under FSDP2 on this machine: in bf16 "
        "and with an FP8 recipe. Takes two to three minutes on two CPU cores.",
    )
    demo.add_argument(
        "--ranks", type=_positive, help="processes to train on (default: 2 on CPU, else every GPU)"
    )
    demo.add_argument("--recipe", default="current", help=f"{', '.join(RECIPES)}; default: current")
    demo.add_argument("--steps", type=_positive, help="training steps of each run")
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    demo.add_argument(
        "--weights",
        choices=("fp8", "master"),
        default="master",
        help="of the FP8 run, between steps: fp32 masters, or FP8 alone (default: master)",
    )
    demo.add_argument(
        "--masters",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --weights fp8: fp32 masters in the optimizer, or stochastic rounding",
    )
    demo.add_argument(
        "--state-dtype",
        choices=("fp32", "bf16"),
        default="fp32",
        help="with --weights fp8: of the optimizer's moments (default: fp32)",
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the result's fields")
    demo.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves (PNG, SVG, PDF)")
    demo.set_defaults(run=_demo)
    doctor = commands.add_parser(
        "doctor",
        help="what this machine can run, and why not",
        description="Versions, driver, devices, and which recipes run here by which path.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)
    return parser


def _demo(options: argparse.Namespace) -> int:
    from .demo.run import DemoError, run
    from .demo.train import Weights

    try:
        run(
            options.ranks,
            options.recipe,
            options.steps,
            options.device,
            options.json,
            options.plot,
            Weights(options.weights, options.masters, options.state_dtype),
        )
    except DemoError as error:
        print(f"fp8rs demo: {error}", file=sys.stderr)
        return error.code
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from fp8rs import doctor

    findings = doctor.examine()
    print(doctor.as_json(findings) if options.json else doctor.as_text(findings))
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
