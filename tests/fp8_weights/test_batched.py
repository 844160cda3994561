"""Batched FP8 weights (E, N, K) under FSDP2: each matrix is a weight alone."""

import copy
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from distributed import ranks
from distributed.batched import NAMES, SHARDINGS, build, check_gathered, shard, wholes
from distributed.collectives import Collectives
from distributed.folders import shared_folder
from distributed.models import reduces, same_bytes
from distributed.sharded_pairs import assert_same_training
from fp8rs import checkpoint
from fp8rs.fsdp import Float8Shard, scale_sync
from fp8rs.nn.init import uniform_
from fp8rs.optim import AdamW, MasterWeights
from internals import core, local_of

#: Numbers of experts: one, with empty shards; uneven shards on 2 ranks; even ones on 2 and 4.
EXPERTS = (1, 3, 8)

OPTIMIZERS = {
    "masters": lambda p: AdamW(p, lr=1e-2),
    "no masters": lambda p: AdamW(p, lr=1e-2, master_weights=False, stochastic_rounding=False),
    "MasterWeights": lambda p: MasterWeights(p, torch.optim.SGD, lr=1.0, momentum=0.9),
    "torch": lambda p: torch.optim.SGD(p, lr=1.0),
}


def batch(rig, step=0):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(16, 96, generator=generator).to(rig.device)


def assert_gathered(model, reference):
    model.experts.unshard()
    for name in NAMES:
        actual, wanted = (getattr(m.experts, name) for m in (model, reference))
        for a, b in zip(actual.planes, wanted.planes, strict=True):
            assert (a is None) == (b is None)
            assert a is None or (same_bytes(a.data, b.data) and same_bytes(a.scale, b.scale))
    model.experts.reshard()


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("recipe, dim", SHARDINGS)
def test_shards_are_gathered_as_they_are_stored(rig, experts, recipe, dim):
    reference = build(rig.device, recipe, experts, fp8_weights=True)
    model = shard(copy.deepcopy(reference), rig, dim, root=False)
    assert all(type(local_of(getattr(model.experts, name))) is Float8Shard for name in NAMES)
    with Collectives() as collectives:
        assert_gathered(model, reference)
    if dim == 0:
        assert not reduces(collectives)
    for factor in (1.0, 1.7):
        with torch.no_grad():
            for m in (model, reference):
                for name in NAMES:
                    getattr(m.experts, name).mul_(factor)
        assert_gathered(model, reference)


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "block"])
def test_all_experts_of_a_weight_are_rounded_to_common_scales_as_one_entry(rig, recipe):
    """Otherwise the time of the host in each forward would grow with the number of experts."""
    entries = []
    for experts in (2, 8):
        model = shard(build(rig.device, recipe, experts, fp8_weights=True), rig, 1)
        with mock.patch.object(scale_sync, "multi_rescale", wraps=core.multi_rescale) as rescale:
            model(batch(rig))
        entries.append(sum(len(call.args[0]) for call in rescale.call_args_list))
        counts = [scales.numel() for call in rescale.call_args_list for scales in call.args[1:3]]
        assert sum(counts) >= 2 * len(NAMES) * experts
    assert entries[0] == entries[1] <= 2 * len(NAMES) + 1


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("experts", EXPERTS)
@pytest.mark.parametrize("recipe, dim", SHARDINGS)
@pytest.mark.parametrize("fp8", [True, False])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_training_equals_that_of_a_parameter_for_each_matrix(
    rig, experts, recipe, dim, fp8, optimizer
):
    if recipe == "delayed":
        recipe = "current"
    alone = build(rig.device, recipe, experts, fp8_weights=fp8, separate=True)
    if not fp8:  # weights that are not sharded are not quantized
        shard(alone, rig)
    model = shard(build(rig.device, recipe, experts, fp8_weights=fp8), rig, dim)
    trainings = [(m, OPTIMIZERS[optimizer](m.parameters())) for m in (alone, model)]
    for n in range(3):
        losses = []
        for m, stepper in trainings:
            loss = m(batch(rig, n)).square().mean()
            loss.backward()
            if m is alone and fp8 and rig.world_size == 3:
                # It is not sharded. The mean of three equal gradients is another number for a
                # seventh of fp32's numbers, and FP8 operands seldom give such gradients.
                for p in m.parameters():
                    p.grad = (p.grad + p.grad + p.grad) / 3
            stepper.step()
            stepper.zero_grad()
            losses.append(loss.detach())
        assert same_bytes(*losses), n
    actual = wholes(model)
    wanted = wholes(alone)
    assert all(same_bytes(actual[name], wanted[name]) for name in NAMES)


@ranks(1, 2, 3)
@pytest.mark.parametrize("recipe, dim", SHARDINGS)
@pytest.mark.parametrize("fp8", [True, False])
def test_deferred_init_is_that_of_one_process(rig, recipe, dim, fp8):
    """Every rank draws its part of the numbers of the whole weight."""

    reference = build(rig.device, recipe, 3, fp8_weights=fp8)
    model = shard(build("meta", recipe, 3, fp8_weights=fp8), rig, dim, root=False)
    model.to_empty(device=rig.device)
    torch.manual_seed(7)
    with torch.no_grad():
        for name in NAMES:
            values = torch.empty(getattr(reference.experts, name).shape, device=rig.device)
            seed = int(torch.empty((), dtype=torch.int64).random_())
            torch.ops.fp8rs.random_uniform_(values, seed, 0, -0.1, 0.1)
            getattr(reference.experts, name).copy_(values)
        torch.manual_seed(7)
        for name in NAMES:
            uniform_(getattr(model.experts, name), 0.1)
    if fp8:
        assert_gathered(model, reference)
    else:
        model.experts.unshard()
        check_gathered(model, wholes(reference), recipe)


@ranks(2)
@pytest.mark.parametrize("recipe, dim", SHARDINGS)
@pytest.mark.parametrize("fp8", [True, False])
def test_rows_of_four_dimensions_are_those_of_one_matrix(rig, recipe, dim, fp8):
    reference = build(rig.device, recipe, 3, fp8_weights=fp8, gated=True)
    model = shard(copy.deepcopy(reference), rig, dim)
    if not fp8:
        shard(reference, rig, 0)
    assert_same_training(rig, model, reference)


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "mxfp8 of 1x32"])
def test_values_that_were_saved_by_rows_load_into_whole_matrices(rig, recipe):
    """`dcp.load` would write parts of matrices."""
    folder = shared_folder(rig)
    plain = shard(build(rig.device, "current", 2, seed=1), rig, 1)
    checkpoint.save({"model": checkpoint.Model(plain)}, f"{folder}/saved")
    reference = build(rig.device, recipe, 2, fp8_weights=True)
    model = shard(copy.deepcopy(reference), rig)
    state = model.state_dict()
    with pytest.raises(CheckpointException, match="does not consist of whole matrices"):
        dcp.load({"model": state}, checkpoint_id=f"{folder}/saved")
    checkpoint.load({"model": checkpoint.Model(model)}, f"{folder}/saved")
    with torch.no_grad():
        for name, values in wholes(plain).items():
            getattr(reference.experts, name).copy_(values)
    assert_gathered(model, reference)


@ranks(2)
@pytest.mark.parametrize("recipe, dim", [("current", 2), ("delayed", 2)])
def test_columns_of_each_matrix_are_gathered(rig, recipe, dim):
    reference = build(rig.device, recipe, 3, fp8_weights=True)
    model = shard(copy.deepcopy(reference), rig, dim)
    assert_same_training(rig, model, reference)


@ranks(2)
@pytest.mark.parametrize("recipe", ["rowwise", "block", "mxfp8"])
def test_columns_in_blocks_are_refused(rig, recipe):
    model = build(rig.device, recipe, 4, fp8_weights=True)
    with pytest.raises(ValueError, match=r"sharded by rows only: return Shard\(0\)"):
        shard(model, rig, 2)


@ranks(2)
def test_rows_in_blocks_of_1x32_are_refused(rig):
    model = shard(build(rig.device, "mxfp8 of 1x32", 4, fp8_weights=True), rig, 1)
    for action in (model.state_dict, model.experts.unshard):
        with pytest.raises(ValueError, match=r"puts experts\.\w+ on Shard\(1\).*use Shard\(0\)"):
            action()
