"""FP8 gathers over tensor-parallel ranks: their bytes, and the results of layers."""

import copy
import math
import warnings

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    parallelize_module,
)

import cases
import fp8rs
from distributed import ranks
from distributed.collectives import Collectives
from distributed.models import same_bytes
from fp8rs.gemm import estimates
from fp8rs.model import gemm_choice
from fp8rs.model.linear_spec import GRAD, INPUT
from fp8rs.optim import AdamW
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.recipes import resolve_recipe
from fp8rs.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from fp8rs.tensor_parallel.gather import Operand, gather_input, gathered
from internals import state_of, storage_of
from tensor_parallel.blocks import (
    RECIPES,
    SEQUENCE,
    WIDTH,
    Block,
    both_weights,
    converted,
    every_recipe,
    plan,
    run,
    tokens,
)


def spec_of(recipe, role):
    return Operand(converted_key(recipe), role, True).spec(torch.device("cpu"))


def converted_key(recipe):
    return state_of(
        fp8rs.convert_to_float8_training(
            nn.Sequential(nn.Linear(WIDTH, WIDTH)), recipe=RECIPES[recipe]
        )[0]
    ).key


# --- bytes ---------------------------------------------------------------------------------------


@ranks(2, 4)
@every_recipe
@pytest.mark.parametrize("role", [INPUT, GRAD], ids=["input", "grad"])
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("length", [8, 7, 3], ids=["even", "uneven", "empty"])
def test_gathered_bytes_equal_the_quantized_whole(rig, recipe, role, dim, length):
    shape = [3, 3, 160]
    shape[dim] = length
    torch.manual_seed(0)
    values = torch.randn(shape, dtype=torch.bfloat16).to(rig.device)
    values.select(dim, 0).mul_(50)  # the largest value is on one rank
    key = converted_key(recipe)
    delayed = ()
    if resolve_recipe(RECIPES[recipe]).delayed:
        delayed = torch.zeros((), device=rig.device), torch.zeros((), device=rig.device)
    operand = Operand(key, role, True, *delayed)
    out = gathered(distribute_tensor(values, rig.mesh(), [Shard(dim)]), operand)
    assert out.placements == (Replicate(),)
    actual = out.to_local()
    spec = operand.spec(rig.device)
    expected, _ = quantize_planes(spec, values, True, False)
    assert same_bytes(actual.rowwise.data, expected.data)
    assert same_bytes(actual.rowwise.scale, expected.scale)
    if spec.format.square:
        assert same_bytes(actual.columnwise.data, expected.data.flatten(0, -2).t().contiguous())
    else:  # quantized from the dequantized codes
        _, column = quantize_planes(spec, expected.dequantize(values.dtype), False, True)
        assert same_bytes(actual.columnwise.data, column.data)
        assert same_bytes(actual.columnwise.scale, column.scale)


@ranks(2)
@pytest.mark.parametrize("role", [INPUT, GRAD], ids=["input", "grad"])
def test_non_finite_values_on_one_rank_give_a_nan_scale(rig, role):
    """With delayed scaling, nothing is reduced, and each rank records the amax of its rows."""
    values = torch.arange(1.0, 65.0).view(4, 16).to(rig.device)
    for bad in (False, True):
        if bad:
            values[3, 3] = float("inf")
        x = distribute_tensor(values, rig.mesh(), [Shard(0)])
        scale, amax = (torch.full((), v, device=rig.device) for v in (0.5, 0.0))
        operand = Operand(converted_key("delayed"), role, False, scale, amax, ready=True)
        with Collectives() as collectives:
            gathered_x = gathered(x, operand).to_local()
        assert [c.kind for c in collectives.calls] == ["gather", "gather"]
        assert [c.nbytes for c in collectives.calls] == [64, 4 * rig.world_size]
        if not bad:
            assert gathered_x.rowwise.scale == 0.5
            assert amax == (32 if rig.rank == 0 else 64)
        else:
            assert gathered_x.rowwise.scale.isnan()
            assert amax == (32 if rig.rank == 0 else 0)
        assert storage_of(gathered_x).delayed[1] is amax


@ranks(2, 4)
@every_recipe
def test_a_gradient_is_reduced_in_its_own_dtype(rig, recipe):
    torch.manual_seed(0)
    values = torch.randn(2, 8, WIDTH, dtype=torch.bfloat16).to(rig.device)
    x = distribute_tensor(values, rig.mesh(), [Shard(1)]).requires_grad_()
    slots = ()
    if resolve_recipe(RECIPES[recipe]).delayed:
        slots = torch.ones((), device=rig.device), torch.zeros((), device=rig.device)
    out = gather_input(x, Operand(converted_key(recipe), INPUT, True, *slots))
    parts = torch.full_like(values, rig.rank + 1.0)
    from torch.distributed.tensor import Partial

    with Collectives() as collectives:
        out.backward(DTensor.from_local(parts, rig.mesh(), [Partial()], run_check=False))
    assert [(c.kind, c.dtype) for c in collectives.calls] == [("scatter", torch.bfloat16)]
    total = rig.world_size * (rig.world_size + 1) / 2
    assert torch.equal(x.grad.full_tensor(), torch.full_like(values, total))


def gathers(recipe, role, rows, width, world):
    """Return the gathered bytes of each tensor, by the table in docs/tensor-parallel.md."""
    format = spec_of(recipe, role).format
    if resolve_recipe(RECIPES[recipe]).delayed:
        return [rows * width, 4 * world]
    if format.per_tensor:
        return [rows * width]
    blocks = 1 if format.per_row else math.ceil(width / format.block[1])
    return [rows * width, rows * blocks * format.scale_dtype.itemsize]


@ranks(2, 4, cuda=False)  # on GPUs, MXFP8 may have one scale per row
@every_recipe
def test_q_k_and_v_share_one_gather(rig, recipe):
    model = converted(recipe, rig)
    parallelize_module(model, rig.mesh(names=("tp",)), plan())
    x = distribute_tensor(tokens(rig, 8), rig.mesh(names=("tp",)), [Shard(SEQUENCE)])
    with Collectives() as forward:
        y = model(x)
    with Collectives() as backward:
        y.to_local().square().sum().backward()
    rows = 2 * 8
    world = rig.world_size
    values = rows * WIDTH * 4  # fp32

    def of(collectives, kind):
        return [c.nbytes for c in collectives.calls if c.kind == kind]

    per_tensor = spec_of(recipe, INPUT).format.per_tensor
    if resolve_recipe(RECIPES[recipe]).high_precision_gemms:
        assert of(forward, "gather") == [values]  # wgrad reads the input
    else:
        assert of(forward, "gather") == gathers(recipe, INPUT, rows, WIDTH, world)
    assert of(forward, "reduce") == [4] * per_tensor  # with delayed scaling, for the first scale
    assert of(forward, "scatter") == [values]
    if spec_of(recipe, GRAD).format.per_row:
        assert of(backward, "gather") == [values]
    else:
        assert of(backward, "gather") == gathers(recipe, GRAD, rows, WIDTH, world)
    assert of(backward, "scatter") == [values], "one for q, k and v"
    # The gradients of norm and biases are partial sums over the rank's tokens.
    assert of(backward, "reduce") == [4] * per_tensor


@ranks(2)
@pytest.mark.parametrize("gemm", ["forward", "dgrad", "wgrad"])
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_an_operand_of_a_gemm_in_high_precision_is_gathered_in_its_dtype(rig, gemm, trained):
    torch.manual_seed(0)
    model = Block().to(rig.device)
    recipe = fp8rs.Float8CurrentScaling(high_precision_gemms=(gemm,))
    fp8rs.convert_to_float8_training(model, recipe=recipe)
    model.mixer.requires_grad_(trained)
    mesh = rig.mesh(names=("tp",))
    parallelize_module(model, mesh, plan())
    x = distribute_tensor(tokens(rig, 8), mesh, [Shard(SEQUENCE)])
    with Collectives() as forward:
        y = model(x)
    with Collectives() as backward:
        y.to_local().square().sum().backward()
    elements = 2 * 8 * WIDTH
    exact_wgrad = trained and gemm == "wgrad"
    for collectives, in_fp32 in (
        (forward, exact_wgrad or gemm == "forward"),
        (backward, exact_wgrad or gemm == "dgrad"),
    ):
        gathered_bytes = [c.nbytes for c in collectives.calls if c.kind == "gather"]
        assert gathered_bytes == [elements * (4 if in_fp32 else 1)]


@ranks(2, 3)
@both_weights
def test_rowwise_with_gw_hp_has_the_bytes_of_one_process(rig, fp8_weights):
    """Rows have scales of their own, and wgrad of a column-parallel layer reads whole tokens."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(WIDTH, 96, bias=False)).to(rig.device)
    fp8rs.convert_to_float8_training(
        reference, recipe="rowwise_with_gw_hp", fp8_weights=fp8_weights
    )
    split = copy.deepcopy(reference)
    mesh = rig.mesh(names=("tp",))
    style = Float8ColwiseParallel(input_layouts=Shard(0), use_local_output=False)
    parallelize_module(split, mesh, {"0": style})
    x = tokens(rig, 6)[0]
    dy = torch.randn(6, 96, generator=torch.Generator().manual_seed(1)).to(rig.device)
    y = reference(x)
    y.backward(dy)
    split_y = split(x.tensor_split(rig.world_size)[rig.rank])
    split_y.backward(distribute_tensor(dy, mesh, [Shard(1)]))
    assert torch.equal(split_y.full_tensor(), y)
    torch.testing.assert_close(split[0].weight.grad.full_tensor(), reference[0].weight.grad)
    torch.testing.assert_close(reference[0].weight.grad, dy.t() @ x)


# --- results -------------------------------------------------------------------------------------


@ranks(2, 4)
@every_recipe
@both_weights
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "replicated"])
@pytest.mark.parametrize("length", [8, 7], ids=["even", "uneven"])
def test_parallel_block_equals_one_process(rig, recipe, fp8_weights, sequence, length):
    if not sequence and length == 7:
        length = 5
    reference = converted(recipe, rig, fp8_weights=fp8_weights)
    plain = Block().to(rig.device)
    with torch.no_grad():
        for p, value in zip(plain.parameters(), reference.parameters(), strict=True):
            p.copy_(value.dequantize() if isinstance(value, fp8rs.QuantizedTensor) else value)
    split = copy.deepcopy(reference)
    mesh = rig.mesh(names=("tp",))
    parallelize_module(split, mesh, plan(sequence))
    x = tokens(rig, length)
    local_x = distribute_tensor(x, mesh, [Shard(SEQUENCE)]) if sequence else x
    exact = run(plain, x)
    single = run(reference, x)
    several = run(split, local_x)
    for name, value in exact.items():
        allowed = (single[name] - value).norm()
        error = (several[name] - value).norm()
        # With scales per row or block, the operands of wgrad are rounded twice.
        assert error < 1.25 * allowed + 0.01 * value.norm(), (name, error, allowed)


@ranks(2)
@every_recipe
@both_weights
def test_training_equals_one_process(rig, recipe, fp8_weights):
    """Training uses histories, which are equal on all ranks."""
    batches = [tokens(rig, 8, seed) for seed in range(5)]
    mesh = rig.mesh(names=("tp",))
    losses = []
    for split in (False, True):
        model = converted(recipe, rig, fp8_weights=fp8_weights)
        if split:
            parallelize_module(model, mesh, plan())
        optimizer = AdamW(model.parameters(), lr=3e-3)
        step_losses = []
        for batch in batches * 2:
            x = distribute_tensor(batch, mesh, [Shard(SEQUENCE)]) if split else batch
            y = model(x)
            y = y.full_tensor() if split else y
            loss = (y - batch.roll(1, -1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step_losses.append(loss.item())
        losses.append(step_losses)
    torch.testing.assert_close(*losses, rtol=0.02, atol=0.0)
    assert losses[1][-1] < 0.9 * losses[1][0]
    if recipe == "delayed":
        for layer in (model.mixer.wq, model.mixer.wk, model.mixer.wv):
            assert all(layer.fp8_ready)
            assert torch.equal(layer.fp8_scale[1], model.mixer.wq.fp8_scale[1])
        for buffer in (model.mixer.wq.fp8_scale, model.mixer.wo.fp8_amax_history):
            every = [torch.empty_like(buffer) for _ in range(rig.world_size)]
            torch.distributed.all_gather(every, buffer.contiguous())
            assert torch.equal(every[0], every[1])


@ranks(2)
@cases.each_recipe("delayed", "rowwise", of=RECIPES)
@both_weights
def test_compiled_blocks_equal_eager(rig, recipe, fp8_weights):
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
    # Both save inputs, as compiled layers do by default.
    options = {"fp8_weights": fp8_weights}
    mesh = rig.mesh(names=("tp",))
    results = []
    for backend in (None, "aot_eager"):
        dynamo.reset()
        model = converted(recipe, rig, **options)
        parallelize_module(model, mesh, plan())
        if backend is not None:
            model.compile(backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        tensors = []
        for n in range(4 if recipe == "delayed" else 2):
            x = distribute_tensor(tokens(rig, 8, n), mesh, [Shard(SEQUENCE)])
            model(x).to_local().square().mean().backward()
            tensors += [p.grad.to_local().clone() for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        results.append(tensors)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    dynamo.reset()


@ranks(4)
@every_recipe
@both_weights
def test_fsdp_over_tensor_parallelism_trains(rig, recipe, fp8_weights):
    """A 2x2 mesh with fp8rs.optim.AdamW computes what one process does on the whole batch."""
    mesh = rig.mesh(2, 2, names=("data", "tensor"))
    losses = []
    for split in (False, True):
        model = converted(recipe, rig, fp8_weights=fp8_weights)
        if split:
            parallelize_module(model, mesh["tensor"], plan())
            fully_shard(model, mesh=mesh["data"])
        optimizer = AdamW(model.parameters(), lr=3e-3)
        step_losses = []
        for n in range(4):
            batch = tokens(rig, 6, n)
            part = batch
            if split:
                part = batch.chunk(2)[mesh["data"].get_local_rank()]
                part = distribute_tensor(part, mesh["tensor"], [Shard(SEQUENCE)])
            y = model(part)
            target = batch.roll(1, -1)
            if split:
                y = y.full_tensor()
                target = target.chunk(2)[mesh["data"].get_local_rank()]
            loss = (y - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            if split:
                torch.distributed.all_reduce(loss, group=mesh["data"].get_group())
                loss /= 2
            step_losses.append(loss.item())
        losses.append(step_losses)
    torch.testing.assert_close(*losses, rtol=0.03, atol=0.0)


@ranks(2)
def test_copies_quantize_with_their_own_scales(rig):
    """A copied module shares the hooks of the original."""
    mesh = rig.mesh(names=("tp",))
    model = parallelize_module(converted("delayed", rig), mesh, plan())
    other = copy.deepcopy(model)
    other(distribute_tensor(tokens(rig, 8), mesh, [Shard(SEQUENCE)]))
    assert not model.mixer.wq.fp8_amax.any()
    assert other.mixer.wq.fp8_amax[1, 0] == other.mixer.wv.fp8_amax[1, 0] > 0
    assert model.mixer.wo.fp8_amax.sum() == 0


# --- refusals ------------------------------------------------------------------------------------


@ranks(2)
def test_unsupported_placements_are_refused(rig):
    mesh = rig.mesh(names=("tp",))
    x = torch.randn(4, WIDTH // 2)

    def layer(style, recipe="current"):
        model = fp8rs.convert_to_float8_training(
            nn.Sequential(nn.Linear(WIDTH, WIDTH)), recipe=recipe
        )
        return parallelize_module(model, mesh, {"0": style})

    with pytest.raises(fp8rs.UnsupportedError, match=r"placement S.*any dimension but the last"):
        layer(Float8ColwiseParallel(input_layouts=Shard(-1)))(x)
    with pytest.raises(fp8rs.UnsupportedError, match=r"Shard\(-1\) and Replicate"):
        layer(Float8RowwiseParallel(input_layouts=Shard(0)))(torch.randn(4, WIDTH))
    with pytest.raises(fp8rs.UnsupportedError, match="without wgrad_input_block"):
        layer(
            Float8ColwiseParallel(input_layouts=Shard(0)),
            fp8rs.Float8BlockScaling(wgrad_input_block=(128, 128)),
        )(torch.randn(4, WIDTH))
    with pytest.raises(ValueError, match="requires a converted layer"):
        parallelize_module(nn.Linear(4, 4), mesh, Float8ColwiseParallel())
    with pytest.raises(ValueError, match="float8_dtype"):
        PrepareFloat8ModuleInput(float8_dtype=torch.float8_e5m2)
    placed = {"input_layouts": Shard(0), "desired_input_layouts": Replicate()}
    with pytest.raises(ValueError, match="one recipe"):
        parallelize_module(nn.Linear(4, 4), mesh, PrepareFloat8ModuleInput(**placed))


# --- gemms="auto" --------------------------------------------------------------------------------


@ranks(2)
@both_weights
@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "mxfp8"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_few_tokens_are_gathered_and_multiplied_in_high_precision(
    rig, recipe, fp8_weights, compiled
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimates, "MEASURED_DEVICES", ("cpu", "cuda"))
        patch.setattr(gemm_choice, "min_tokens", lambda *args: 21)
        model = converted(recipe, rig, fp8_weights=fp8_weights)
        expected = copy.deepcopy(model)
        expected = run(fp8rs.convert_to_high_precision(expected), tokens(rig))

        mesh = rig.mesh(names=("tensor",))
        parallelize_module(model, mesh, plan())
        if compiled:
            dynamo.reset()
            model.compile(backend="aot_eager", fullgraph=True)
        x = distribute_tensor(tokens(rig), mesh, [Shard(SEQUENCE)])
        if compiled:  # a mode would disable the compiler
            actual = run(model, x)
        else:
            with Collectives() as collectives:
                actual = run(model, x)
            assert {c.dtype for c in collectives.calls} == {
                torch.float32
            }  # no codes, and no amaxes
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-4, atol=1e-5)
