"""accelerate's FSDP2, as in ``examples/accelerate_fsdp2.py``."""

from __future__ import annotations

import pytest
from harness import assert_gathers_are_fp8, need, reference_run, run_example

need("accelerate", "1.15")
need("transformers", "5.0")

STEPS = 6


def test_losses_agree_with_bf16():
    reference = reference_run("accelerate_fsdp2", "--recipe", "bf16", "--steps", str(STEPS))
    run = run_example("accelerate_fsdp2", "--steps", str(STEPS))
    assert run.returned["losses"] == pytest.approx(reference.returned["losses"], rel=0.02)
    assert not run.still
    assert_gathers_are_fp8(run, reference, passes=2 * STEPS)
