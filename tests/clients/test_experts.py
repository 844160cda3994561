"""Experts of transformers under FSDP2, as in ``examples/experts_transformers.py``."""

from __future__ import annotations

import pytest
from harness import Run, assert_losses_close, need, reference_run, run_example

need("transformers", "5.0")

EXAMPLE = "experts_transformers"
STEPS = 12
LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 8, 128, 96
#: Weights of experts, without the layers of attention.
WEIGHTS = LAYERS * EXPERTS * 3 * HIDDEN * WIDTH


def run(recipe: str, experts: str) -> Run:
    options = ("--recipe", recipe, "--experts", experts, "--steps", str(STEPS))
    return run_example(EXAMPLE, *options)


@pytest.mark.parametrize(
    "recipe, experts",
    [("current", "fp8"), ("rowwise", "fp8"), ("delayed", "auto"), ("mxfp8", "auto")],
)
def test_losses_agree_with_bf16_and_experts_are_gathered_in_fp8(recipe, experts):
    fp8_run = run(recipe, experts)
    reference = reference_run(EXAMPLE, "--recipe", "bf16", "--steps", str(STEPS))
    assert_losses_close(fp8_run, reference)
    assert not fp8_run.still
    names = {n for n in fp8_run.converted if ".experts." in n}
    assert len(names) == 2 * LAYERS
    assert sum(fp8_run.converted[n] for n in names) == WEIGHTS
    # A forward and a backward per step, and the scales of the experts.
    saved = reference.gathered_bytes - fp8_run.gathered_bytes
    assert saved == pytest.approx(2 * STEPS * sum(fp8_run.converted.values()), rel=0.04)


def test_without_experts_their_weights_are_gathered_in_bf16():
    fp8_run = run("current", "auto")
    off = run("current", "off")
    saved = off.gathered_bytes - fp8_run.gathered_bytes
    assert saved == pytest.approx(2 * STEPS * WEIGHTS, rel=0.01)
