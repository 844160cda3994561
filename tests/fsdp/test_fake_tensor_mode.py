"""A whole FSDP2 step runs under FakeTensorMode, where memory is estimated before there are GPUs."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8rs
from cases import each_kind_of_recipe
from distributed.models import RECIPES, Stack, linears, shard
from fp8rs.convert.sizes import groups_of, layouts_of
from fp8rs.quantize.recipes import resolve_recipe

RANKS = 4
#: One block with uneven shards, whose boundaries split blocks of 32 rows and of 128.
HIDDEN = (150,)

OPTIMIZERS = {
    "torch": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=False),
    "fp8rs": lambda p: fp8rs.optim.AdamW(p, lr=1e-3),
    "masters": lambda p: fp8rs.optim.MasterWeights(p, torch.optim.SGD, lr=1e-3, momentum=0.9),
}

#: Its peak is higher in a fake step, with plain weights too: torch decomposes the operators.
FOREACH = {"foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True)}

pytestmark = pytest.mark.filterwarnings("ignore:.* FP8 weights, and keeps no masters")


@pytest.fixture(scope="module")
def mesh():
    """A mesh of ranks that are not there: every collective returns at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield init_device_mesh("cpu", (RANKS,))
    dist.destroy_process_group()


def peak(mesh, recipe, fp8_weights, optimizer, fake):
    """The tracked bytes of each kind at the peak of some steps, and the sharded model."""
    with FakeTensorMode() if fake else nullcontext():
        model = Stack(HIDDEN)
        fp8rs.convert_to_float8_training(model, recipe=recipe, fp8_weights=fp8_weights)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard(model, mesh=mesh, mp_policy=policy)
        stepper = {**OPTIMIZERS, **FOREACH}[optimizer](model.parameters())
        # With more rows, memory is close to its peak at two moments, and either may be found.
        x = torch.randn(10, 32)
        tracker = FSDPMemTracker(model, stepper)
        tracker.track_inputs((x,))
        with tracker:
            # With delayed scaling, `fp8_ready` is set from the third step on.
            for _ in range(3 if recipe == "delayed" else 2):
                tracker.reset_mod_stats()
                model(x).float().square().mean().backward()
                stepper.step()
                stepper.zero_grad()
        memory = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    return {str(kind): size for kind, size in memory.items()}, model


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
@pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])
@each_kind_of_recipe
def test_a_fake_step_has_the_peak_of_a_real_one(mesh, recipe, fp8_weights, optimizer):
    arguments = RECIPES[recipe], fp8_weights, optimizer
    # The fake step comes first: a tensor that it cached would reach the real one.
    actual, _ = peak(mesh, *arguments, fake=True)
    expected, _ = peak(mesh, *arguments, fake=False)
    # A real kernel and its fake one may differ in intermediate results of a few hundred bytes.
    assert actual.pop("Total") == pytest.approx(expected.pop("Total"), rel=0.02)
    for kind in actual.keys() - {f"_FSDPRefType.{name}" for name in ("ACT", "TEMP")}:
        assert actual[kind] == expected[kind], kind


@pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])
@each_kind_of_recipe
def test_a_fake_step_of_a_foreach_optimizer_has_its_moments(mesh, recipe, fp8_weights):
    memory, model = peak(mesh, RECIPES[recipe], fp8_weights, "foreach", fake=True)
    elements = sum(p.to_local().numel() for p in model.parameters())
    assert memory["_FSDPRefType.OPT"] >= 2 * 4 * elements


def test_a_fake_step_after_a_real_one(mesh):
    arguments = RECIPES["mxfp8 of 1x32"], False, "torch"
    peak(mesh, *arguments, fake=False)
    peak(mesh, *arguments, fake=True)


@pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])
@each_kind_of_recipe
def test_the_peak_of_a_fake_step_has_gathers_in_fp8(mesh, recipe, fp8_weights):
    kind = resolve_recipe(RECIPES[recipe])
    actual, model = peak(mesh, kind, fp8_weights, "torch", fake=True)
    layouts = layouts_of(kind, ((m, "weight") for m in linears(model).values()))
    groups = groups_of(model, layouts, world_size=RANKS, param_dtype=torch.bfloat16)
    sizes = {group.name: group.gathered_bytes for group in groups}
    expected = sizes[""] + sizes["blocks.0"]
    unsharded = actual["_FSDPRefType.UNSHARDED_PARAM"]
    # The layer keeps the scales without their padding.
    assert unsharded == pytest.approx(expected, rel=0.05)
