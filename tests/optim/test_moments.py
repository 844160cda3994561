"""fp8rs.optim.AdamW with 8-bit moments, compared with float32 steps of the stored moments."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import fp8rs
from fp8rs.optim import AdamW, moments
from optim.weights import (
    E4M3,
    QUANTIZERS,
    assert_same,
    bytes_of,
    each_format,
    each_quantizer,
    every,
    everything,
    fp8_adamw,
    normal,
    parameter,
    train,
)

ops = torch.ops.fp8rs

#: Rows of whole blocks: several blocks, one block, one row, empty shapes, and three dimensions.
SHAPES = [(70, 384), (33, 128), (1, 256), (0, 128), (3, 40, 256)]

with_and_without_masters = pytest.mark.parametrize("masters", [True, False])
each_moment = pytest.mark.parametrize("name", moments.MOMENT_KEYS)


def stored(values, name):
    """Return values after they were stored as codes."""
    return moments.decode(*moments.encode(values, moments.FORMATS[name]), moments.FORMATS[name])


def stepped(grad, m=None, v=None, *, beta1=0.0, beta2=0.0):
    """Run the kernel on moments. With betas of 0, they become the gradient and its square."""
    codes = []
    ranges = []
    for values, name in zip((m, v), moments.MOMENT_KEYS, strict=True):
        values = torch.zeros_like(grad) if values is None else values
        new_codes, new_ranges = moments.encode(values, moments.FORMATS[name])
        codes.append(new_codes)
        ranges.append(new_ranges)
    param = torch.zeros_like(grad)
    ops.adamw_(
        [grad], [codes[0]], [codes[1]], [param], [], [torch.tensor(1.0)], [], [], [],
        [r.flatten(-2) for r in ranges[:1]], [r.flatten(-2) for r in ranges[1:]], [0], [0],
        lr=0.0, beta1=beta1, beta2=beta2, eps=1e-8, weight_decay=0.0, maximize=False, seed=None,
        block=[],
    )  # fmt: skip
    return codes, ranges


def blocks_of_every_kind(seed=0):
    """Return rows of one block each: many scales, zeros, constants, single values, subnormals."""
    rows = [normal((128,), seed + i) * 10.0**i for i in range(-30, 15)]
    rows.append(torch.zeros(128))
    rows.append(torch.full((128,), -3.3))
    rows += [torch.zeros(128).index_fill(0, torch.tensor([i]), 7e-41) for i in (0, 127)]
    rows += [normal((128,), seed + i) * torch.exp(8 * normal((128,), i)) for i in range(20)]
    rows.append(torch.arange(128) * 1e-45)
    rows.append(torch.cat((normal((64,), 3), torch.zeros(64))))
    return torch.stack(rows).float()


# --- codes --------------------------------------------------------------------------------------


def test_torch_encodes_as_the_kernel_does():
    grad = blocks_of_every_kind()
    codes, ranges = stepped(grad)
    for values, name, code, range_ in zip(
        (grad, grad * grad), moments.MOMENT_KEYS, codes, ranges, strict=True
    ):
        want_codes, want_ranges = moments.encode(values, moments.FORMATS[name])
        assert torch.equal(code, want_codes)
        assert torch.equal(range_.view(torch.int32), want_ranges.view(torch.int32))


def test_torch_decodes_as_the_kernel_does():
    """Steps of a gradient of 0 scale the decoded moments, exactly for betas of 0.5."""
    m = blocks_of_every_kind()
    v = blocks_of_every_kind(50).abs()
    zeros = torch.zeros_like(m)
    codes, ranges = stepped(zeros, m, v, beta1=0.75, beta2=0.5)
    first = stored(m, "exp_avg")
    first = first + (0 - first) * 0.25
    second = stored(v, "exp_avg_sq") * 0.5
    for values, name, code, range_ in zip(
        (first, second), moments.MOMENT_KEYS, codes, ranges, strict=True
    ):
        want_codes, want_ranges = moments.encode(values, moments.FORMATS[name])
        assert torch.equal(code, want_codes)
        assert torch.equal(range_, want_ranges)


@each_moment
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_block_with_a_value_that_is_not_finite_becomes_nan(name, value):
    values = normal((2, 256), 1).abs()
    values[0, 5] = abs(value) if name == "exp_avg_sq" else value
    values[0, 7] = 0.0
    moments = stored(values, name)
    assert moments[0, :128].isnan().all()
    assert moments[0, 128:].isfinite().all() and moments[1].isfinite().all()


def test_an_update_after_a_gradient_that_is_not_finite_is_nan_in_its_block():
    weight = parameter(normal((4, 256), 1))
    optimizer = fp8_adamw([weight])
    train(optimizer, 2)
    grad = normal((4, 256), 5)
    grad[1, 130] = math.inf
    weight.grad = grad
    optimizer.step()
    assert weight.isnan().sum() == 1
    weight.grad = torch.zeros(4, 256)
    optimizer.step()
    assert weight[1, 128:].isnan().all()
    assert weight.isnan().sum() == 128


@each_moment
def test_codes_are_within_half_a_step_of_values(name):
    """The widest steps are 20 / 126 and 40 / 254 of a factor of two."""
    values = normal((64, 512), 1)
    values = values if name == "exp_avg" else values.square()
    relative = (stored(values, name) - values).abs() / values.abs()
    assert relative.max() < 0.08
    assert relative.mean() < 0.02


def test_second_moments_do_not_become_0():
    values = torch.full((1, 128), 1e-30)
    values[0, 0] = 1e8
    values[0, 1] = 0.0
    moments = stored(values, "exp_avg_sq")
    assert moments[0, 0] == values[0, 0] and moments[0, 1] == 0
    assert (moments[0, 2:] >= values[0, 2:]).all()
    assert (stored(values, "exp_avg")[0, 1:] == 0).all()


# --- steps --------------------------------------------------------------------------------------


def step_with_stored_moments(optimizer):
    """Replace an optimizer's float32 moments by those that codes would store."""
    for state in optimizer.state.values():
        for name in moments.MOMENT_KEYS:
            state[name].copy_(stored(state[name], name))


def assert_equal_moments(fp8, high_precision):
    for a, b in zip(fp8.state.values(), high_precision.state.values(), strict=True):
        for name in moments.MOMENT_KEYS:
            codes, ranges = moments.encode(b[name], moments.FORMATS[name])
            assert torch.equal(a[name + "_codes"], codes)
            assert torch.equal(a[name + "_range"], ranges)


@each_quantizer
@each_format
@with_and_without_masters
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_weights_equal_float32_steps_of_the_stored_moments(
    name, fp8_dtype, masters, stochastic, grad_dtype, shape
):
    optimizers = []
    for make in (fp8_adamw, AdamW):
        weight = parameter(QUANTIZERS[name](fp8_dtype, "cpu")(normal(shape, 1)))
        options = {"master_weights": masters, "stochastic_rounding": stochastic}
        optimizers.append(make([weight], lr=3e-2, **options))
    for step in range(3):
        for optimizer in optimizers:
            train(optimizer, 1, grad_dtype, step)
        a, b = (optimizer.param_groups[0]["params"][0] for optimizer in optimizers)
        assert_same(bytes_of(a), bytes_of(b))
        assert_equal_moments(*optimizers)
        step_with_stored_moments(optimizers[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@with_and_without_masters
def test_plain_parameters_equal_float32_steps_of_the_stored_moments(dtype, masters):
    optimizers = []
    for make in (fp8_adamw, AdamW):
        params = [parameter(normal(shape, i).to(dtype)) for i, shape in enumerate(SHAPES)]
        optimizers.append(make(params, lr=3e-2, master_weights=masters))
    for step in range(3):
        for optimizer in optimizers:
            train(optimizer, 1, seed=step)
        params = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
        assert_same(bytes_of(*params[0]), bytes_of(*params[1]))
        assert_equal_moments(*optimizers)
        step_with_stored_moments(optimizers[1])


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x.t().contiguous().t(),
        lambda x: torch.zeros(66, 512, dtype=x.dtype)[:, ::2].copy_(x),
    ],
    ids=["transposed", "with gaps"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_do_not_change_the_blocks(make, dtype):
    values = normal((66, 256), 1).to(dtype)
    strided = parameter(make(values.clone()))
    dense = parameter(values)
    assert not strided.is_contiguous()
    a = fp8_adamw([strided])
    b = fp8_adamw([dense])
    train(a, 3)
    train(b, 3)
    assert torch.equal(strided, dense)
    for key in moments.CODE_KEYS:
        assert torch.equal(a.state[strided][key], b.state[dense][key])


def test_codes_and_high_precision_moments_step_together():
    """A group has its own state_dtype, and other parameters keep float32 moments."""

    def make():
        shapes = [(64, 128), (64, 128), (32, 100), (128,)]
        return [parameter(normal(shape, i)) for i, shape in enumerate(shapes)]

    together = make()
    alone = make()
    groups = [
        {"params": together[:1], "state_dtype": torch.bfloat16},
        {"params": together[1:], "state_dtype": "fp8"},
    ]
    optimizer = AdamW(groups, state_filter=every)
    train(optimizer, 2)
    state = [optimizer.state[p] for p in together]
    assert state[0]["exp_avg"].dtype == torch.bfloat16
    assert state[1].keys() == {"step", *moments.CODE_KEYS}
    assert state[2]["exp_avg"].dtype == state[3]["exp_avg"].dtype == torch.float32

    singles = [
        AdamW([alone[0]], state_dtype=torch.bfloat16),
        fp8_adamw([alone[1]]),
        AdamW([alone[2]]),
        AdamW([alone[3]]),
    ]
    for step in range(2):
        for i, single in enumerate(singles):
            alone[i].grad = normal(alone[i].shape, 100 * step + i)
            single.step()
    assert_same(bytes_of(*together), bytes_of(*alone))


@with_and_without_masters
@each_quantizer
def test_fp8_weights_with_both_kinds_of_moments_step_together(name, masters):
    """In a group with 8-bit moments, a weight whose rows are not whole blocks keeps float32."""

    def make():
        params = []
        for i, shape in enumerate([(64, 128), (32, 100), (64, 256)]):
            quantize = QUANTIZERS[name](E4M3, "cpu")
            params.append(parameter(quantize(normal(shape, i))))
        return params

    options = {"master_weights": masters, "stochastic_rounding": False, "lr": 1e-2}
    together = make()
    alone = make()
    train(fp8_adamw(together, **options), 2)
    for i, (param, adamw) in enumerate(zip(alone, (fp8_adamw, AdamW, fp8_adamw), strict=True)):
        single = adamw([param], **options)
        for step in range(2):
            param.grad_dtype = torch.float32
            param.grad = normal(param.shape, 100 * step + i)
            single.step()
    assert_same(bytes_of(*together), bytes_of(*alone))


@pytest.mark.parametrize(
    ("block", "scale_dtype"),
    [((128, 128), torch.float32), ((32, 32), torch.float8_e8m0fnu), ((1, -1), torch.float32)],
)
def test_a_batch_steps_as_its_matrices_do(device, block, scale_dtype):
    """Experts: a batch (E, N, K), with blocks of each matrix."""
    shape = (3, 45, 256)
    values = normal(shape, 1).to(device)
    codes, scale, *_ = ops.quantize_blocks(values, E4M3, block, scale_dtype, batched=True)
    m_codes, m_ranges = moments.encode(normal(shape, 2).to(device), moments.FORMATS["exp_avg"])
    squares = normal(shape, 3).to(device).square()
    v_codes, v_ranges = moments.encode(squares, moments.FORMATS["exp_avg_sq"])
    tensors = [normal(shape, 4).to(device), m_codes, v_codes, codes, scale]
    tensors += [m_ranges.flatten(-2), v_ranges.flatten(-2)]

    def run(grad, m, v, codes, scale, m_ranges, v_ranges, offset, batched):
        ops.adamw_(
            [grad], [m], [v], [codes], [], [torch.ones((), device=device)], [scale], [], [],
            [m_ranges], [v_ranges], [offset], [0],
            lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, maximize=False, seed=1,
            block=block, batched=batched,
        )  # fmt: skip

    expected = [t.clone() for t in tensors]
    for i in range(shape[0]):
        run(*(t[i] for t in expected), i * 45 * 256, False)
    run(*tensors, 0, True)
    assert_same(bytes_of(*tensors), bytes_of(*expected))


@with_and_without_masters
def test_a_skipped_step_changes_no_byte(masters):
    params = [parameter(QUANTIZERS[n](E4M3, "cpu")(normal((64, 128), 1))) for n in QUANTIZERS]
    optimizer = fp8_adamw([*params, parameter(normal((64, 128), 2))], master_weights=masters)
    train(optimizer, 1)
    before = everything(optimizer)
    optimizer.grad_scale = torch.tensor(8.0)
    optimizer.found_inf = torch.ones(1)
    train(optimizer, 1, seed=1)
    assert_same(everything(optimizer), before)


# --- which parameters ---------------------------------------------------------------------------


def model_of(recipe="current", **options):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(64, 128), nn.Linear(128, 256), nn.LayerNorm(256), nn.Linear(256, 128)
    )
    model.append(nn.Linear(128, 16))  # 2048 elements
    if recipe is not None:
        fp8rs.convert_to_float8_training(model, recipe=recipe, **options)
    return model


def quantized(model, optimizer):
    """Return the names of the parameters whose moments are codes, after a step."""
    for param in model.parameters():
        param.grad = torch.ones(param.shape)
    optimizer.step()
    has_codes = [n for n, p in model.named_parameters() if "exp_avg_codes" in optimizer.state[p]]
    assert all(
        "exp_avg" in optimizer.state[p] or n in has_codes for n, p in model.named_parameters()
    )
    return has_codes


@pytest.mark.parametrize("fp8_weights", [False, True])
def test_weights_of_fp8_layers_have_codes(fp8_weights):
    model = model_of(fp8_weights=fp8_weights)
    optimizer = AdamW(model.parameters(), state_dtype="fp8")
    assert quantized(model, optimizer) == ["1.weight", "3.weight"]


def test_a_filter_selects_parameters():
    model = model_of()
    chosen = {model[0].weight, model[1].weight, model[1].bias, model[4].weight}
    optimizer = AdamW(model.parameters(), state_dtype="fp8", state_filter=lambda p: p in chosen)
    assert quantized(model, optimizer) == ["0.weight", "1.weight", "4.weight"]


def test_a_model_without_fp8_layers_warns_once():
    model = model_of(None)
    optimizer = AdamW(model.parameters(), state_dtype="fp8")
    with pytest.warns(UserWarning, match=r'"fp8", but all 9 parameters keep .* state_filter'):
        assert quantized(model, optimizer) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quantized(model, optimizer)


def test_an_optimizer_of_norms_and_biases_does_not_warn():
    model = model_of("current")
    vectors = [param for param in model.parameters() if param.ndim == 1]
    optimizer = AdamW(vectors, state_dtype="fp8")
    for param in vectors:
        param.grad = torch.ones(param.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert vectors


@pytest.mark.parametrize("value", ["fp16", torch.float8_e4m3fn, None])
def test_other_dtypes_are_refused(value):
    with pytest.raises(ValueError, match=r'state_dtype is .* torch.bfloat16 or "fp8"'):
        AdamW([parameter(torch.ones(2))], state_dtype=value)


# --- state dicts --------------------------------------------------------------------------------


def trained(make=fp8_adamw, steps=3, shape=(64, 256), **options):
    optimizer = make([parameter(normal(shape, 1)), parameter(normal((5,), 2))], lr=1e-2, **options)
    train(optimizer, steps)
    return optimizer


def test_a_state_dict_has_codes_and_ranges():
    state = trained().state_dict()["state"]
    assert state[0].keys() == {"step", *moments.CODE_KEYS}
    assert state[0]["exp_avg_codes"].dtype == torch.uint8
    assert state[0]["exp_avg_range"].shape == (64, 2, 2)
    assert state[1].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("masters", [True, False])
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path, masters):
    def make():
        weight = QUANTIZERS["32x32"](E4M3, "cpu")(normal((70, 256), 1))
        return fp8_adamw([parameter(weight)], lr=1e-2, master_weights=masters)

    reference = make()
    first = make()
    train(reference, 2)
    train(first, 2)
    torch.save((first.param_groups[0]["params"], first.state_dict()), tmp_path / "state.pt")
    params, state = torch.load(tmp_path / "state.pt", weights_only=False)
    resumed = fp8_adamw(params, lr=1e-2, master_weights=masters)
    resumed.load_state_dict(state)
    train(reference, 2, seed=5)
    train(resumed, 2, seed=5)
    assert_same(everything(resumed), everything(reference))


def test_a_copied_optimizer_keeps_its_filter():
    optimizer = trained()
    other = copy.deepcopy(optimizer)
    train(optimizer, 1, seed=3)
    train(other, 1, seed=3)
    assert_same(everything(other), everything(optimizer))
    other.add_param_group({"params": [parameter(normal((8, 128), 3))]})
    train(other, 1)
    assert "exp_avg_codes" in other.state[other.param_groups[1]["params"][0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda p, **options: torch.optim.AdamW(p, **options),
        AdamW,
        lambda p, **options: AdamW(p, state_dtype=torch.bfloat16, **options),
    ],
    ids=["torch", "float32", "bfloat16"],
)
def test_high_precision_moments_are_converted_when_they_are_loaded(make):
    theirs = trained(make)
    optimizer = trained(steps=0)
    optimizer.load_state_dict(theirs.state_dict())
    assert optimizer.param_groups[0]["state_dtype"] == "fp8"
    state, expected = (list(o.state.values()) for o in (optimizer, theirs))
    for name in moments.MOMENT_KEYS:
        codes, ranges = moments.encode(expected[0][name], moments.FORMATS[name])
        assert torch.equal(state[0][name + "_codes"], codes)
        assert torch.equal(state[0][name + "_range"], ranges)
        assert state[1][name].dtype == torch.float32
        assert torch.equal(state[1][name], expected[1][name].float())
    assert state[0]["step"] == 3
    train(optimizer, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_converted_when_a_high_precision_optimizer_loads_them(dtype):
    fp8 = trained()
    optimizer = trained(AdamW, steps=0, state_dtype=dtype)
    optimizer.load_state_dict(fp8.state_dict())
    assert optimizer.param_groups[0]["state_dtype"] == str(dtype).removeprefix("torch.")
    state, expected = (list(o.state.values()) for o in (optimizer, fp8))
    for name in moments.MOMENT_KEYS:
        values = moments.decode(
            expected[0][name + "_codes"], expected[0][name + "_range"], moments.FORMATS[name]
        )
        assert torch.equal(state[0][name], values.to(dtype))
        assert torch.equal(state[1][name], expected[1][name].to(dtype))
    assert state[0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    train(optimizer, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_of_torchs_adamw_get_the_dtype_of_the_optimizer(dtype):
    """They have the dtype of their parameter. A second moment in bfloat16 may never shrink."""
    params = [parameter(normal((8, 4), i).to(dtype)) for i in range(2)]
    theirs = torch.optim.AdamW(params)
    train(theirs, 2, dtype)
    for state_dtype in (torch.float32, torch.bfloat16):
        optimizer = AdamW(params, state_dtype=state_dtype)
        optimizer.load_state_dict(theirs.state_dict())
        for param in params:
            for name in moments.MOMENT_KEYS:
                loaded = optimizer.state[param][name]
                assert loaded.dtype == state_dtype
                assert torch.equal(loaded, theirs.state[param][name].to(state_dtype))


def test_a_float32_state_dict_has_the_names_of_torchs_adamw():
    optimizer = trained()
    before = everything(optimizer)
    with optimizer.float32_state_dict():
        state = optimizer.state_dict()
    assert_same(everything(optimizer), before)
    assert state["state"][0].keys() == {"step", "exp_avg", "exp_avg_sq"}
    theirs = torch.optim.AdamW([parameter(normal((64, 256), 1)), parameter(normal((5,), 2))])
    theirs.load_state_dict({**theirs.state_dict(), "state": state["state"]})
    # Stored values have codes, so loading them again changes the lowest bits only.
    other = trained(steps=0)
    other.load_state_dict(state)
    for name in moments.MOMENT_KEYS:
        a, b = (o.state_dict()["state"][0] for o in (optimizer, other))
        assert torch.equal(a[name + "_codes"], b[name + "_codes"])
    assert "exp_avg_codes" in optimizer.state_dict()["state"][0]


def test_states_of_another_shape_or_without_ranges_are_refused():
    optimizer = trained()
    before = everything(optimizer)
    with pytest.raises(ValueError, match=r"exp_avg_codes .* shape \(32, 256\)"):
        optimizer.load_state_dict(trained(shape=(32, 256)).state_dict())
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0]["exp_avg_sq_range"]
    with pytest.raises(ValueError, match="must have step, exp_avg and exp_avg_sq"):
        optimizer.load_state_dict(state)
    assert_same(everything(optimizer), before)


# --- training -----------------------------------------------------------------------------------


@pytest.mark.parametrize("betas", [(0.9, 0.95), (0.9, 0.999)])
def test_losses_follow_those_of_float32_moments(betas):
    x = normal((256, 128), 1)
    target = torch.sin(3 * x) + x.roll(1, -1)
    losses = []
    for options in ({}, {"state_dtype": "fp8", "state_filter": every}):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
        optimizer = AdamW(model.parameters(), lr=3e-3, betas=betas, **options)
        for _ in range(60):
            loss = nn.functional.mse_loss(model(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.01)


# --- CUDA ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@each_format
@with_and_without_masters
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [*QUANTIZERS, "plain"])
def test_cuda_writes_the_bytes_of_the_cpu(name, fp8_dtype, masters, stochastic, grad_dtype):
    shapes = [*SHAPES, (130, 4096), (9, 16384), (3, 17024), (257, 640), (31, 128)]
    optimizers = []
    for device in ("cpu", "cuda"):
        params = []
        for i, shape in enumerate(shapes):
            values = (normal(shape, i) * torch.exp(2 * normal(shape, i + 50))).to(device)
            if name == "plain":
                dtype = (torch.float32, torch.bfloat16, torch.float16)[i % 3]
                params.append(parameter(values.to(dtype)))
            else:
                params.append(parameter(QUANTIZERS[name](fp8_dtype, device)(values)))
        optimizers.append(
            fp8_adamw(
                params,
                lr=3e-2,
                master_weights=masters,
                stochastic_rounding=stochastic,
                seed=77,
            )
        )
        train(optimizers[-1], 4, grad_dtype)
    assert_same(everything(optimizers[1]), everything(optimizers[0]))


@pytest.mark.gpu
def test_cuda_writes_the_codes_of_blocks_of_every_kind():
    values = blocks_of_every_kind()
    values[3, 5] = math.nan
    values[4, 6] = math.inf
    values[5, 7] = -math.inf
    results = []
    for device in ("cpu", "cuda"):
        weight = parameter(torch.zeros(values.shape, device=device))
        optimizer = fp8_adamw([weight], betas=(0.5, 0.75))
        for factor in (1.0, 0.5, 0.0, 1e-3):
            weight.grad = values.to(device) * factor
            optimizer.step()
        results.append(everything(optimizer))
    # Parameters may be NaN of any payload, as with float32 moments.
    assert_same(results[1][1:], results[0][1:])


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("name", ["delayed", "rows", "128x128", "32x32", "plain"])
@with_and_without_masters
def test_cuda_steps_gradients_of_any_alignment(name, offset, masters):
    results = []
    for device in ("cpu", "cuda"):
        values = normal((70, 256), 1).to(device)
        weight = values.bfloat16() if name == "plain" else QUANTIZERS[name](E4M3, device)(values)
        optimizer = fp8_adamw([parameter(weight)], lr=3e-2, master_weights=masters)
        (weight,) = optimizer.param_groups[0]["params"]
        buffer = torch.zeros(70 * 256 + offset, device=device)
        weight.grad_dtype = torch.float32
        weight.grad = buffer[offset:].view(70, 256).copy_(normal((70, 256), 2))
        optimizer.step()
        optimizer.step()
        results.append(everything(optimizer))
    assert_same(results[1], results[0])


@pytest.mark.gpu
def test_a_state_moves_between_devices():
    """Conversions in torch write equal bytes on both devices."""
    values = blocks_of_every_kind()
    for name, moment in moments.FORMATS.items():
        x = values if name == "exp_avg" else values.abs()
        cpu = moments.encode(x, moment)
        cuda = moments.encode(x.cuda(), moment)
        assert torch.equal(cuda[0].cpu(), cpu[0])
        assert torch.equal(cuda[1].cpu().view(torch.int32), cpu[1].view(torch.int32))
        assert torch.equal(moments.decode(*cuda, moment).cpu(), moments.decode(*cpu, moment))
