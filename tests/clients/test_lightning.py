"""Lightning's Trainer with FSDP2, as in ``examples/lightning_fsdp2.py``."""

from __future__ import annotations

import pytest
from harness import HERE, assert_gathers_are_fp8, need, run_example, run_file

need("lightning", "2.6")
need("transformers", "5.0")

STEPS = 4


def run(folder, recipe, steps=STEPS):
    return run_example(
        "lightning_fsdp2", "--recipe", recipe, "--steps", str(steps), "--checkpoint", str(folder)
    )


def test_it_trains_resumes_and_evaluates_as_bf16_does(tmp_path):
    reference = run(tmp_path / "bf16", "bf16")
    fp8_run = run(tmp_path / "fp8", "current")
    expected = reference.returned["losses"]
    assert expected[-1] < 0.95 * expected[0]
    assert fp8_run.returned["losses"] == pytest.approx(expected, rel=0.01)
    assert fp8_run.returned["evaluated"] == pytest.approx(reference.returned["evaluated"], rel=0.01)
    assert not fp8_run.still
    assert len(fp8_run.converted) == 2 * 7
    # A forward and a backward for each step, and the two batches of the evaluation.
    assert_gathers_are_fp8(fp8_run, reference, passes=2 * STEPS + 2)

    # The training is complete already.
    evaluation = run(tmp_path / "fp8", "current")
    assert evaluation.returned["losses"] == []
    assert evaluation.returned["evaluated"] == fp8_run.returned["evaluated"]
    more = run(tmp_path / "fp8", "current", STEPS + 2)
    more_reference = run(tmp_path / "bf16", "bf16", STEPS + 2)
    assert len(more.returned["losses"]) == 2
    assert more.returned["losses"] == pytest.approx(more_reference.returned["losses"], rel=0.01)


def test_fabrics_parallelize_fn_converts_as_the_page_shows():
    fabric_run = run_file(HERE / "lightning_fabric.py")
    assert fabric_run.returned == {"converted": 2 * 7, "gradients": 2 * 7}
    assert fabric_run.gathered["uint8"] > 0, "weights are gathered as codes"


def test_a_run_is_monitored_as_the_page_shows():
    watched = run_file(HERE / "lightning_watched.py").returned
    assert watched["steps"] == [1, 3], "steps of the optimizer, of two batches each"
    name = "fp8/model.layers.0.self_attn.q_proj/grad/sqnr_db"
    assert all(name in names and len(names) == 14 * 3 * 5 for names in watched["names"])
