"""transformers' Trainer with FSDP2, as in ``examples/transformers_trainer.py``."""

from __future__ import annotations

import json

import pytest
import torch
from harness import assert_gathers_are_fp8, assert_losses_close, need, run_example

need("transformers", "5.0")
need("accelerate", "1.15")

EXAMPLE = "transformers_trainer"
STEPS = 6
#: A forward and a backward per step. The evaluation has 64 rows in batches of 8 on two ranks.
PASSES = 2 * STEPS + 4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the runs by recipe, each with its folder of checkpoints."""
    runs = {}
    for recipe in ("bf16", "current"):
        folder = tmp_path_factory.mktemp(recipe)
        options = ("--recipe", recipe, "--steps", str(STEPS), "--output", str(folder))
        runs[recipe] = (run_example(EXAMPLE, *options), folder)
    return runs


def test_losses_agree_with_bf16_and_every_parameter_moves(trained):
    reference, _ = trained["bf16"]
    run, _ = trained["current"]
    assert_losses_close(run, reference)
    assert not run.still
    assert run.moved == reference.moved
    assert len(run.converted) == 2 * 7


def test_converted_weights_are_gathered_in_fp8(trained):
    assert_gathers_are_fp8(trained["current"][0], trained["bf16"][0], PASSES)


def test_a_resumed_run_equals_an_uninterrupted_one(trained, tmp_path):
    uninterrupted, folder = trained["current"]
    resume = str(folder / "checkpoint-3")
    options = ("--steps", str(STEPS), "--output", str(tmp_path), "--resume", resume)
    run = run_example(EXAMPLE, *options)
    # log_history also contains the steps before the checkpoint.
    assert run.returned == uninterrupted.returned
    state = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["global_step"] == 3


def test_checkpoints_equal_those_of_the_unconverted_model(trained):
    """The Trainer writes the file of `save_pretrained`. Compare names, shapes and dtypes."""
    from safetensors import safe_open

    results = []
    for recipe in ("bf16", "current"):
        path = trained[recipe][1] / f"checkpoint-{STEPS}" / "model.safetensors"
        with safe_open(path, "pt") as file:
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
        results.append({n: (t.shape, t.dtype) for n, t in tensors.items()})
        assert all(t.isfinite().all() for t in tensors.values())
    assert results[0] == results[1]


def test_gradients_accumulate(tmp_path):
    options = ("--steps", "4", "--accumulate", "2", "--output", str(tmp_path))
    reference, run = (run_example(EXAMPLE, "--recipe", r, *options) for r in ("bf16", "current"))
    assert_losses_close(run, reference)
    assert not run.still
    assert_gathers_are_fp8(run, reference, passes=2 * 2 * 4 + 4)


def test_fp8_weights_train_as_master_weights_do(trained, tmp_path):
    """torch's AdamW steps masters of equal values. The run is saved and resumed as well."""
    reference, _ = trained["current"]
    options = ("--steps", str(STEPS), "--fp8-weights", "--output")
    run = run_example(EXAMPLE, *options, str(tmp_path / "first"))
    assert run.returned == reference.returned
    resume = str(tmp_path / "first" / "checkpoint-3")
    resumed = run_example(EXAMPLE, *options, str(tmp_path / "second"), "--resume", resume)
    assert resumed.returned == reference.returned


def test_8_bit_moments_train_and_resume(trained, tmp_path):
    """`optimizer_cls_and_kwargs`, as docs/optim.md shows. Losses follow those of fp32 moments."""
    reference, _ = trained["current"]
    options = ("--steps", str(STEPS), "--fp8-moments", "--output")
    run = run_example(EXAMPLE, *options, str(tmp_path / "first"))
    assert run.returned["losses"] == pytest.approx(reference.returned["losses"], rel=0.01)
    resume = str(tmp_path / "first" / "checkpoint-3")
    saved = torch.load(f"{resume}/optimizer.bin", weights_only=True)
    assert sum("exp_avg_codes" in state for state in saved["state"].values()) == 2 * 7
    resumed = run_example(EXAMPLE, *options, str(tmp_path / "second"), "--resume", resume)
    assert resumed.returned == run.returned
