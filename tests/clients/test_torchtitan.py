"""torchtitan's Trainer with ``examples/torchtitan_llama.py``, run by ``torchtitan_on_cpu.py``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Run, assert_gathers_are_fp8, need, run_file

from internals import state_of

need("torchtitan", "0.3")

JOB = Path(__file__).with_name("torchtitan_on_cpu.py")
STEPS = 4
_runs: dict[tuple, Run] = {}


def run(folder: Path, *arguments: str, steps: int = STEPS, ranks: int = 2, **environment: str):
    return run_file(
        JOB,
        *("--folder", str(folder), "--steps", str(steps), *arguments),
        ranks=ranks,
        environment=environment,
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Return the bf16 run with the same options. It runs once for each set of options."""

    def run_once(*arguments: str, ranks: int = 2) -> Run:
        key = (*arguments, ranks)
        if key not in _runs:
            folder = tmp_path_factory.mktemp("bf16")
            _runs[key] = run(folder, "--recipe", "bf16", *arguments, ranks=ranks)
        return _runs[key]

    return run_once


def losses(run: Run) -> list[float]:
    """Return the global losses, which are sums over ranks."""
    return [sum(part) for part in zip(*(r["losses"] for r in run.by_rank), strict=True)]


def assert_agree(run: Run, reference: Run) -> None:
    """Assert that all of the model learns, as it does in bf16."""
    expected = losses(reference)
    assert expected[-1] < 0.9 * expected[0]
    assert losses(run) == pytest.approx(expected, rel=0.01)
    assert run.returned["evaluated"] == pytest.approx(reference.returned["evaluated"], rel=0.02)
    assert not run.still
    assert run.moved == reference.moved
    assert len(run.converted) == 2 * 5, "wqkv, wo, w1, w2 and w3 of two layers, not the head"


def test_a_run_is_monitored_as_the_page_shows(reference, tmp_path):
    watched = run(tmp_path, "--recipe", "current", TEST_WATCHED="1")
    assert_agree(watched, reference())
    steps, counts = zip(*watched.returned["logged"], strict=True)
    assert steps == (2, 4)
    assert set(counts) == {2 * 5 * 3 * 5}, "five statistics of three operands of each layer"


@pytest.mark.parametrize("recipe", ["current", "delayed", "mxfp8"])
def test_it_trains_with_selective_checkpointing_and_the_chunked_loss(recipe, reference, tmp_path):
    fp8_run = run(tmp_path, "--recipe", recipe)
    assert_agree(fp8_run, reference())
    if recipe == "current":
        # A checkpointed block is gathered for its forward and its backward. The evaluation adds one
        # forward.
        assert_gathers_are_fp8(fp8_run, reference(), passes=2 * STEPS + 1)


@pytest.mark.timeout(900)
def test_8_bit_moments_train_and_resume(reference, tmp_path):
    """The factory of `OptimizersContainer` that docs/optim.md shows."""
    options = ("--recipe", "current", "--fp8-moments", "--save-every", "2")
    uninterrupted = run(tmp_path / "whole", *options)
    assert_agree(uninterrupted, reference())
    first = run(tmp_path / "resumed", *options, steps=2)
    assert losses(first) == losses(uninterrupted)[:2]
    second = run(tmp_path / "resumed", *options)
    assert losses(second) == losses(uninterrupted)[2:]


def test_it_compiles_with_fullgraph(reference, tmp_path):
    """Use aot_eager, because fullgraph=True only concerns Dynamo."""
    compiled = run(tmp_path / "compiled", "--compile", OBSERVE_GATHERS="0")
    assert compiled.returned["graphs"] > 0
    # Compilation changes only the rounding of fused norms.
    eager = run(tmp_path / "eager")
    assert eager.returned["graphs"] == 0
    assert losses(compiled) == pytest.approx(losses(eager), rel=1e-3)
    assert_agree(compiled, reference())


@pytest.mark.parametrize("backend", ["spmd_types", "partial_dtensor"])
def test_tensor_parallelism(backend, reference, tmp_path):
    """With spmd_types, the default of torchtitan, local tensors are plain.

    Otherwise they are DTensors.
    """
    fp8_run = run(tmp_path, "--tp", "2", TEST_SPMD_BACKEND=backend)
    assert_agree(fp8_run, reference("--tp", "2"))


def test_hsdp_and_tensor_parallelism_with_fsdp(reference, tmp_path):
    for options in (("--replicas", "2"), ("--tp", "2")):
        fp8_run = run(tmp_path / options[0], *options, ranks=4)
        assert_agree(fp8_run, reference(*options, ranks=4))
        assert fp8_run.gathered["uint8"] > 0


def test_a_checkpoint_is_resumed(tmp_path):
    uninterrupted = run(tmp_path / "whole", "--save-every", "2")
    first = run(tmp_path / "parts", "--save-every", "2", steps=2)
    second = run(tmp_path / "parts", "--save-every", "2")
    assert second.returned["step"] == STEPS
    # The learning rate depends on the length of the training, so only the first steps are equal.
    assert losses(first)[0] == losses(uninterrupted)[0]
    assert len(losses(second)) == STEPS - 2
    assert losses(second)[0] < losses(first)[-1]


@pytest.mark.parametrize(
    "experts, ranks, options",
    [(4, 2, ()), (2, 4, ()), (4, 2, ("--ep", "2"))],
    ids=["Shard(0)", "Shard(1)", "expert parallel"],
)
def test_experts_of_the_example_are_gathered_in_fp8(experts, ranks, options, tmp_path):
    """With more ranks than experts, torchtitan shards experts on Shard(1)."""
    environment = {"TEST_EXAMPLE": "experts_torchtitan", "TEST_EXPERTS": str(experts)}
    reference = run(tmp_path, "--recipe", "bf16", *options, ranks=ranks, **environment)
    fp8_run = run(tmp_path, "--experts", "fp8", *options, ranks=ranks, **environment)
    expected = losses(reference)
    assert expected[-1] < 0.9 * expected[0]
    assert losses(fp8_run) == pytest.approx(expected, rel=0.01)
    assert not fp8_run.still
    names = {name for name in fp8_run.converted if "experts" in name}
    assert len(names) == 2 * 3, "w1, w2 and w3 of two layers"
    saved = reference.gathered_bytes - fp8_run.gathered_bytes
    if not options:
        weights = 2 * 3 * experts * 256 * 96
        weights += sum(n for name, n in fp8_run.converted.items() if name not in names)
        # On Shard(0), the scales of matrices are gathered.
        scales = 2 * 3 * experts * 4 if ranks <= experts else 0
        # Each layer is gathered for its forward and its backward. The evaluation adds one forward.
        assert saved == (2 * STEPS + 1) * (weights - scales)


@pytest.mark.parametrize(
    "name",
    ["tensorwise", "rowwise", "rowwise_with_gw_hp", None],
    ids=lambda name: name or "default",
)
def test_the_fields_that_torchtitan_removed_are_accepted(name):
    from torchtitan.models.llama3 import model_registry

    import fp8rs
    from fp8rs.integrations.torchtitan import Float8Converter

    converter = Float8Converter.Config(
        recipe_name=name,
        enable_fsdp_float8_all_gather=True,
        precompute_float8_dynamic_scale_for_fsdp=True,
        filter_fqns=["lm_head"],
    )
    spec = model_registry("debugmodel", converters=[converter])
    with torch.device("meta"):
        model = spec.model.build()
    layers = [m for m in model.modules() if isinstance(m, fp8rs.nn.Linear)]
    assert layers
    expected = fp8rs.nn.Linear(16, 16, recipe=name or "current").recipe
    assert {layer.recipe for layer in layers} == {expected}
    assert all(state_of(layer).fp8_gather for layer in layers)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"recipe": "current", "recipe_name": "tensorwise"}, "recipe and recipe_name are both"),
        ({"recipe_name": "rowise"}, "Did you mean 'rowwise'"),
        (
            {
                "enable_fsdp_float8_all_gather": False,
                "precompute_float8_dynamic_scale_for_fsdp": True,
            },
            "precompute_float8_dynamic_scale_for_fsdp=True contradicts",
        ),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, message):
    from fp8rs.integrations.torchtitan import Float8Converter

    with pytest.raises(ValueError, match=message):
        Float8Converter(Float8Converter.Config(**fields))


@pytest.mark.parametrize("recipe", ["current", "rowwise", "delayed", "rowwise_with_gw_hp"])
def test_experts_run_on_fp8_operands(recipe):
    """Use the class of the library, whose method for grouped GEMMs may move."""
    from torchtitan.models.common.moe import GroupedExperts

    import fp8rs
    from fp8rs.nn.functional import grouped_linear

    torch.manual_seed(0)
    experts = GroupedExperts(GroupedExperts.Config(dim=64, hidden_dim=48, num_experts=4))
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.1)
    fp8rs.convert_to_float8_training(experts, recipe=recipe, experts="fp8")
    x = torch.randn(40, 64).bfloat16()
    counts = torch.tensor([7, 0, 20, 13])
    offs = counts.cumsum(0, dtype=torch.int32)
    weights = (experts.w1_EFD, experts.w2_EDF, experts.w3_EFD)
    w1, w2, w3 = (w.detach().bfloat16() for w in weights)
    gate = torch.nn.functional.silu(grouped_linear(x, w1, offs, recipe=recipe))
    h = gate * grouped_linear(x, w3, offs, recipe=recipe)
    expected = grouped_linear(h, w2, offs, recipe=recipe)
    y = experts(x, counts)
    assert torch.equal(y, expected)
    y.sum().backward()
    assert all(w.grad.any() for w in weights)
    torch._dynamo.reset()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, counts), expected)
    torch._dynamo.reset()
