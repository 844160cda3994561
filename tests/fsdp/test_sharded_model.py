"""When sharded weights are quantized: in forwards of the root, outside of them and in backwards."""

import gc
import time
import weakref

import pytest
import torch
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils._python_dispatch import TorchDispatchMode

import fp8rs
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import (
    HIDDEN,
    RECIPES,
    UNEVEN,
    Stack,
    batch,
    expected,
    full_weights,
    linears,
    make,
    recipes,
    reduces,
    same_bytes,
    shard,
    shardings,
    watch_weights,
    whole_planes,
)
from internals import gathered_bytes, has_prepared_codes, keeps_codes, local_of, units_of


@ranks(2)
def test_unshard_outside_a_forward(rig):
    model = make(UNEVEN, device=rig.device)
    shard(model, rig)
    weights = full_weights(model)
    with torch.no_grad():
        model(batch(rig))  # lazy init belongs to the root
        block = model.blocks[1]
        block.unshard()
        codes, scale = expected(weights["blocks.1.up"])
        assert same_bytes(block.up.weight.rowwise.data, codes)
        assert same_bytes(block.up.weight.rowwise.scale, scale)
        block.reshard()


@ranks(2)
@pytest.mark.parametrize("gather", ["unshard", "precomputed forward"])
def test_scales_are_stale_after_optimizer_stepped(rig, gather):
    """No operator shows this write. Neither gather follows the beginning of a forward with it."""
    model = make(UNEVEN, device=rig.device)
    shard(model, rig)
    with torch.no_grad():
        model(batch(rig))
    for module in (model, *model.blocks):
        module.reshard()
    if gather == "precomputed forward":
        fp8rs.fsdp.precompute_float8_dynamic_scale_for_fsdp(model)

    for layer in linears(model).values():
        local_of(layer.weight).high_precision.mul_(3)
    fp8rs.optimizer_stepped(model)

    weights = full_weights(model)
    block = model.blocks[1]
    gathered_weights = {}
    if gather == "unshard":
        block.unshard()
        gathered_weights["blocks.1.up"] = block.up.weight.rowwise.map(torch.clone)
        block.reshard()
    else:
        watch_weights(
            model, lambda name, w: gathered_weights.update({name: w.rowwise.map(torch.clone)})
        )
        with torch.no_grad():
            model(batch(rig))
    for name, row in gathered_weights.items():
        codes, scale = expected(weights[name])
        assert same_bytes(row.data, codes), name
        assert same_bytes(row.scale, scale), name


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 cannot trace a step of sharded parameters"
)
@ranks(1, 2)
def test_scales_are_stale_after_a_compiled_step(rig):
    """A compiled step writes without an operator, and a compiled root's forwards do not count."""
    model = make(UNEVEN, device=rig.device)
    shard(model, rig)
    optimizer = torch.optim.SGD(model.parameters(), lr=50.0)
    step = torch.compile(optimizer.step, backend="aot_eager")
    block = model.blocks[1]
    for n in range(2):
        model(batch(rig, n)).square().mean().backward()
        step()
        model.reshard()
        block.reshard()

        weights = full_weights(model)
        block.unshard()
        codes, scale = expected(weights["blocks.1.up"])
        assert same_bytes(block.up.weight.rowwise.data, codes)
        assert same_bytes(block.up.weight.rowwise.scale, scale)
        block.reshard()


@ranks(2)
@recipes
def test_a_submodule_called_by_itself(rig, recipe):
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    for block in model.blocks:
        fully_shard(block, mesh=rig.mesh())
    weights = full_weights(model)
    block = model.blocks[0]
    gathered_weights = {}
    watch_weights(
        block, lambda name, w: gathered_weights.update({name: w.rowwise.map(torch.clone)})
    )
    x = batch(rig).requires_grad_()
    for _ in range(2):
        block(x).sum().backward()
    for name in ("up", "down"):
        codes, scale, *_ = whole_planes(weights[f"blocks.0.{name}"], recipe)
        assert same_bytes(gathered_weights[name].data, codes)
        assert same_bytes(gathered_weights[name].scale, scale)
    assert x.grad is not None
    assert block.up.weight.grad is not None


def watch_fp8(model, codes):
    """Keep the codes that converted layers work on."""
    for name, layer in linears(model).items():
        if isinstance(layer, fp8rs.nn.Linear):
            layer.register_forward_pre_hook(
                lambda layer, args, name=name: codes.update(
                    {name: layer.weight.rowwise.data.clone()}
                )
            )


def check_runs_of(run, model, rig):
    """Each run has one all-reduce and fresh bytes, though the root's forward does not run."""
    codes_by_name = {}
    watch_fp8(model, codes_by_name)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        codes_by_name.clear()
        weights = full_weights(model)
        with Collectives() as forward:
            y = run(batch(rig))
        assert len(reduces(forward)) == 1, forward.calls
        with Collectives() as back:
            y.sum().backward()
        assert reduces(back) == []
        assert codes_by_name
        for name, codes in codes_by_name.items():
            assert same_bytes(codes, expected(weights[name])[0]), name
        optimizer.step()


@ranks(2)
def test_a_converted_list_of_blocks_has_one_all_reduce_per_forward(rig):
    """A ModuleList has no forward. The optimizer's writes make its scales stale."""
    model = make(UNEVEN, recipe=None, device=rig.device)
    fp8rs.convert_to_float8_training(model.blocks, recipe="current")
    shard(model, rig)
    check_runs_of(model, model, rig)


@ranks(2)
def test_training_through_another_method_has_one_all_reduce_per_forward(rig):
    class Encoder(Stack):
        def encode(self, x):
            return self.head(self.blocks[0](x))

    torch.manual_seed(0)
    model = Encoder().to(rig.device)
    fp8rs.convert_to_float8_training(model, recipe="current")
    shard(model, rig)
    register_fsdp_forward_method(model, "encode")
    check_runs_of(model.encode, model, rig)


@ranks(2)
def test_an_early_unshard_changes_nothing(rig):
    results = []
    for early in (True, False):
        model = make(UNEVEN, device=rig.device)
        for block in model.blocks:
            fully_shard(block, mesh=rig.mesh())
            if early:
                block.unshard()
                block.reshard()
        y = model(batch(rig))
        y.square().sum().backward()
        gradients = {
            n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)()
            for n, p in model.named_parameters()
        }
        results.append({"y": y.detach(), **gradients})
    assert results[0].keys() == results[1].keys()
    for name, value in results[1].items():
        assert value.any() and torch.equal(results[0][name], value), name


def live_bytes(device):
    """Bytes of all uint8 tensors that live, apart from those that FSDP2 has freed."""
    gc.collect()
    storages = {}
    for t in gc.get_objects():
        if type(t) is torch.Tensor and t.dtype == torch.uint8 and t.device.type == device.type:
            storage = t.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def falls_below(limit, device):
    """Wait until `live_bytes` is below a limit.

    gloo's threads release buffers after a collective.
    """
    for _ in range(100):
        if live_bytes(device) < limit:
            return True
        time.sleep(0.02)
    return False


@ranks(1, 2)
@recipes
def test_no_codes_are_kept_between_all_gathers(rig, recipe):
    before = live_bytes(rig.device)
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)
    for _ in range(2):
        model(batch(rig)).sum().backward()
        for block in model.blocks:
            block.unshard()
            block.reshard()
        weights = sum(layer.weight.numel() for layer in linears(model).values())
        assert falls_below(before + weights / 8, rig.device)


class Launches(TorchDispatchMode):
    """Counts the operators that cast lists of shards."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("fp8rs::multi_quantize"):
            self.sizes.append(len(args[0]))
        return func(*args, **(kwargs or {}))


@ranks(1, 2)
@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_shards_that_are_gathered_together_are_cast_in_one_launch(rig, recipe):
    model = make(UNEVEN, recipe=recipe, device=rig.device)
    shard(model, rig)
    for _ in range(3):
        with Launches() as forward:
            y = model(batch(rig))
        with Launches() as backward:
            y.sum().backward()
        assert sorted(forward.sizes) == [1, 2, 2]
        assert backward.sizes == [], "the codes of the forward are kept"


def layers_with_codes(model):
    """The names of the layers whose codes are kept for a backward."""
    return [name for name, layer in linears(model).items() if keeps_codes(layer)]


@ranks(1, 2)
@recipes
def test_codes_are_kept_from_a_training_forward_to_its_backward(rig, recipe):
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)
    resharded = [name for name in linears(model) if name.startswith("blocks")]
    with torch.no_grad():
        model(batch(rig))
    assert layers_with_codes(model) == []
    y = model(batch(rig))
    assert layers_with_codes(model) == resharded, "the root's weights remain gathered"
    y.sum().backward()
    assert layers_with_codes(model) == []
    model(batch(rig))
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    assert layers_with_codes(model) == [], "the optimizer writes to the weights"
    for block in model.blocks:
        block.set_reshard_after_forward(False)
    model(batch(rig))
    assert layers_with_codes(model) == [], "no backward gathers them again"


@ranks(1, 2)
def test_planes_of_a_gathered_weight_may_be_added(rig):
    model = make(UNEVEN, recipe="block", device=rig.device)
    shard(model, rig)
    block = model.blocks[0]
    block.unshard()
    before = block.up.weight.dequantize()
    block.up.weight.update_usage(columnwise=True)
    block.reshard()
    block.unshard()
    assert same_bytes(block.up.weight.dequantize(), before)


@ranks(1, 2)
def test_a_step_within_a_backward_keeps_the_codes_of_other_layers(rig):
    model = make((32, 32, 32, 32), recipe="delayed", device=rig.device)
    shard(model, rig)
    for parameter in model.parameters():
        step = torch.optim.SGD([parameter], lr=1e-2).step
        parameter.register_post_accumulate_grad_hook(lambda _, step=step: step())
    y = model(batch(rig))
    with Launches() as backward:
        y.sum().backward()
    assert backward.sizes == []


@ranks(1, 2)
@recipes
def test_an_unshard_between_forward_and_backward_casts_the_current_values(rig, recipe):
    """The kept codes may be older: no operator shows this write."""
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)
    y = model(batch(rig))
    block = model.blocks[0]
    planes = []
    for factor in (1.0, -0.5):
        local_of(block.up.weight).high_precision.mul_(factor)
        block.unshard()
        planes.append(block.up.weight.rowwise.map(torch.clone))
        block.reshard()
    assert not same_bytes(planes[0].data, planes[1].data)
    y.sum().backward()
    assert layers_with_codes(model) == []


@ranks(2)
@recipes
def test_a_weight_that_is_cast_again_in_a_backward_leaves_nothing(rig, recipe):
    model = make(UNEVEN, recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)
    y = model(batch(rig))
    with torch.no_grad():
        local_of(model.blocks[1].down.weight).mul_(0.5)
    y.sum().backward()
    for layer in linears(model).values():
        assert not has_prepared_codes(layer)
    assert layers_with_codes(model) == []


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
    weights = full_weights(model)
    count = []

    def check(name, weight):
        assert same_bytes(weight.rowwise.data, expected(weights[name])[0])
        count.append(name)

    watch_weights(model, check)
    model(batch(rig)).sum().backward()
    assert len(count) == 2 * len(weights)


@ranks(2)
@recipes
def test_the_copy_of_an_offloaded_shard_is_cast(rig, recipe):
    """FSDP2 copies an offloaded shard to the device and calls the copy's hook."""
    model = make((256, 256), recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)
    weight = model.blocks[0].up.weight
    inputs = gathered_bytes(model.blocks[0].up)
    copied = local_of(weight).detach().clone()
    copied.high_precision.neg_()
    negated, _ = copied.fsdp_pre_all_gather(weight.device_mesh)
    codes, copied_codes = (t[0].view(torch.float8_e4m3fn).float() for t in (inputs, negated))
    assert torch.equal(codes, -copied_codes)
    for a, b in zip(inputs[1:2], negated[1:2], strict=True):
        assert torch.equal(a, b)


# --- delayed scaling -----------------------------------------------------------------------------


@ranks(2)
def test_a_layer_that_never_runs_gets_a_history(rig):
    class Part(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.stack = make(UNEVEN, recipe=None)

        def forward(self, x):
            return self.stack.blocks[0](x)

    model = Part().to(rig.device)
    fp8rs.convert_to_float8_training(model, recipe="delayed")
    shard(model.stack, rig)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for n in range(4):
        with Collectives() as forward:
            y = model(batch(rig))
        assert len(reduces(forward)) == (1 if n < 2 else 0), n
        y.sum().backward()
        optimizer.step()
    unused = model.stack.blocks[1].up
    weight = full_weights(model)["stack.blocks.1.up"]
    assert unused.fp8_scale[0, 0] == expected(weight)[1]


@ranks(2)
def test_amaxes_of_an_evaluation_are_recorded_when_a_layer_trains(rig):
    """No forward of the root comes between them."""
    model = make(UNEVEN, recipe="delayed", device=rig.device)
    shard(model, rig)
    block = model.blocks[0]
    model.eval()
    with torch.no_grad():
        block(batch(rig))
    block.reshard()
    assert not block.up.fp8_amax[0, 0].any()
    block.train()
    block(batch(rig)).sum().backward()
    rows = local_of(block.up.weight).high_precision
    assert block.up.fp8_amax[0, 0] >= rows.abs().amax()


@ranks(2)
@shardings
@recipes
def test_backward_gathers_the_same_bytes_again(rig, hidden, recipe):
    model = make(HIDDEN[hidden], recipe=RECIPES[recipe], device=rig.device)
    shard(model, rig)
    gathered_weights = {}
    block = model.blocks[0]
    watch_weights(model, lambda name, w: gathered_weights.update({name: w.rowwise.data.clone()}))
    backward_codes = []
    block.down.register_full_backward_pre_hook(
        lambda module, grads: backward_codes.append(module.weight.rowwise.data.clone())
    )
    model(batch(rig)).sum().backward()
    assert len(backward_codes) == 1
    assert same_bytes(backward_codes[0], gathered_weights["blocks.0.down"])


@ranks(2)
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_modules_that_are_sharded_together_are_one_unit(rig, fp8_weights):
    """FSDP2 gives them one group. Each shard is cast, and its scale synchronized, once."""
    reference, model = (make(UNEVEN, device=rig.device, fp8_weights=fp8_weights) for _ in range(2))
    shard(reference, rig)
    fully_shard([model.blocks[0], model.blocks[1]], mesh=rig.mesh())
    fully_shard(model, mesh=rig.mesh())
    for step in range(2):
        for module in (reference, model):
            if rig.rank == 0:
                with torch.no_grad():
                    module.blocks[0].up.weight.to_local()[:1].mul_(3)
        assert torch.equal(reference(batch(rig, step)), model(batch(rig, step)))
    assert len(units_of(model)) == len({id(unit) for unit in units_of(model)}) == 2


@ranks(1)
def test_a_moved_model_keeps_no_shard_in_its_old_memory(rig):
    model = shard(make(UNEVEN, device=rig.device), rig)
    model(batch(rig)).sum().backward()
    old = weakref.ref(local_of(model.blocks[0].up.weight).high_precision)
    model._apply(torch.clone)
    gc.collect()
    assert old() is None
