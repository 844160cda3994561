"""Ranks that a model is sharded over must have converted it alike, and compare that first."""

from __future__ import annotations

import copy
import re
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8rs
from distributed import ranks
from distributed.models import EVEN, UNEVEN, Block, Stack, batch, make, shard
from fp8rs.fsdp import checks

#: How the first ranks and the last one convert, and what the error says about both.
WAYS = {
    "a field": (
        {"recipe": fp8rs.Float8CurrentScaling()},
        {"recipe": fp8rs.Float8CurrentScaling(power_2_scale=True)},
        ("recipe", "current", "current, power_2_scale=True"),
    ),
    "the recipe": (
        {"recipe": "current"},
        {"recipe": "mxfp8"},
        ("recipe", "current", "mxfp8"),
    ),
    "the filter": (
        {},
        {"filter_fqns": ["blocks.1"]},
        ("weight of blocks.1.up", "quantized before it is gathered", "not converted"),
    ),
    "another filter": (
        {"filter_fqns": ["blocks.0"]},
        {"filter_fqns": ["blocks.1"]},
        ("weight of blocks.1.up", "quantized before it is gathered", "not converted"),
    ),
    "the kind of weight": (
        {},
        {"fp8_weights": True},
        ("weight of blocks.0.up", "quantized before it is gathered", "FP8"),
    ),
    "the gather": (
        {},
        {"enable_fsdp_float8_all_gather": False},
        (
            "weight of blocks.0.up",
            "quantized before it is gathered",
            "gathered in high precision",
        ),
    ),
}
ways = pytest.mark.parametrize("way", list(WAYS))


def message(setting, first, last, rank):
    return re.escape(f"{setting} is {first} on rank 0 and {last} on rank {rank}:")


@contextmanager
def counted():
    """The sizes of the meshes over which ranks compare what they have converted."""
    comparisons = []
    compare = checks.compare

    def counting_compare(store, values, ranks):
        comparisons.append(len(ranks))
        return compare(store, values, ranks)

    checks.compare = counting_compare
    try:
        yield comparisons
    finally:
        checks.compare = compare


@contextmanager
def time_out(seconds):
    store = dist.distributed_c10d._get_default_store()
    before = store.timeout
    store.set_timeout(timedelta(seconds=seconds))
    try:
        yield
    finally:
        store.set_timeout(before)


@ranks(2, 4)
@ways
def test_what_was_converted_otherwise_is_named_on_all_ranks(rig, way):
    first, last, difference = WAYS[way]
    model = make(UNEVEN, device=rig.device, **(last if rig.rank == rig.world_size - 1 else first))
    shard(model, rig)
    for _ in range(2):  # the error is raised in each forward
        with pytest.raises(ValueError, match=message(*difference, rig.world_size - 1)):
            model(batch(rig))


@ranks(2)
@pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "FP8 weights"])
def test_a_different_conversion_of_the_roots_own_layers_is_named_on_all_ranks(rig, fp8_weights):
    """The first rank gathers the root's unit in high precision, without a hook of ours."""
    excluded = [] if rig.rank else ["head"]
    model = make(UNEVEN, device=rig.device, fp8_weights=fp8_weights, filter_fqns=excluded)
    shard(model, rig)
    converted = "FP8" if fp8_weights else "quantized before it is gathered"
    for _ in range(2):
        with pytest.raises(
            ValueError, match=message("weight of head", "not converted", converted, 1)
        ):
            model(batch(rig))


@ranks(2)
@pytest.mark.parametrize("without_head", [0, 1])
@pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "FP8 weights"])
def test_so_is_a_rank_that_gathers_in_high_precision_and_excludes_the_roots_layers(
    rig, without_head, fp8_weights
):
    """Local tensors of that rank are plain, so FSDP2 finds no hook of ours on it."""
    options = {"fp8_weights": fp8_weights}
    if rig.rank == without_head:
        options = {"filter_fqns": ["head"], "enable_fsdp_float8_all_gather": False}
    model = shard(make(UNEVEN, device=rig.device, **options), rig)
    kinds = ["FP8" if fp8_weights else "quantized before it is gathered"] * 2
    kinds[without_head] = "gathered in high precision"
    for _ in range(2):
        with pytest.raises(ValueError, match=message("weight of blocks.0.up", *kinds, 1)):
            model(batch(rig))


@ranks(2)
@pytest.mark.parametrize("without_head", [0, 1])
def test_so_are_excluded_layers_of_the_root_if_all_ranks_gather_in_high_precision(
    rig, without_head
):
    excluded = ["head"] if rig.rank == without_head else []
    options = {"filter_fqns": excluded, "enable_fsdp_float8_all_gather": False}
    model = shard(make(UNEVEN, device=rig.device, **options), rig)
    kinds = ["gathered in high precision"] * 2
    kinds[without_head] = "not converted"
    for _ in range(2):
        with pytest.raises(ValueError, match=message("weight of head", *kinds, 1)):
            model(batch(rig))


@ranks(4)
@ways
def test_so_is_a_replica_that_differs(rig, way):
    first, last, difference = WAYS[way]
    model = make(EVEN, device=rig.device, **(last if rig.rank > 1 else first))
    shard(model, mesh=rig.mesh(2, 2))
    with pytest.raises(ValueError, match=message(*difference, 2)):
        model(batch(rig))


@ranks(2)
def test_so_is_another_version(rig):
    model = shard(make(EVEN, device=rig.device), rig)
    with (
        mock.patch.object(checks, "__version__", f"0.{rig.rank}"),
        pytest.raises(ValueError, match=r"fp8rs is 0\.0 on rank 0 and 0\.1 on rank 1:"),
    ):
        model(batch(rig))


@ranks(2)
@pytest.mark.parametrize("call", ["a block", "unshard", "precompute"])
def test_it_is_said_where_no_forward_of_the_model_is_announced(rig, call):
    first, last, difference = WAYS["a field"]
    model = shard(make(EVEN, device=rig.device, **(last if rig.rank else first)), rig)
    calls = {
        "a block": lambda: model.blocks[0](batch(rig)),
        "unshard": model.unshard,
        "precompute": lambda: fp8rs.precompute_float8_dynamic_scale_for_fsdp(model),
    }
    with pytest.raises(ValueError, match=message(*difference, 1)):
        calls[call]()


@ranks(2)
@pytest.mark.parametrize(
    "options", [first for first, _, _ in WAYS.values()] + [WAYS["the gather"][1]]
)
def test_ranks_that_agree_compare_once(rig, options):
    model = shard(make(UNEVEN, device=rig.device, **options), rig)
    with counted() as comparisons:
        for n in range(3):
            model(batch(rig, n)).sum().backward()
        with torch.no_grad():
            model.eval()(batch(rig))
    assert comparisons == [2]


@ranks(2)
def test_copies_and_other_models_are_compared_for_themselves(rig):
    model = make(UNEVEN, device=rig.device)
    other = copy.deepcopy(model)
    with counted() as comparisons:
        for m in (model, other):
            shard(m, rig)(batch(rig))
    assert comparisons == [2, 2]
    first, last, difference = WAYS["the recipe"]
    third = shard(make(EVEN, device=rig.device, **(last if rig.rank else first)), rig)
    with pytest.raises(ValueError, match=message(*difference, 1)):
        third(batch(rig))
    model(batch(rig)).sum().backward()  # what agreed goes on


@ranks(2)
def test_two_models_may_have_two_recipes(rig):
    teacher = shard(make(EVEN, recipe="rowwise", device=rig.device), rig)
    student = shard(make(UNEVEN, recipe="delayed", device=rig.device), rig)
    for n in range(2):
        with torch.no_grad():
            wanted = teacher(batch(rig, n))
        (student(batch(rig, n)) - wanted).square().mean().backward()


@ranks(4)
def test_stages_of_a_pipeline_have_layers_of_their_own(rig):
    mesh = rig.mesh(2, 2, names=("stage", "shard"))
    stage = mesh.get_local_rank("stage")
    recipe = ("current", "rowwise")[stage]
    model = make((EVEN, UNEVEN)[stage][: stage + 1], recipe=recipe, device=rig.device)
    shard(model, mesh=mesh["shard"])
    with counted() as comparisons:
        model(batch(rig)).sum().backward()
    assert comparisons == [2]


@ranks(2)
def test_layers_that_are_not_sharded_are_a_ranks_own_matter(rig):
    model = make(EVEN, device=rig.device, filter_fqns=["head"] if rig.rank else [])
    for block in model.blocks:
        fully_shard(block, mesh=rig.mesh())
    model(batch(rig)).sum().backward()


class Either(nn.Module):
    """Two blocks, of which a rank uses one."""

    def __init__(self, rank):
        super().__init__()
        self.blocks = nn.ModuleList(Block(n) for n in EVEN)
        self.rank = rank

    def forward(self, x):
        return self.blocks[self.rank](x)


@ranks(2)
def test_parts_that_were_converted_by_themselves_may_run_on_some_ranks_only(rig):
    """One `fully_shard` gathers them all wherever it is called."""
    model = Either(rig.rank).to(rig.device)
    for block in model.blocks:
        fp8rs.convert_to_float8_training(block)
    fully_shard(model, mesh=rig.mesh())
    with counted() as comparisons:
        model(batch(rig))
    assert comparisons == [2, 2]


@contextmanager
def warn_after(seconds):
    before = checks.WARN_AFTER
    checks.WARN_AFTER = timedelta(seconds=seconds)
    try:
        yield
    finally:
        checks.WARN_AFTER = before


def converted_on(rig, waiting):
    """Return a sharded model that is converted on some ranks only."""
    torch.manual_seed(0)
    model = Stack(EVEN).to(rig.device)
    if rig.rank in waiting:
        fp8rs.convert_to_float8_training(model)
    return shard(model, rig)


#: Ranks that convert nothing, and the ranks as messages name them.
MISSING = {
    "the first": ((0,), r"ranks \[0\] have"),
    "the last": ((3,), r"ranks \[3\] have"),
    "two": ((0, 2), r"ranks \[0, 2\] have"),
}


@ranks(4)
@pytest.mark.parametrize("missing", list(MISSING))
def test_ranks_that_converted_nothing_are_named_soon_and_at_the_time_out(rig, missing):
    check_missing_ranks(rig, *MISSING[missing])


@ranks(8, cpu=False)
@pytest.mark.parametrize(
    ("missing", "named"), [((7,), r"ranks \[7\] have"), ((2, 5), r"ranks \[2, 5\] have")]
)
def test_ranks_of_8_that_converted_nothing_are_named_at_the_time_out(rig, missing, named):
    check_missing_ranks(rig, missing, named)


def check_missing_ranks(rig, missing, named):
    waiting = [rank for rank in range(rig.world_size) if rank not in missing]
    model = converted_on(rig, waiting)
    group = dist.new_group(waiting)
    if rig.rank in missing:
        return
    dist.barrier(group)  # on a busy machine, ranks reach this point seconds apart
    with warnings.catch_warnings(record=True) as caught, time_out(2), warn_after(0.3):
        warnings.simplefilter("always")
        with pytest.raises(TimeoutError, match=f"waited 0:00:02 .*: {named} not joined"):
            model(batch(rig))
    told = [str(w.message) for w in caught if "fp8rs has waited" in str(w.message)]
    if rig.rank == waiting[0]:
        assert re.search(f"waited 0:00:00.3.*: {named} not joined. Check that every rank", told[0])
    assert len(told) == (rig.rank == waiting[0]), "one rank warns, once"


@ranks(2)
@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank_is_warned_of_and_the_step_goes_on(rig, late):
    model = converted_on(rig, [0, 1])
    if rig.rank == late:
        time.sleep(1)
        model(batch(rig)).sum().backward()
    else:
        with warn_after(0.2), pytest.warns(UserWarning, match=rf"ranks \[{late}\] have not joined"):
            model(batch(rig)).sum().backward()


@ranks(2)
def test_ranks_that_are_in_time_do_not_warn(rig):
    model = converted_on(rig, [0, 1])
    with warnings.catch_warnings(), warn_after(20):
        warnings.simplefilter("error")
        model(batch(rig)).sum().backward()
