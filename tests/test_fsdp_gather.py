"""Gathered weights hold the bytes that quantizing the whole weight gives, however it is cut."""

import gc
from contextlib import contextmanager

import pytest
import torch
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import fp8rs
import fp8rs.fsdp.layouts
from distributed import ranks
from distributed.models import (
    EMPTY,
    EVEN,
    RECIPES,
    UNEVEN,
    Stack,
    batch,
    check_planes,
    full_weights,
    linears,
    make,
    same_bytes,
    shard,
    train_with_histories,
    watch_weights,
    whole_planes,
)
from fp8rs.fsdp import MasterWeight
from fp8rs.tensors import Float8Tensor
from simulation import scale_of

HIDDEN = {"even": EVEN, "uneven": UNEVEN, "empty": EMPTY}
shardings = pytest.mark.parametrize("hidden", list(HIDDEN))
recipes = pytest.mark.parametrize("recipe", list(RECIPES))


def expected(weight):
    """Codes and scale of a whole weight whose recipe is current scaling."""
    return whole_planes(weight, "current")[:2]


def check_forward(model, rig, recipe="current", dtype=torch.float32, backward=True):
    """Run a forward (and backward) and compare every weight in it with its full self."""
    whole = full_weights(model)
    checked = []

    def check(name, weight):
        assert weight.dtype == dtype
        check_planes(weight, whole[name], recipe)
        checked.append(name)

    watch_weights(model, check)
    y = model(batch(rig))
    if backward:
        y.square().mean().backward()
    assert sorted(checked) == sorted(whole)


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
@pytest.mark.parametrize("histories", [True, False])
def test_the_path_of_offloaded_weights(rig, recipe, histories):
    """The forward's gather quantizes the copy that FSDP2 made; the backward's takes those bytes."""
    with offload_on_the_cpu():
        model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
        shard(model, rig)
        amaxes = {}
        if histories and recipe == "delayed":
            amaxes = train_with_histories(model, rig)
        forward, backward = {}, {}
        watch_weights(model, lambda name, w: forward.update({name: w.rowwise.map(torch.clone)}))
        for name, layer in linears(model).items():
            layer.register_full_backward_pre_hook(
                lambda layer, grads, name=name: backward.update(
                    {name: layer.weight.rowwise.map(torch.clone)}
                )
            )
        whole = full_weights(model)
        y = model(batch(rig))
        for p in model.blocks.parameters():
            p.data.mul_(3)
        y.sum().backward()
        assert sorted(forward) == sorted(backward) == sorted(whole)
        for name, weight in whole.items():
            codes, scale, *_ = whole_planes(weight, recipe)
            if amaxes:
                scale = scale_of(amaxes[name], torch.float8_e4m3fn)
                codes, _ = torch.ops.fp8rs.quantize(weight, scale, torch.float8_e4m3fn)
            for plane in (forward[name], backward[name]):
                assert same_bytes(plane.data, codes), name
                assert same_bytes(plane.scale, scale), name


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
    assert isinstance(model.head.weight._local_tensor, MasterWeight)
    check_forward(model, rig, recipe)


@ranks(2)
@shardings
@recipes
def test_backward_gathers_the_same_bytes_again(rig, hidden, recipe):
    model = make(HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)
    seen = {}
    block = model.blocks[0]
    watch_weights(model, lambda name, w: seen.update({name: w.rowwise.data.clone()}))
    again = []
    block.down.register_full_backward_pre_hook(
        lambda module, grads: again.append(module.weight.rowwise.data.clone())
    )
    model(batch(rig)).sum().backward()
    assert len(again) == 1
    assert same_bytes(again[0], seen["blocks.0.down"])


@ranks(2)
def test_unshard_outside_a_forward(rig):
    model = make(UNEVEN, device=rig.device)
    shard(model, rig)
    whole = full_weights(model)
    with torch.no_grad():
        model(batch(rig))  # lazy init belongs to the root
        block = model.blocks[1]
        block.unshard()
        codes, scale = expected(whole["blocks.1.up"])
        assert same_bytes(block.up.weight.rowwise.data, codes)
        assert same_bytes(block.up.weight.rowwise.scale, scale)
        block.reshard()


@ranks(2)
@recipes
def test_a_submodule_called_by_itself(rig, recipe):
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    for block in model.blocks:
        fully_shard(block, mesh=rig.mesh())
    whole = full_weights(model)
    block = model.blocks[0]
    seen = {}
    watch_weights(block, lambda name, w: seen.update({name: w.rowwise.map(torch.clone)}))
    x = batch(rig).requires_grad_()
    for _ in range(2):
        block(x).sum().backward()
    for name in ("up", "down"):
        codes, scale, *_ = whole_planes(whole[f"blocks.0.{name}"], recipe)
        assert same_bytes(seen[name].data, codes)
        assert same_bytes(seen[name].scale, scale)
    assert x.grad is not None
    assert block.up.weight.grad is not None


@ranks(2)
def test_a_converted_list_of_blocks_is_warned_of(rig):
    """Its forward cannot run, so that nothing tells the weights' passes apart."""
    model = make(UNEVEN, recipe=None, device=rig.device)
    fp8rs.convert_to_float8_training(model.blocks, recipe="current")
    shard(model, rig)
    with pytest.warns(UserWarning, match="a ModuleList whose forward does not exist"):
        model(batch(rig))
    model(batch(rig)).sum().backward()


@ranks(2)
def test_training_through_another_method_is_warned_of(rig):
    class Encoder(Stack):
        def encode(self, x):
            return self.head(self.blocks[0](x))

    torch.manual_seed(0)
    model = Encoder().to(rig.device)
    fp8rs.convert_to_float8_training(model, recipe="current")
    shard(model, rig)
    register_fsdp_forward_method(model, "encode")
    y = model.encode(batch(rig))
    with pytest.warns(UserWarning, match="a Encoder whose forward has not run.*training loop"):
        y.sum().backward()
    model.encode(batch(rig)).sum().backward()  # it is said once


@ranks(2)
def test_an_early_unshard_is_not_warned_of(rig):
    model = make(UNEVEN, device=rig.device)
    for block in model.blocks:
        fully_shard(block, mesh=rig.mesh())
        block.unshard()
        block.reshard()
    model(batch(rig)).sum().backward()


def held(device):
    """Bytes of all uint8 tensors that live: those at hand for gathers, once FSDP2 has freed its."""
    gc.collect()
    storages = {}
    for t in gc.get_objects():
        if type(t) is torch.Tensor and t.dtype == torch.uint8 and t.device.type == device.type:
            storage = t.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


@ranks(1, 2)
@recipes
def test_a_weights_bytes_are_held_once(rig, recipe):
    """Whatever is gathered apart from the others: by itself, or left gathered by an evaluation."""
    before = held(rig.device)
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)

    def step():
        model(batch(rig)).sum().backward()

    step()
    once = held(rig.device) - before
    for _ in range(2):
        with torch.no_grad():
            model(batch(rig))  # the root's own weights stay gathered
        step()
        for block in model.blocks:
            block.unshard()
            block.reshard()
        model.unshard()
        model.reshard()
        with torch.no_grad():
            model(batch(rig))
        model.reshard()
        step()
    assert held(rig.device) - before == once


@ranks(2)
def test_a_layer_called_twice_in_one_forward(rig):
    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = make(UNEVEN, recipe=None)

        def forward(self, x):
            return self.stack(self.stack(x))

    torch.manual_seed(0)
    model = Twice().to(rig.device)
    fp8rs.convert_to_float8_training(model, recipe="current")
    shard(model.stack, rig)
    fully_shard(model, mesh=rig.mesh())
    whole = full_weights(model)
    count = []

    def check(name, weight):
        assert same_bytes(weight.rowwise.data, expected(whole[name])[0])
        count.append(name)

    watch_weights(model, check)
    model(batch(rig)).sum().backward()
    assert len(count) == 2 * len(whole)


@contextmanager
def offload_on_the_cpu():
    """Take shards for offloaded ones, which otherwise need an accelerator to be offloaded from."""
    before = fp8rs.fsdp.layouts.Shard.offloaded
    fp8rs.fsdp.layouts.Shard.offloaded = property(lambda shard: True)
    try:
        yield
    finally:
        fp8rs.fsdp.layouts.Shard.offloaded = before


def check_scaled(plane, whole, amax):
    """A gathered plane is the whole weight under the scale that ``amax`` gives."""
    scale = scale_of(amax, torch.float8_e4m3fn)
    assert same_bytes(plane.scale, scale), (plane.scale, scale)
    codes, _ = torch.ops.fp8rs.quantize(whole, scale, torch.float8_e4m3fn)
    assert same_bytes(plane.data, codes)


@ranks(1, 2, 4)
@shardings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_of_the_histories_hold_for_gathered_weights(rig, hidden, dtype):
    """Delayed scaling as it is from the third step on: the cast comes before any amax."""
    model = make(HIDDEN[hidden], recipe="delayed", device=rig.device)
    model.blocks[1].to(dtype)
    shard(model, rig, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    amaxes = train_with_histories(model, rig)
    for p in model.parameters():
        p.data.mul_(3)  # so that no weight's own largest value gives the history's scale
    seen = {}
    watch_weights(model, lambda name, w: seen.update({name: w.rowwise.map(torch.clone)}))
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for _ in range(2):
        whole = full_weights(model)
        seen.clear()
        model(batch(rig)).float().square().mean().backward()
        assert sorted(seen) == sorted(whole)
        for name, weight in whole.items():
            check_scaled(seen[name], weight, amaxes[name])
            assert not same_bytes(expected(weight)[1], seen[name].scale)
            amaxes[name] = weight.float().abs().amax()  # three times as much, for the next one
        optimizer.step()
        for p in model.parameters():
            p.data.mul_(0.5)


@ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4)])
def test_scales_of_the_histories_under_hybrid_sharding(rig, shape):
    model = make(UNEVEN, recipe="delayed", device=rig.device)
    shard(model, mesh=rig.mesh(*shape))
    amaxes = train_with_histories(model, rig)
    whole = full_weights(model)
    seen = {}
    watch_weights(model, lambda name, w: seen.update({name: w.rowwise.map(torch.clone)}))
    model(batch(rig)).square().mean().backward()
    for name, weight in whole.items():
        check_scaled(seen[name], weight, amaxes[name])


@ranks(2, 4)
@pytest.mark.parametrize("recipe", ["current", "delayed", "delayed, from histories"])
@pytest.mark.parametrize("value", ["inf", "nan"])
def test_non_finite_weights_make_one_scale_nan_on_all_ranks(rig, recipe, value):
    model = make(UNEVEN, recipe=recipe.split(",")[0], device=rig.device)
    shard(model, rig)
    if recipe.endswith("histories"):
        train_with_histories(model, rig)
    x = batch(rig)
    model(x).sum().backward()
    up = model.blocks[1].up.weight
    before = up.data.to_local().high_precision.clone()
    if rig.rank == 1:
        up.data.to_local()[0, 0] = float(value)
    scales = {}
    watch_weights(model, lambda name, w: scales.update({name: w.rowwise.scale.item()}))
    model(x).sum().backward()
    assert scales["blocks.1.up"] != scales["blocks.1.up"], scales
    assert all(v == v for n, v in scales.items() if n != "blocks.1.up"), scales
    # It is seen once: what replaces it is quantized as if nothing had been.
    up.data.to_local().copy_(before)
    model.zero_grad()
    torch.optim.SGD(model.parameters(), 0.0).step()  # the histories roll
    model(x)
    assert all(v == v for v in scales.values()), scales


@ranks(4)
def test_partial_reshard_is_refused_before_anything_is_gathered(rig):
    model = make(EVEN, device=rig.device)
    mesh = rig.mesh()
    fully_shard(model.blocks[0], mesh=mesh, reshard_after_forward=4)  # this is a full one
    fully_shard(model.blocks[1], mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    with pytest.raises(ValueError, match=r"reshard_after_forward=2.*blocks.1"):
        model(batch(rig))


@ranks(2)
def test_a_gathered_weight_cannot_be_read_after_its_reshard(rig):
    model = make(EVEN, device=rig.device)
    shard(model, rig)
    kept = []
    watch_weights(model.blocks[0], lambda name, w: kept.append(w))
    with torch.no_grad():
        model(batch(rig))
    assert len(kept) == 2
    with pytest.raises(RuntimeError, match="reshard"):
        kept[0].dequantize()


@ranks(2)
def test_high_precision_gather_quantizes_what_arrives(rig):
    """Without the FP8 gather the policy's cast comes first; without a cast, bytes are equal."""
    for policy, equal in ((None, True), (torch.bfloat16, False)):
        outputs = []
        for fp8_gather in (True, False):
            model = make(UNEVEN, device=rig.device, enable_fsdp_float8_all_gather=fp8_gather)
            assert isinstance(model.head.weight, MasterWeight) == fp8_gather
            shard(model, rig, mp_policy=MixedPrecisionPolicy(param_dtype=policy))
            with torch.no_grad():
                outputs.append(model(batch(rig)))
        assert same_bytes(*outputs) == equal


@ranks(2)
@pytest.mark.parametrize("options", [{"power_2_scale": True}, {"amax_epsilon": 3.0}])
def test_scale_options_hold_for_gathered_weights(rig, options):
    model = make(UNEVEN, recipe=fp8rs.Float8CurrentScaling(**options), device=rig.device)
    shard(model, rig)
    whole = full_weights(model)
    seen = {}
    watch_weights(model, lambda name, w: seen.update({name: w.rowwise}))
    model(batch(rig)).sum().backward()
    for name, weight in whole.items():
        power, epsilon = options.get("power_2_scale", False), options.get("amax_epsilon", 0.0)
        _, _, scale = torch.ops.fp8rs.quantize_current(
            weight, torch.float8_e4m3fn, True, False, power, epsilon
        )
        assert same_bytes(seen[name].scale, scale)
        assert not same_bytes(scale, expected(weight)[1])


@ranks(2)
def test_delayed_margin_holds_for_gathered_weights(rig):
    model = make(UNEVEN, recipe=fp8rs.DelayedScaling(margin=2), device=rig.device)
    shard(model, rig)
    whole = full_weights(model)
    seen = {}
    watch_weights(model, lambda name, w: seen.update({name: w.rowwise.scale}))
    model(batch(rig)).sum().backward()
    for name, weight in whole.items():
        assert same_bytes(seen[name], expected(weight)[1] * 4)


@ranks(4)
@pytest.mark.parametrize("hidden", [EVEN, (52, 28)], ids=["even", "uneven in blocks"])
def test_tensor_parallel_weights_have_one_scale_over_both_meshes(rig, hidden):
    mesh = rig.mesh(2, 2, names=("data", "tensor"))
    model = make(hidden, device=rig.device)
    whole = full_weights(model)
    block = model.blocks[0]
    parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["data"])
    for _ in range(2):
        block.unshard()
        for name, dim in (("up", 0), ("down", 1)):
            codes, scale = expected(whole[f"blocks.0.{name}"])
            weight = getattr(block, name).weight.to_local()
            assert isinstance(weight, Float8Tensor)
            part = codes.chunk(2, dim)[mesh["tensor"].get_local_rank()]
            assert same_bytes(weight.rowwise.data, part)
            assert same_bytes(weight.rowwise.scale, scale)
        block.reshard()


@ranks(4)
def test_histories_are_reduced_over_both_meshes(rig):
    """A reduction group of the user's own takes no shard's ranks out of a weight's history."""
    mesh = rig.mesh(2, 2, names=("data", "tensor"))
    alone = [torch.distributed.new_group([r]) for r in range(4)][rig.rank]

    class Head(torch.nn.Module):
        """Runs the head alone; what tensor parallelism shards is only gathered."""

        def __init__(self):
            super().__init__()
            self.stack = make(EVEN, recipe=None)

        def forward(self, x):
            return self.stack.head(x)

    torch.manual_seed(0)
    model = Head().to(rig.device)
    # The most recent amaxes: those before the histories were filled have other reductions.
    recipe = fp8rs.DelayedScaling(amax_compute_algo="most_recent")
    fp8rs.convert_to_float8_training(model, recipe=recipe, amax_reduction_group=alone)
    whole = full_weights(model)
    block = model.stack.blocks[0]
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(block, mesh["tensor"], plan)
    for module in (*model.stack.blocks, model.stack.head):
        fully_shard(module, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    for n in range(5):
        model(batch(rig, n)).sum().backward()
        optimizer.step()
    state = model.stack.head._fp8_state
    assert all(state.history.ready[: len(state.names)])
    for name, dim in (("up", 0), ("down", 1)):
        weight = whole[f"stack.blocks.0.{name}"]
        amaxes = [part.abs().amax() for part in weight.chunk(2, dim)]
        assert amaxes[0] != amaxes[1]
        block.unshard()
        plane = getattr(block, name).weight.to_local().rowwise
        codes, scale = expected(weight)
        assert same_bytes(plane.scale, scale), (name, plane.scale, scale)
        part = codes.chunk(2, dim)[mesh["tensor"].get_local_rank()]
        assert same_bytes(plane.data, part)
        block.reshard()


@ranks(2)
def test_several_modules_in_one_group(rig):
    model = make(UNEVEN, device=rig.device)
    fully_shard(list(model.blocks), mesh=rig.mesh())
    fully_shard(model, mesh=rig.mesh())
    check_forward(model, rig)
