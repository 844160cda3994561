"""Batched weights (E, N, K) under FSDP2: each matrix is gathered as if it were a weight alone."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import fp8rs
import fp8rs.optim
from cases import TWO_PLANES
from distributed import ranks
from distributed.batched import (
    NAMES,
    SHARDINGS,
    Experts,
    build,
    check_gathered,
    check_planes,
    check_values,
    wholes,
)
from distributed.batched import shard as sharded
from distributed.collectives import Collectives
from distributed.models import RECIPES, reduces
from fp8rs.fsdp.master_weight import MasterWeight
from fp8rs.model.handle import local_of

#: Numbers of experts: even, uneven, and fewer than ranks.
EXPERTS = {"even": 4, "uneven": 5, "empty": 1}


def shard(model, rig, dim=0, **options):
    sharded(model, rig, dim, root=False, **options)
    for name in NAMES:
        assert isinstance(local_of(getattr(model.experts, name)), MasterWeight)


def check_after_writes(model, recipe):
    """Compare gathered bytes with the quantized whole weights, before and after a write."""
    for _ in range(2):
        weights = wholes(model)
        model.experts.unshard()
        check_gathered(model, weights, recipe)
        model.experts.reshard()
        with torch.no_grad():
            for p in model.experts.parameters():
                p.mul_(1.7)


@ranks(2)
@pytest.mark.parametrize("experts", list(EXPERTS))
@pytest.mark.parametrize(("recipe", "dim"), SHARDINGS)
def test_the_report_counts_the_bytes_of_batches(rig, experts, recipe, dim):
    model = build(rig.device, recipe, EXPERTS[experts])
    shard(model, rig, dim)
    fully_shard(model, mesh=rig.mesh())
    report = fp8rs.report(model, param_dtype=None)
    assert report.converted == ("head", "experts")
    assert report.converted_parameters == report.parameters
    assert not report.left
    with Collectives() as collectives:
        model(torch.randn(8, 96, device=rig.device)).sum().backward()
    assert report.gathered == collectives.nbytes("gather")


@ranks(1, 2, 4)
@pytest.mark.parametrize("experts", list(EXPERTS))
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_whole_matrices_are_gathered(rig, experts, recipe):
    model = build(rig.device, recipe, EXPERTS[experts])
    shard(model, rig)
    with Collectives() as collectives:
        check_after_writes(model, recipe)
    assert reduces(collectives) == []


@ranks(1, 2, 4)
@pytest.mark.parametrize("recipe", [r for r, dim in SHARDINGS if dim == 1])
def test_rows_of_each_matrix_are_gathered(rig, recipe):
    model = build(rig.device, recipe, 3)
    shard(model, rig, dim=1)
    with Collectives() as collectives:
        check_after_writes(model, recipe)
    assert len(reduces(collectives)) == (2 if rig.world_size > 1 else 0)


@ranks(2)
@pytest.mark.parametrize("recipe, dim", SHARDINGS)
def test_gathers_are_half_of_bf16(rig, recipe, dim):
    model = build(rig.device, recipe, 4, hidden=256, width=512)
    numel = sum(p.numel() for p in model.experts.parameters())
    shard(model, rig, dim=dim)
    with Collectives() as collectives:
        model.experts.unshard()
    # An all-reduce sends and receives as much as two gathers of its size.
    nbytes = collectives.nbytes("gather") + 2 * collectives.nbytes("reduce")
    planes = 2 if recipe in TWO_PLANES else 1
    assert 0.5 * planes <= nbytes / (2 * numel) <= 0.52 * planes


@ranks(1, 2)
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_reshard_frees_all_codes(rig, recipe):
    model = build(rig.device, recipe, 4)
    shard(model, rig)
    for _ in range(2):
        model.experts.unshard()
        planes = [p for name in NAMES for p in getattr(model.experts, name).planes if p]
        model.experts.reshard()
        assert not any(p.data.untyped_storage().nbytes() for p in planes)


@ranks(4)
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_hybrid_sharding_of_batches(rig, recipe, dim):
    model = build(rig.device, recipe, 3)
    shard(model, rig, dim=dim, mesh=rig.mesh(2, 2))
    check_after_writes(model, recipe)


@ranks(4)
@pytest.mark.parametrize("recipe, dim", SHARDINGS)
@pytest.mark.parametrize("fp8", [False, True])
def test_expert_parallel_ranks_gather_their_own_matrices(rig, recipe, dim, fp8):
    mesh = init_device_mesh(rig.device.type, (2, 2), mesh_dim_names=("efsdp", "ep"))
    model = build(rig.device, recipe, 6)
    weights = wholes(model)
    if fp8:
        model = build(rig.device, recipe, 6, fp8_weights=True)
    for name in NAMES:
        parameter = distribute_tensor(getattr(model.experts, name).detach(), mesh["ep"], [Shard(0)])
        model.experts.register_parameter(name, nn.Parameter(parameter))
    sharded(model, rig, dim, root=False, mesh=mesh["efsdp"])
    with Collectives() as collectives:
        model.experts.unshard()
    assert fp8 or len(reduces(collectives)) == dim
    part = mesh["ep"].get_local_rank()
    local_weights = {name: values.chunk(2)[part] for name, values in weights.items()}
    for name in NAMES:
        gathered = getattr(model.experts, name).to_local()
        if fp8 and recipe.startswith("mxfp8"):
            # `distribute_tensor` sends the rounded values of rowwise planes, whose blocks may have
            # other exponents than the blocks of the values before.
            check_values(gathered, local_weights[name], recipe)
        else:
            check_planes(gathered, local_weights[name], recipe)


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "rowwise", "mxfp8"])
@pytest.mark.parametrize("dim", [0, 1])
def test_rows_of_four_dimensions_are_those_of_one_matrix(rig, recipe, dim):
    model = build(rig.device, recipe, 3, gated=True)
    shard(model, rig, dim=dim)
    check_after_writes(model, recipe)


@ranks(2)
@pytest.mark.parametrize("recipe, dim", SHARDINGS)
def test_gradients_are_those_of_dequantized_weights(rig, recipe, dim):
    model = build(rig.device, recipe, 4)
    experts = model.experts
    shard(model, rig, dim=dim)
    x = torch.randn(8, 96, generator=torch.Generator().manual_seed(1)).to(rig.device)
    experts.unshard()
    reference = Experts(*(getattr(experts, name).dequantize() for name in NAMES))
    experts.reshard()
    for module in (experts, reference):
        module(x).square().mean().backward()
    for name in NAMES:
        got = getattr(experts, name).grad.full_tensor()
        torch.testing.assert_close(got, getattr(reference, name).grad)


@ranks(2, 4)
@pytest.mark.parametrize("recipe, dim", SHARDINGS)
def test_training_gathers_the_bytes_of_each_step(rig, recipe, dim):
    model = build(rig.device, recipe, 4)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, rig, dim=dim, mp_policy=policy)
    fully_shard(model, mesh=rig.mesh(), mp_policy=policy)
    optimizer = fp8rs.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(2):
        torch.manual_seed(step + 10 * rig.rank)
        x = torch.randn(8, 96, device=rig.device)
        before = wholes(model)
        calls = []

        def note(module, args, before=before, calls=calls):
            check_gathered(model, before, recipe)
            calls.append(module)

        with model.experts.register_forward_pre_hook(note):
            model(x).square().mean().backward()
        assert calls
        optimizer.step()
        optimizer.zero_grad()
        after = wholes(model)
        assert all(not torch.equal(after[n], before[n]) for n in NAMES)


@ranks(2)
@pytest.mark.parametrize("recipe, dim", [("mxfp8 of 1x32", 1), ("mxfp8", 2), ("rowwise", 2)])
def test_other_dimensions_are_refused(rig, recipe, dim):
    model = build(rig.device, recipe, 4)
    shard(model, rig, dim=dim)
    with pytest.raises(ValueError, match=rf"puts experts\.\w+ on Shard\({dim}\).*use Shard\(0\)"):
        model.experts.unshard()


@ranks(2)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_state_dicts_hold_plain_batches(rig, dim):
    model = build(rig.device, "current", 4)
    weights = wholes(model)
    shard(model, rig, dim=dim)
    state = model.state_dict()
    for name, values in weights.items():
        value = state[f"experts.{name}"]
        assert type(value.to_local()) is torch.Tensor
        assert torch.equal(value.full_tensor(), values)
    check_after_writes(model, "current")
