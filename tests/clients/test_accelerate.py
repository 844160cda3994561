"""accelerate's FSDP2: ``examples/accelerate_fsdp2.py``, and ``mixed_precision="fp8"``."""

from __future__ import annotations

import pytest
from harness import (
    HERE,
    assert_gathers_are_fp8,
    assert_losses_close,
    need,
    reference_run,
    run_example,
    run_file,
)
from torch.distributed.checkpoint import FileSystemReader

need("accelerate", "1.15")
need("transformers", "5.0")

EXAMPLE = "accelerate_fsdp2"
STEPS = 6
BF16 = ("--recipe", "bf16", "--steps", str(STEPS))
FP8 = ("--recipe", "current", "--steps", str(STEPS))
#: A forward and a backward per step, and the forward of the evaluation.
PASSES = 2 * STEPS + 1


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
def test_losses_agree_with_bf16_and_every_parameter_moves(recipe):
    run = reference_run(EXAMPLE, "--recipe", recipe, "--steps", str(STEPS))
    reference = reference_run(EXAMPLE, *BF16)
    assert_losses_close(run, reference)
    assert not run.still
    assert run.moved == reference.moved
    assert len(run.converted) == 2 * 7
    if recipe in ("current", "delayed"):
        assert_gathers_are_fp8(run, reference, PASSES)
    else:
        # Scales add at most two percent. A block of 128 is a tenth of these small weights.
        saved = reference.gathered_bytes - run.gathered_bytes
        assert saved > 0.9 * PASSES * sum(run.converted.values())


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, recipe):
    uninterrupted = reference_run(EXAMPLE, "--recipe", recipe, "--steps", str(STEPS)).returned
    first = run_example(EXAMPLE, "--recipe", recipe, "--steps", "3", "--save", str(tmp_path))
    assert first.returned["losses"] == uninterrupted["losses"][:3]
    saved = str(tmp_path / "step_3")
    options = ("--recipe", recipe, "--steps", str(STEPS), "--resume", saved)
    second = run_example(EXAMPLE, *options).returned
    # Histories are not saved, so the first steps after a resume use current scales.
    approx = pytest.approx if recipe == "delayed" else lambda value, rel: value
    assert second["losses"] == approx(uninterrupted["losses"][3:], rel=0.02)
    assert second["evaluation"] == approx(uninterrupted["evaluation"], rel=0.02)


def test_gradients_accumulate_over_micro_batches():
    environment = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}
    reference, run = (
        run_example(EXAMPLE, "--recipe", recipe, "--steps", "12", environment=environment)
        for recipe in ("bf16", "current")
    )
    assert_losses_close(run, reference)
    assert not run.still
    # Each micro-batch has a forward and a backward, with or without a step.
    assert_gathers_are_fp8(run, reference, passes=2 * 12 + 1)


def test_cpu_ram_efficient_loading_changes_nothing():
    """Only rank 0 loads the weights. The other ranks have the model on the meta device."""
    environment = {"FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    run = run_example(EXAMPLE, *FP8, environment=environment)
    plain = reference_run(EXAMPLE, *FP8)
    assert run.returned == plain.returned
    assert not run.still
    assert run.gathered == plain.gathered


@pytest.fixture(scope="module")
def loads_of_rank_0():
    return run_file(HERE / "accelerate_loads_rank_0.py").by_rank


@pytest.mark.parametrize("weights", ["masters", "FP8 weights"])
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
def test_cpu_ram_efficient_loading_loads_the_values_of_rank_0(loads_of_rank_0, recipe, weights):
    """The other rank has parameters that are not initialized."""
    first, second = (rank[f"{recipe}, {weights}"] for rank in loads_of_rank_0)
    assert first["differing"] == []
    for rank in (first, second):
        assert len(rank["quantized"]) == (7 if weights == "FP8 weights" else 0)
    assert first["losses"] == second["losses"]  # of the same rows
    assert first["losses"][1] < first["losses"][0]


def test_sharded_state_dicts_equal_those_of_the_unconverted_model(tmp_path):
    """An unconverted run resumes from the checkpoint of a converted one, with the same weights."""
    run = run_example(EXAMPLE, "--steps", "3", "--save", str(tmp_path))
    saved = str(tmp_path / "step_3")
    resumed = run_example(EXAMPLE, *BF16[:2], "--steps", "6", "--resume", saved).returned
    uninterrupted = reference_run(EXAMPLE, *FP8).returned
    assert resumed["losses"] == pytest.approx(uninterrupted["losses"][3:], rel=0.02)
    assert run.returned["losses"] == uninterrupted["losses"][:3]


def test_fp8_weights_train_as_master_weights_do(tmp_path):
    """torch's AdamW steps masters of equal values. The run is saved and resumed as well."""
    uninterrupted = reference_run(EXAMPLE, *FP8).returned
    options = ("--fp8-weights", "--save", str(tmp_path))
    first = run_example(EXAMPLE, "--steps", "3", *options)
    assert first.returned["losses"] == uninterrupted["losses"][:3]
    saved = str(tmp_path / "step_3")
    second = run_example(EXAMPLE, *FP8, "--fp8-weights", "--resume", saved)
    assert second.returned["losses"] == uninterrupted["losses"][3:]
    assert second.returned["evaluation"] == uninterrupted["evaluation"]


@pytest.mark.parametrize("weights", [(), ("--fp8-weights",)], ids=["masters", "FP8 weights"])
def test_8_bit_moments_train_and_resume(tmp_path, weights):
    """Losses follow those of fp32 moments. The run is saved and resumed as well."""
    reference = reference_run(EXAMPLE, *FP8).returned
    uninterrupted = run_example(EXAMPLE, *FP8, "--fp8-moments", *weights).returned
    assert uninterrupted["losses"] == pytest.approx(reference["losses"], rel=0.01)
    options = ("--fp8-moments", *weights, "--save", str(tmp_path))
    first = run_example(EXAMPLE, "--steps", "3", *options).returned
    assert first["losses"] == uninterrupted["losses"][:3]
    saved = str(tmp_path / "step_3")
    names = FileSystemReader(f"{saved}/optimizer_0").read_metadata().state_dict_metadata
    assert sum(name.endswith("exp_avg_codes") for name in names) == 2 * 7
    second = run_example(EXAMPLE, *FP8, "--fp8-moments", *weights, "--resume", saved).returned
    assert second["losses"] == uninterrupted["losses"][3:]


# --- mixed_precision="fp8" -----------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_mixed_precision_fp8_trains_as_converting_first_does(recipe):
    need("torchao", "0.18")
    options = ("--recipe", recipe) if recipe else ()
    job = HERE / "accelerate_fp8.py"
    shim, plain = (run_file(job, "--way", way, *options) for way in ("fp8", "plain"))
    assert shim.returned["losses"] == plain.returned["losses"]
    assert shim.gathered == plain.gathered
    assert not shim.still
    assert not plain.still
    assert shim.converted == plain.converted
    assert len(shim.converted) == 2 * 7 - 1
    assert not shim.converted.keys() & set(shim.returned["ends"])
    assert shim.returned["recipes"] == [recipe or "current"]
    assert shim.returned["backend"].endswith("AO")
    assert plain.returned["backend"].endswith("NO")
    assert shim.returned["torchao"] == []


@pytest.fixture
def accelerator_class():
    from accelerate import Accelerator

    before = Accelerator._prepare_ao
    yield Accelerator
    assert Accelerator._prepare_ao is before


def test_the_shim_can_be_removed(accelerator_class):
    from fp8rs.integrations.accelerate import use_fp8rs

    before = accelerator_class._prepare_ao
    with use_fp8rs("current"):
        assert accelerator_class._prepare_ao is not before
    assert accelerator_class._prepare_ao is before
    replaced = use_fp8rs()
    replaced.close()
    assert accelerator_class._prepare_ao is before


def test_the_shim_accepts_only_recipes(accelerator_class):
    from fp8rs.integrations.accelerate import use_fp8rs

    with pytest.raises(ValueError, match="recipe"):
        use_fp8rs("fp7")


def test_the_shim_refuses_a_changed_accelerate(accelerator_class, monkeypatch):
    from fp8rs.integrations.accelerate import use_fp8rs

    with monkeypatch.context() as patch:
        patch.delattr(accelerator_class, "_prepare_ao")
        with pytest.raises(RuntimeError, match="Convert the model before prepare"):
            use_fp8rs("current")
