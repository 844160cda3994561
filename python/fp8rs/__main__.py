"""``fp8rs`` or ``python -m fp8rs``: the command line."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from fp8rs import __version__
from fp8rs.quantize.recipes import RECIPES

RECIPE_HELP = f"{', '.join(RECIPES)}; default: current"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fp8rs", description="FP8 training under FSDP2")
    parser.add_argument("--version", action="version", version=f"fp8rs {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo = commands.add_parser(
        "demo",
        help="train a small Llama in high precision and in FP8, and compare",
        description="Train the same byte-level Llama twice under FSDP2 on this machine: in bf16 "
        "and with an FP8 recipe. On a CPU that multiplies bf16 matrices slower than fp32 matrices, "
        "the first training is in fp32. This takes one to three minutes on two CPU cores.",
    )
    _add_demo(demo)
    demo.set_defaults(run=_demo)
    doctor = commands.add_parser(
        "doctor",
        help="show the recipes that this machine supports",
        description="Show versions, driver, devices, and how each recipe runs on this machine.",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.set_defaults(run=_doctor)
    report = commands.add_parser(
        "report",
        help="estimate speed, communication volume and memory of a model",
        description="Print the layers that would be converted, the bytes that a step would gather "
        "and the memory of a rank. The model is built on the meta device.",
    )
    _add_report(report)
    report.set_defaults(run=_report)
    return parser


def _add_demo(demo: argparse.ArgumentParser) -> None:
    """Add the arguments of the demo command."""
    demo.add_argument(
        "--ranks", type=_positive, help="number of ranks (default: 2 on CPU, else all GPUs)"
    )
    demo.add_argument(
        "--steps",
        type=_positive,
        help="steps of each training (default: 600 on GPUs, 200 on CPUs, or fewer on slow CPUs)",
    )
    demo.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if available")
    demo.add_argument("--recipe", choices=tuple(RECIPES), default="current", help=RECIPE_HELP)
    demo.add_argument("--json", type=_output_file, metavar="FILE", help="write the results")
    demo.add_argument(
        "--plot", type=_plot_file, metavar="FILE", help="plot the losses (PNG, SVG, PDF)"
    )


def _add_report(report: argparse.ArgumentParser) -> None:
    """Add the arguments of the report command."""
    report.add_argument("--json", action="store_true", help="print JSON")
    report.add_argument(
        "model",
        metavar="MODEL",
        help="FILE.py or FILE.py:NAME, where NAME (default: model) is a model or a function that "
        "returns one; or the name or folder of a transformers model",
    )
    report.add_argument("--recipe", help=RECIPE_HELP)
    report.add_argument(
        "--weights",
        choices=("fp8", "master"),
        default="master",
        help="FP8 weights, or weights in high precision; default: master",
    )
    report.add_argument(
        "--leave-out",
        action="append",
        default=[],
        metavar="NAME",
        help="exclude layers with this in their name (filter_fqns); may be repeated",
    )
    report.add_argument(
        "--tokens",
        type=_positive,
        help="batch size times sequence length on each GPU, to estimate whether FP8 pays off",
    )
    report.add_argument("--ranks", type=_positive, default=8, help="number of shards; default: 8")
    report.add_argument(
        "--optimizer",
        type=_optimizer,
        metavar="NAME",
        help="torch's adam, adamw, lion, momentum, muon or sgd; or "
        "fp8rs-adamw[-bf16|-fp8][-no-masters]; or how many tensors of a parameter's size and dtype "
        "another optimizer keeps, such as 0.5; default: adamw, or fp8rs-adamw if FP8 weights are "
        "trained",
    )


def _demo(options: argparse.Namespace) -> int:
    from .demo.run import run

    try:
        run(
            options.ranks,
            options.recipe,
            options.steps,
            options.device,
            options.json,
            options.plot,
        )
    except ValueError as error:
        print(f"fp8rs demo: {error}", file=sys.stderr)
        return 2
    return 0


def _doctor(options: argparse.Namespace) -> int:
    from fp8rs import doctor

    findings = doctor.examine()
    as_json = json.dumps(asdict(findings), indent=2)
    print(as_json if options.json else doctor.as_text(findings))
    return 0


def _report(options: argparse.Namespace) -> int:
    from fp8rs import doctor, report

    try:
        model_report = report(
            doctor.load_model(options.model),
            recipe=options.recipe,
            filter_fqns=options.leave_out,
            world_size=options.ranks,
            tokens=options.tokens,
            optimizer=options.optimizer,
            fp8_weights=options.weights == "fp8",
        )
    except ValueError as error:
        print(f"fp8rs report: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(model_report.as_dict(), indent=2))
    else:
        print(model_report)
    return 0


def _positive(text: str) -> int:
    if not text.lstrip("+-").isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _optimizer(text: str) -> str | float:
    """Return the name of an optimizer, or the number of its states."""
    try:
        return float(text)
    except ValueError:
        return text


def _output_file(text: str) -> Path:
    """Return the path of a file that can be written, before minutes of training."""
    path = Path(text)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"the folder {folder} does not exist")
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder: name a file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written")
    return path


def _plot_file(text: str) -> Path:
    path = _output_file(text)
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise argparse.ArgumentTypeError(f"{path} must end in .png, .svg or .pdf")
    if find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("matplotlib is not installed (pip install matplotlib)")
    return path


if __name__ == "__main__":
    sys.exit(main())
