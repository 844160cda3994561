"""Gathered weights hold the bytes that quantizing the whole weight gives, however it is cut."""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fp8rs
from distributed import ranks
from distributed.models import (
    EVEN,
    HIDDEN,
    RECIPES,
    UNEVEN,
    batch,
    check_planes,
    expected,
    full_weights,
    make,
    recipes,
    same_bytes,
    shard,
    shardings,
    watch_weights,
)
from fp8rs.fsdp import MasterWeight
from fp8rs.tensor.quantized import Float8Tensor
from internals import local_of


def check_forward(model, rig, recipe="current", dtype=torch.float32, backward=True):
    """Run a forward (and backward) and compare every weight in it with its full self."""
    weights = full_weights(model)
    checked = []

    def check(name, weight):
        assert weight.dtype == dtype
        check_planes(weight, weights[name], recipe)
        checked.append(name)

    watch_weights(model, check)
    y = model(batch(rig))
    if backward:
        y.square().mean().backward()
    assert sorted(checked) == sorted(weights)


@ranks(1, 2, 4)
@shardings
@recipes
@pytest.mark.parametrize("reshard", [True, False])
def test_gathered_bytes_are_those_of_the_whole_weight(rig, hidden, recipe, reshard):
    model = make(HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig, reshard_after_forward=reshard)
    check_forward(model, rig, recipe)


@ranks(4)
@shardings
@recipes
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_hybrid_sharding(rig, hidden, recipe, shape):
    model = make(HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device)
    shard(model, mesh=rig.mesh(*shape))
    check_forward(model, rig, recipe)


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@shardings
@recipes
def test_mixed_precision_quantizes_the_stored_values(rig, dtype, hidden, recipe):
    model = make(HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device, dtype=dtype)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard(model, rig, mp_policy=policy)
    check_forward(model, rig, recipe, dtype=torch.bfloat16)


@ranks(2)
def test_sharding_the_columns(rig):
    model = make(EVEN, device=rig.device)
    shard(model, rig, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    check_forward(model, rig)


@ranks(2)
@shardings
@recipes
def test_weights_offloaded_to_the_cpu(rig, hidden, recipe):
    model = make(HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig, offload_policy=CPUOffloadPolicy(pin_memory=rig.device_type == "cuda"))
    check_forward(model, rig, recipe)


@ranks(2)
@recipes
def test_meta_device_init(rig, recipe):
    with torch.device("meta"):
        model = make(UNEVEN, recipe=RECIPES[recipe], device="meta")
    shard(model, rig)
    model.to_empty(device=rig.device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert isinstance(local_of(model.head.weight), MasterWeight)
    check_forward(model, rig, recipe)


@ranks(2)
@recipes
@pytest.mark.parametrize("begin", ["the model", "a method", "a layer"])
def test_parts_that_fsdp_meets_in_the_middle_of_a_pass(rig, recipe, begin):
    """Padding a module's short shards at its first forward does not count as a write."""
    with torch.device("meta"):
        model = make(UNEVEN, recipe=RECIPES[recipe], device="meta")
    for part in (*model.blocks, model.head):
        fully_shard(part, mesh=rig.mesh())
    if begin != "the model":
        fully_shard(model, mesh=rig.mesh())
    model.to_empty(device=rig.device)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    weights = full_weights(model)
    checked = []

    def check(name, weight):
        check_planes(weight, weights[name], recipe)
        checked.append(name)

    watch_weights(model, check)
    if begin == "the model":
        model(batch(rig))
    elif begin == "a method":
        type(model).forward(model, batch(rig))
    else:
        model.head(batch(rig))
        for block in model.blocks:
            block(batch(rig))
    assert sorted(checked) == sorted(weights)


@ranks(4)
def test_partial_reshard_is_refused_before_anything_is_gathered(rig):
    model = make(EVEN, device=rig.device)
    mesh = rig.mesh()
    fully_shard(model.blocks[0], mesh=mesh, reshard_after_forward=4)  # this is a full one
    fully_shard(model.blocks[1], mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"reshard_after_forward=2.*blocks.1"):
        model(batch(rig))


@ranks(1, 2)
def test_a_profile_shows_the_cast_of_each_unit(rig):
    model = shard(make(EVEN, device=rig.device), rig)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model(batch(rig))
    names = {event.key for event in profile.key_averages()}
    casts = {name for name in names if name.startswith("fp8rs::cast")}
    assert casts == {"fp8rs::cast", "fp8rs::cast (blocks.0)", "fp8rs::cast (blocks.1)"}


@ranks(2)
def test_a_gathered_weight_cannot_be_read_after_its_reshard(rig):
    model = make(EVEN, device=rig.device)
    shard(model, rig)
    gathered_weights = []
    watch_weights(model.blocks[0], lambda name, w: gathered_weights.append(w))
    with torch.no_grad():
        model(batch(rig))
    assert len(gathered_weights) == 2
    with pytest.raises(RuntimeError, match="reshard"):
        gathered_weights[0].dequantize()


@ranks(2)
def test_high_precision_gather_quantizes_what_arrives(rig):
    """Without the FP8 gather the policy's cast comes first; without a cast, bytes are equal."""
    for policy, equal in ((None, True), (torch.bfloat16, False)):
        outputs = []
        for fp8_gather in (True, False):
            model = make(UNEVEN, device=rig.device, enable_fsdp_float8_all_gather=fp8_gather)
            shard(model, rig, mp_policy=MixedPrecisionPolicy(param_dtype=policy))
            assert isinstance(local_of(model.head.weight), MasterWeight) == fp8_gather
            with torch.no_grad():
                outputs.append(model(batch(rig)))
        assert same_bytes(*outputs) == equal


@ranks(2)
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_layers_refuse_a_policys_dtype_that_they_do_not_compute_in(rig, fp8_weights):
    model = make(EVEN, device=rig.device, fp8_weights=fp8_weights)
    shard(model, rig, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
    with pytest.raises(TypeError, match=r"input must be .*, not torch.float64"):
        model(batch(rig))


@ranks(2)
@pytest.mark.parametrize("options", [{"power_2_scale": True}, {"amax_epsilon": 3.0}])
def test_scale_options_hold_for_gathered_weights(rig, options):
    model = make(UNEVEN, recipe=fp8rs.Float8CurrentScaling(**options), device=rig.device)
    shard(model, rig)
    weights = full_weights(model)
    gathered_weights = {}
    watch_weights(model, lambda name, w: gathered_weights.update({name: w.rowwise}))
    model(batch(rig)).sum().backward()
    for name, weight in weights.items():
        power = options.get("power_2_scale", False)
        epsilon = options.get("amax_epsilon", 0.0)
        _, _, scale = torch.ops.fp8rs.quantize_current(
            weight, torch.float8_e4m3fn, True, False, power, epsilon
        )
        assert same_bytes(gathered_weights[name].scale, scale)
        assert not same_bytes(scale, expected(weight)[1])


@ranks(4)
@pytest.mark.parametrize("hidden", [EVEN, (52, 28)], ids=["even", "uneven in blocks"])
def test_tensor_parallel_weights_have_one_scale_over_both_meshes(rig, hidden):
    mesh = rig.mesh(2, 2, names=("data", "tensor"))
    model = make(hidden, device=rig.device)
    weights = full_weights(model)
    block = model.blocks[0]
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["data"])
    for _ in range(2):
        block.unshard()
        for name, dim in (("up", 0), ("down", 1)):
            codes, scale = expected(weights[f"blocks.0.{name}"])
            weight = getattr(block, name).weight.to_local()
            assert isinstance(weight, Float8Tensor)
            part = codes.chunk(2, dim)[mesh["tensor"].get_local_rank()]
            assert same_bytes(weight.rowwise.data, part)
            assert same_bytes(weight.rowwise.scale, scale)
        block.reshard()


@ranks(2)
def test_several_modules_in_one_group(rig):
    model = make(UNEVEN, device=rig.device)
    fully_shard(list(model.blocks), mesh=rig.mesh())
    fully_shard(model, mesh=rig.mesh())
    check_forward(model, rig)
