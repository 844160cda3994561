"""gemms="auto": the number of tokens of the first forward decides how FSDP2 gathers weights."""

from contextlib import contextmanager

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8rs
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import EVEN, UNEVEN, Stack, batch, linears, same_bytes
from fp8rs.fsdp.master_weight import MasterWeight
from fp8rs.gemm import estimates
from fp8rs.model import gemm_choice

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
TOKENS = 32


@contextmanager
def measured():
    """Let the CPU choose too, with FP8 faster from `TOKENS` tokens on."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimates, "MEASURED_DEVICES", ("cpu", "cuda"))
        patch.setattr(gemm_choice, "min_tokens", lambda *args: TOKENS)
        yield


def sharded(rig, hidden=EVEN, recipe=None, **options):
    """A model that is converted with a recipe, or a plain one, under FSDP2."""
    torch.manual_seed(0)
    model = Stack(hidden).to(rig.device)
    if recipe is not None:
        fp8rs.convert_to_float8_training(model, recipe=recipe, **options)
    for block in model.blocks:
        fully_shard(block, mesh=rig.mesh(rig.world_size), mp_policy=BF16)
    return fully_shard(model, mesh=rig.mesh(rig.world_size), mp_policy=BF16)


def step(model, rig, rows, optimizer=None):
    """Train a step with some rows on this rank. Return the loss and what was gathered."""
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Collectives() as collectives:
        loss = model(batch(rig, rows=rows * rig.world_size)).float().square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    gathered = {c.dtype for c in collectives.calls if c.kind == "gather"}
    return loss.detach(), gathered


def has_master_weights(model):
    locals = [layer.weight.to_local() for layer in linears(model).values()]
    return all(isinstance(local, MasterWeight) for local in locals)


@ranks(2, 4)
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
@pytest.mark.parametrize("hidden", [EVEN, UNEVEN])
def test_few_tokens_train_as_without_a_conversion(rig, recipe, hidden):
    with measured():
        model = sharded(rig, hidden, recipe)
        plain = sharded(rig, hidden)
        # It holds the parameters from before the choice.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            loss, gathered = step(model, rig, TOKENS - 1, optimizer)
            expected, _ = step(plain, rig, TOKENS - 1)
            assert torch.equal(loss, expected)
            assert gathered == {torch.bfloat16}
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert same_bytes(ours.to_local(), theirs.to_local())


@ranks(2, 4)
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
def test_many_tokens_train_in_fp8(rig, recipe):
    with measured():
        model = sharded(rig, recipe=recipe)
        fp8 = sharded(rig, recipe=recipe, gemms="fp8")
        for _ in range(3):
            loss, gathered = step(model, rig, TOKENS)
            expected, _ = step(fp8, rig, TOKENS)
            assert torch.equal(loss, expected)
            assert gathered == {torch.uint8}


@ranks(2)
def test_a_root_whose_own_unit_has_no_converted_layer(rig):
    """FSDP2's hooks on such a root precede ours."""
    with measured():
        model = sharded(rig, recipe="current", filter_fqns=["head"])
        loss, gathered = step(model, rig, 4)
        assert gathered == {torch.bfloat16}
        plain = sharded(rig)
        assert torch.equal(loss, step(plain, rig, 4)[0])


@ranks(2)
def test_the_most_tokens_of_all_ranks_decide(rig):
    with measured():
        model = sharded(rig, recipe="current")
        _, gathered = step(model, rig, TOKENS if rig.rank == 1 else 4)
        assert gathered == {torch.uint8}
        assert has_master_weights(model)


@ranks(2)
def test_gathers_stay_as_the_first_training_forward_has_decided(rig):
    with measured():
        model = sharded(rig, recipe="current")
        step(model, rig, 4)
        _, gathered = step(model, rig, 2 * TOKENS)
        assert gathered == {torch.bfloat16}

        model = sharded(rig, recipe="current")
        step(model, rig, 2 * TOKENS)
        loss, gathered = step(model, rig, 4)
        assert gathered == {torch.uint8}
        assert loss.isfinite()


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"gemms": "fp8"}, {"enable_fsdp_float8_all_gather": True}, {"fp8_weights": True}],
    ids=["gemms", "gather", "weights"],
)
def test_an_explicit_choice_of_gathers_stays(rig, options):
    if "fp8_weights" in options:
        options = {**options, "preserve_high_precision_init_val": False}
    with measured():
        model = sharded(rig, recipe="current", **options)
        loss = model(batch(rig, rows=4)).float().sum()
        with Collectives() as collectives:
            loss.backward()
        assert {c.dtype for c in collectives.calls if c.kind == "gather"} == {torch.uint8}


@ranks(2)
def test_a_model_that_runs_without_gradients_first_gathers_in_fp8(rig):
    with measured():
        model = sharded(rig, recipe="current")
        with torch.no_grad():
            model(batch(rig, rows=4))
        _, gathered = step(model, rig, 4)
        assert gathered == {torch.uint8}


@ranks(2, 4)
@pytest.mark.parametrize("fp8_gather", [None, True, False])
@pytest.mark.parametrize("hidden", [EVEN, UNEVEN])
def test_the_choice_depends_on_the_sizes_of_gathered_weights(rig, fp8_gather, hidden):
    """Not on those of shards, which differ between ranks."""
    sizes = []

    def min_tokens(name, weights, count):
        sizes.append(weights)
        return TOKENS

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gemm_choice, "min_tokens", min_tokens)
        model = sharded(rig, hidden, "current", enable_fsdp_float8_all_gather=fp8_gather)
        step(model, rig, 4)
    at_conversion, at_first_forward = sizes
    assert at_first_forward == at_conversion


@ranks(2)
def test_the_report_has_the_bytes_that_are_gathered(rig):
    with measured():
        model = sharded(rig, recipe="current")
        step(model, rig, 4)
        report = fp8rs.report(model)
        assert report.gathered == report.gathered_high_precision
        assert report.gathered > 0


@ranks(2)
def test_a_state_dict_moves_between_both_choices(rig):
    with measured():
        high_precision_model = sharded(rig, recipe="current")
        step(high_precision_model, rig, 4)
        fp8_model = sharded(rig, recipe="current")
        step(fp8_model, rig, 2 * TOKENS)
        fp8_model.load_state_dict(high_precision_model.state_dict())
        high_precision_model.load_state_dict(fp8_model.state_dict())
        for a, b in zip(high_precision_model.parameters(), fp8_model.parameters(), strict=True):
            assert same_bytes(a.to_local(), b.to_local())
