"""fp8rs.optim.AdamW compared with torch's AdamW, with the quantizers, and with another device."""

import copy
import itertools

import pytest
import torch

from fp8rs import QuantizedTensor, convert_to_float8_training
from fp8rs.optim import AdamW, MasterWeights, optim_param
from internals import storage_of
from optim.weights import (
    E4M3,
    E5M2,
    PARAMETERS,
    QUANTIZERS,
    SHAPES,
    assert_same,
    bytes_of,
    each_format,
    each_kind_of_moments,
    each_quantizer,
    everything,
    mixed,
    normal,
    parameter,
    train,
)
from tensor_formats import quantizer_of

ops = torch.ops.fp8rs
EPS32 = 2.0**-23

#: The quantizers whose codes the update kernel writes.
IN_ONE_PASS = [name for name in QUANTIZERS if name not in ("1x32", "1x128")]

with_and_without_masters = pytest.mark.parametrize("masters", [True, False])


# --- comparison with torch ----------------------------------------------------------------------


def exact(group, p, g, m, v, step):
    """Compute a step in float64, and bounds on float32's error: half an ulp for each rounding.

    For the weight: its factor, the product and the difference. For the update: the numerator has
    four roundings of at most |m| + |g|, and the denominator fewer than ten, none of which cancels.
    """
    p, g, m, v = (t.double() for t in (p, g, m, v))
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    g = -g if group["maximize"] else g
    largest = m.abs() + g.abs()
    w = p * (1 - lr * group["weight_decay"])
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + (1 - beta2) * g * g
    size = lr / (1 - beta1**step)
    denominator = (v / (1 - beta2**step)).sqrt() + group["eps"]
    bound = EPS32 / 2 * (3 * w.abs() + 15 * size * largest / denominator)
    return w - size * m / denominator, m, v, bound, EPS32 / 2 * 4 * largest


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.95), (0.0, 0.5)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_plain_float32_is_within_its_rounding_error_of_the_exact_step(
    maximize, betas, weight_decay
):
    options = {"lr": 1e-2, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
    ours = parameter(normal((64, 33), 1))
    theirs = parameter(normal((64, 33), 1))
    a = AdamW([ours], **options)
    b = torch.optim.AdamW([theirs], **options)
    group = a.param_groups[0]
    m, v = torch.zeros(2, 64, 33)
    for step in range(1, 8):
        ours.grad = normal((64, 33), 50 + step)
        theirs.grad = ours.grad.clone()
        w, m, v, bound, m_bound = exact(group, ours.detach(), ours.grad, m, v, step)
        a.step()
        b.step()
        assert ((ours.detach().double() - w).abs() <= bound).all()
        assert ((theirs.detach().double() - w).abs() <= bound).all()
        state = a.state[ours]
        assert ((state["exp_avg"].double() - m).abs() <= m_bound).all()
        assert ((state["exp_avg_sq"].double() - v).abs() <= 3 * EPS32 * v).all()
        # Start from equal values again, so that errors do not accumulate.
        theirs.data.copy_(ours.detach())
        m = state["exp_avg"].clone()
        v = state["exp_avg_sq"].clone()
        b.state[theirs]["exp_avg"].copy_(m)
        b.state[theirs]["exp_avg_sq"].copy_(v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@with_and_without_masters
def test_low_precision_parameters_equal_the_rounded_float32_step(dtype, grad_dtype, masters):
    start = normal((40, 33), 1).to(dtype)
    low = parameter(start.clone())
    high = parameter(start.float())
    a = AdamW([low], lr=1e-2, master_weights=masters)
    b = AdamW([high], lr=1e-2)
    for step in range(4):
        train(a, 1, grad_dtype, step)
        train(b, 1, grad_dtype, step)
        assert torch.equal(low.detach(), high.detach().to(dtype))
        if masters:
            assert torch.equal(a.state[low]["master"], high.detach())
        else:
            high.data.copy_(low.detach())
    assert ("master" in a.state[low]) == masters


def test_bfloat16_moments_are_rounded_but_steps_use_them_unrounded():
    p = parameter(normal((40, 33), 1))
    q = parameter(normal((40, 33), 1))
    a = AdamW([p], state_dtype=torch.bfloat16)
    b = AdamW([q])
    for step in range(4):
        train(a, 1, seed=step)
        train(b, 1, seed=step)
        assert torch.equal(p, q)
        for name in ("exp_avg", "exp_avg_sq"):
            assert a.state[p][name].dtype == torch.bfloat16
            assert torch.equal(a.state[p][name], b.state[q][name].bfloat16())
            b.state[q][name].copy_(a.state[p][name])


# --- FP8 weights --------------------------------------------------------------------------------


@each_quantizer
@each_format
@with_and_without_masters
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fp8_weights_equal_the_quantized_float32_step(
    name, fp8_dtype, masters, state_dtype, grad_dtype, shape
):
    quantizer = QUANTIZERS[name](fp8_dtype, "cpu")
    weight = parameter(quantizer(normal(shape, 1)))
    other = QUANTIZERS[name](fp8_dtype, "cpu")
    values = parameter(weight.detach().dequantize(torch.float32))
    options = {"lr": 3e-2, "state_dtype": state_dtype}
    a = AdamW([weight], master_weights=masters, stochastic_rounding=False, **options)
    b = AdamW([values], **options)
    for step in range(3):
        train(a, 1, grad_dtype, step)
        train(b, 1, grad_dtype, step)
        want = other(values.detach())
        assert_same(bytes_of(*storage_of(weight).tensors()), bytes_of(*storage_of(want).tensors()))
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same(bytes_of(a.state[weight][key]), bytes_of(b.state[values][key]))
        if masters:
            assert torch.equal(a.state[weight]["master"], values.detach())
        else:
            values.data.copy_(want.dequantize(torch.float32))
    if name == "delayed":
        # The amax of the first cast, of the initial values, is recorded only by one of the two
        # quantizers.
        amax = max(other.amax, normal(shape, 1).abs().max()) if weight.numel() else other.amax
        assert torch.equal(quantizer.amax, amax)


@pytest.mark.parametrize("name", IN_ONE_PASS)
@pytest.mark.parametrize("offset", [1, 2])
@with_and_without_masters
def test_strides_and_alignment_do_not_change_the_result(name, offset, masters):
    """A gradient may be transposed, or a view of a buffer as in FSDP2."""
    weights_ = []
    optimizers = []
    for _ in range(3):
        weights_.append(parameter(QUANTIZERS[name](E4M3, "cpu")(normal((70, 36), 1))))
        optimizers.append(AdamW([weights_[-1]], lr=3e-2, master_weights=masters))
    grad = normal((70, 36), 2)
    buffer = torch.zeros(70 * 36 + offset)
    view = buffer[offset:].view(70, 36).copy_(grad)
    for w, g, optimizer in zip(
        weights_, (grad, view, grad.t().contiguous().t()), optimizers, strict=True
    ):
        w.grad = g
        optimizer.step()
    assert_same(everything(optimizers[1]), everything(optimizers[0]))
    assert_same(everything(optimizers[2]), everything(optimizers[0]))


@pytest.mark.parametrize(
    "make",
    [
        lambda t: t.t().contiguous().t(),
        lambda t: torch.zeros(6, 5, 14).copy_(0)[:, :, ::2].copy_(t.view(6, 5, 7)),
        lambda t: t.view(2, 3, 5, 7).contiguous(memory_format=torch.channels_last),
    ],
    ids=["transposed", "with gaps", "channels last"],
)
def test_plain_parameters_of_any_strides_are_updated_in_place(make):
    values = normal((30, 7), 1)
    strided = parameter(make(values))
    dense = parameter(values.view(strided.shape).clone())
    assert not strided.is_contiguous()
    a = AdamW([strided])
    b = AdamW([dense])
    pointer = strided.data_ptr()
    train(a, 3)
    train(b, 3)
    assert torch.equal(strided, dense) and strided.data_ptr() == pointer
    assert torch.equal(a.state[strided]["exp_avg_sq"], b.state[dense]["exp_avg_sq"])


def test_plain_and_fp8_parameters_of_several_groups_step_together():
    def model():
        params = [
            parameter(QUANTIZERS[n](E4M3, "cpu")(normal((70, 33), i)))
            for i, n in enumerate(QUANTIZERS)
        ]
        params += [parameter(normal((5, 7), 90)), parameter(normal((9,), 91, torch.bfloat16))]
        return params

    together = model()
    alone = model()
    optimizer = AdamW(
        [
            {"params": together[::2]},
            {"params": together[1::2], "lr": 3e-3, "betas": (0.8, 0.9), "maximize": True},
        ],
        lr=1e-2,
        master_weights=False,
        stochastic_rounding=False,
    )
    train(optimizer, 2)
    order = [*together[::2], *together[1::2]]
    singles = [*alone[::2], *alone[1::2]]
    for i, (a, b) in enumerate(zip(order, singles, strict=True)):
        options = {"lr": 1e-2}
        if i >= len(together[::2]):
            options = {"lr": 3e-3, "betas": (0.8, 0.9), "maximize": True}
        single = AdamW([b], master_weights=False, stochastic_rounding=False, **options)
        for step in range(2):
            b.grad_dtype = torch.float32
            b.grad = normal(b.shape, 100 * step + i)
            single.step()
        assert_same(bytes_of(a), bytes_of(b))


@pytest.mark.parametrize("masters", [True, False])
@pytest.mark.parametrize("name", ["current", "32x32"])
def test_a_compiled_step_equals_an_eager_one(name, masters):
    def model():
        shapes = [(64, 64), (64, 64), (160, 64)]
        params = [
            parameter(QUANTIZERS[name](E4M3, "cpu")(normal(shape, i)))
            for i, shape in enumerate(shapes)
        ]
        return [*params, parameter(normal((160,), 9))]

    torch._dynamo.reset()
    eager, compiled = (AdamW(model(), lr=1e-2, master_weights=masters) for _ in range(2))
    step = torch.compile(compiled.step, backend="eager")
    for seed in range(3):
        for optimizer in (eager, compiled):
            for i, p in enumerate(optimizer.param_groups[0]["params"]):
                p.grad = normal(p.shape, 10 * seed + i)
        eager.step()
        step()
        assert_same(everything(compiled), everything(eager))
    torch._dynamo.reset()


#: Parameters that are a quantized tensor with other planes than rowwise alone, or a part of one.
PARTS = {
    "both planes": (True, True, lambda q: q),
    "columns": (False, True, lambda q: q),
    "rows of it": (True, False, lambda q: q[:32]),
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("name", ["current", "delayed", "rows", "32x32"])
@with_and_without_masters
def test_a_step_keeps_planes_consistent_and_writes_only_the_part(name, part, masters):
    """A part shares its scales with other elements."""
    rowwise, columnwise, take = PARTS[part]
    quantizer = QUANTIZERS[name](E4M3, "cpu")
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    q = quantizer(torch.randn(64, 96, generator=torch.Generator().manual_seed(0)))
    before = q.dequantize()
    parameter = torch.nn.Parameter(take(q))
    # The largest error of a code. It also holds with a delayed scale, which does not depend on the
    # values.
    bound = before.abs().amax().item() / 8
    optimizer = AdamW([parameter], lr=0.5, weight_decay=0.0, master_weights=masters)
    parameter.grad = torch.ones(parameter.shape)
    optimizer.step()
    assert (parameter.detach().dequantize() - (take(before) - 0.5)).abs().max() < bound
    outside = torch.ones_like(before, dtype=torch.bool)
    take(outside).fill_(False)
    assert ((q.dequantize() - before)[outside].abs() < bound).all()
    if rowwise and columnwise:
        row, col = (plane.dequantize(torch.float32) for plane in (q.rowwise, q.columnwise))
        assert (row - col.t()).abs().max() < bound


@pytest.mark.parametrize("take", [lambda q: q[:, :32], lambda q: q.t()], ids=["columns", "turned"])
@with_and_without_masters
def test_a_step_of_a_view_that_can_be_read_only_raises(take, masters):
    q = QUANTIZERS["32x32"](E4M3, "cpu")(normal((64, 96), 0))
    before = bytes_of(q)
    parameter = torch.nn.Parameter(take(q))
    optimizer = AdamW([parameter], master_weights=masters)
    parameter.grad = torch.ones(parameter.shape)
    with pytest.raises(NotImplementedError, match="consecutive elements"):
        optimizer.step()
    assert_same(bytes_of(q), before)


def test_a_parameter_without_a_gradient_does_not_change():
    a, b = (parameter(QUANTIZERS["current"](E4M3, "cpu")(normal((8, 8), i))) for i in range(2))
    optimizer = AdamW([a, b])
    before = bytes_of(a)
    b.grad = normal((8, 8), 3)
    optimizer.step()
    assert_same(bytes_of(a), before)
    assert a not in optimizer.state


def test_non_finite_values_make_the_scale_nan_and_do_not_enter_the_history():
    quantizer = QUANTIZERS["delayed"](E4M3, "cpu")
    weight = parameter(quantizer(normal((8, 8), 1)))
    other = parameter(QUANTIZERS["current"](E4M3, "cpu")(normal((8, 8), 1)))
    amax = quantizer.amax.clone()
    optimizer = AdamW([weight, other])
    for p in (weight, other):
        p.grad = normal((8, 8), 2)
        p.grad[3, 4] = torch.inf
    optimizer.step()
    assert torch.equal(quantizer.amax, amax)
    assert weight.rowwise.scale.isnan() and other.rowwise.scale.isnan()
    assert (other.rowwise.data.view(torch.uint8) == 0x7F).all()


# --- masters ------------------------------------------------------------------------------------


class Keeper:
    """A stub of the handle of an unsharded weight that keeps its initial values."""

    sharded_model = slots = None
    has_parameter = True
    detects_lost_writes = False
    writes = 0

    def __init__(self, init_value):
        self.init_value = init_value

    def forget_init(self):
        self.init_value = None

    def observes(self, storage):
        return True

    def use_master(self, optimizer, parameter):
        self.forget_init()

    def exact_values(self, tensor):
        return None

    def observe_write(self, tensor, write):
        pass

    def mark_written(self):
        pass


@each_quantizer
def test_masters_start_from_the_kept_values_which_are_then_dropped(name):
    start = normal((40, 33), 1)
    weight = parameter(QUANTIZERS[name](E4M3, "cpu")(start))
    storage_of(weight).observer = Keeper(start.clone())
    plain = parameter(start.clone())
    a = AdamW([weight])
    b = AdamW([plain])
    train(a, 2)
    train(b, 2)
    assert torch.equal(a.state[weight]["master"], plain)
    assert storage_of(weight).observer.init_value is None


each_parameter = pytest.mark.parametrize("kind", PARAMETERS)
each_rounding = pytest.mark.parametrize("stochastic", [None, True], ids=["nearest", "stochastic"])


@each_parameter
@each_rounding
def test_masters_follow_writes_to_the_weight(kind, stochastic):
    weight = parameter(PARAMETERS[kind](normal((140, 150), 1)))
    optimizer = AdamW([weight], lr=1e-2, stochastic_rounding=stochastic)
    train(optimizer, 2)
    with torch.no_grad():
        weight.copy_(normal((140, 150), 2))
    written = weight.detach()
    if isinstance(written, QuantizedTensor):
        written = written.dequantize()
    written = written.float().clone()
    # With a learning rate of 0, only the write changes the weight.
    optimizer.param_groups[0].update(lr=0.0)
    train(optimizer, 1)
    master = optimizer.state[weight]["master"]
    assert (master == written).float().mean() > 0.8
    # The other masters are older and round to the same code, so they are at most one code away.
    assert ((master - written).abs() <= written.abs() / 8 + 2.0**-10).all()


@each_parameter
def test_masters_follow_writes_after_they_were_loaded(kind):
    weight = parameter(PARAMETERS[kind](normal((140, 150), 1)))
    optimizer = AdamW([weight], lr=0.0)
    train(optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    with torch.no_grad():
        weight.copy_(torch.full((140, 150), 3.0))
    train(optimizer, 1)
    assert ((optimizer.state[weight]["master"] - 3).abs() <= 3 / 16).all()


@each_parameter
@each_rounding
def test_masters_are_unchanged_when_weights_are_exchanged_and_restored(kind, stochastic):
    """An evaluation with averaged weights does so. It changes no byte of the training.

    The amax of delayed scaling is an exception, because it has recorded the other weights.
    """
    results = []
    for exchange in (False, True):
        weight = parameter(PARAMETERS[kind](normal((140, 150), 1)))
        optimizer = AdamW([weight], lr=1e-2, stochastic_rounding=stochastic)
        train(optimizer, 2)
        if exchange:
            original = copy.deepcopy(weight.detach())
            with torch.no_grad():
                weight.copy_(normal((140, 150), 2))
                weight.copy_(original)
        train(optimizer, 2, seed=1)
        delayed = storage_of(weight).delayed if isinstance(weight, QuantizedTensor) else None
        if delayed is not None:
            delayed[1].zero_()
        results.append(everything(optimizer))
    assert_same(*results)


@each_quantizer
def test_small_steps_need_masters_or_stochastic_rounding(name):
    """Two hundred steps move weights by a sixtieth of the distance to the next code or less.

    One element of each block does not move, so that scales do not change.
    """
    moved = {}
    moving = torch.arange(128) % 32 != 0
    for masters, stochastic in ((True, None), (False, None), (False, False)):
        quantizer = QUANTIZERS[name](E4M3, "cpu")
        if name == "delayed":
            quantizer = quantizer_of(
                "tensor", E4M3, delayed=(torch.ones(()), torch.zeros(())), columnwise=False
            )
        weight = parameter(quantizer(torch.ones(64, 128)))
        optimizer = AdamW(
            [weight],
            lr=1e-3,
            weight_decay=0,
            master_weights=masters,
            stochastic_rounding=stochastic,
        )
        for _ in range(200):
            weight.grad = torch.ones(64, 128) * moving
            optimizer.step()
        values = weight.detach().dequantize()
        assert values[:, ~moving].unique().numel() == 1
        moved[masters, stochastic] = values[0, 0].item() - values[:, moving].mean().item()
    assert moved[False, False] == 0
    # A constant gradient moves each weight by lr per step. The last code is within half a spacing.
    # Just below the largest code, 448, the spacing is 1/14. With power-of-two scales it is 1/16.
    spacing = 1 / 14
    assert abs(moved[True, None] - 0.2) <= spacing / 2 + 1e-3
    # Each step rounds independently, with a variance of at most a quarter of the squared spacing.
    deviation = (200 * spacing**2 / 4 / (64 * moving.sum().item())) ** 0.5
    assert abs(moved[False, None] - 0.2) <= 5 * deviation


# --- stochastic rounding ------------------------------------------------------------------------


@each_format
@pytest.mark.parametrize("way", [0.0625, 0.3, 0.5, 0.9])
def test_stochastic_rounding_is_unbiased(fp8_dtype, way):
    """If n elements are ``way`` of a spacing below 1, n * way +- 5 deviations round down."""
    spacing = {E4M3: 2.0**-4, E5M2: 2.0**-3}[fp8_dtype]
    quantizer = quantizer_of(
        "tensor", fp8_dtype, delayed=(torch.ones(()), torch.zeros(())), columnwise=False
    )
    weight = parameter(quantizer(torch.ones(256, 256)))
    # The length of the first step is the learning rate, for any gradient.
    optimizer = AdamW([weight], lr=way * spacing, eps=0.0, weight_decay=0, master_weights=False)
    weight.grad = normal((256, 256), 1).abs() + 0.1
    optimizer.step()
    values = weight.detach().dequantize()
    assert set(values.unique().tolist()) == {1.0, 1 - spacing}
    down = (values < 1).sum().item()
    n = values.numel()
    assert abs(down - n * way) <= 5 * (n * way * (1 - way)) ** 0.5


def launch(codes, scales, parts, seed=3, block=(), step=5.0, stream=2):
    """Step rows ``parts`` of a weight, each as a shard."""
    rows, cols = codes.shape
    size = block[0] if block else None
    outs = []
    for start, end in parts:
        part_codes = codes[start:end].clone()
        if block:
            scale = scales[start // size : -(-end // size)].clone()
        else:
            scale = scales.clone()
        grad = normal((rows, cols), 7)[start:end]
        m, v = torch.zeros(2, end - start, cols)
        ops.adamw_(
            [grad], [m], [v], [part_codes], [], [torch.tensor(step)], [scale],
            [] if block else [torch.tensor(0.02)], [], [], [], [start * cols], [stream],
            lr=0.05, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, maximize=False,
            seed=seed, block=list(block),
        )  # fmt: skip
        outs.append(part_codes.view(torch.uint8))
    return torch.cat(outs)


@pytest.mark.parametrize("cols", [64, 33])
@pytest.mark.parametrize(
    "name, block, cuts",
    [
        ("delayed", (), [0, 1, 7, 7, 100]),
        ("rows", (1, -1), [0, 1, 7, 7, 100]),
        ("32x32", (32, 32), [0, 32, 96, 100]),
        ("128x128", (128, 128), [0, 100]),
    ],
)
def test_shards_round_as_the_unsharded_weight_does(cols, name, block, cuts):
    weight = QUANTIZERS[name](E4M3, "cpu")(normal((100, cols), 1))
    arguments = weight.rowwise.data, weight.rowwise.scale
    unsharded = launch(*arguments, [(0, 100)], block=block)
    parts = list(itertools.pairwise(cuts))
    assert torch.equal(launch(*arguments, parts, block=block), unsharded)
    others = [{"seed": 4}, {"step": 6.0}, {"stream": 3}]
    for other in others:
        assert not torch.equal(launch(*arguments, [(0, 100)], block=block, **other), unsharded)


@each_format
@pytest.mark.parametrize(
    "name", ["rows", "128x128", "128x128, powers of two", "32x32", "32x32, floor"]
)
def test_codes_rounded_by_torch_equal_those_of_the_kernel(device, name, fp8_dtype, monkeypatch):
    """Shards that split blocks are rounded by torch. They get the codes of the unsharded weight."""
    results = []
    for one_pass_formats in (optim_param.BLOCK_SCALE_FORMATS, ()):
        monkeypatch.setattr(optim_param, "BLOCK_SCALE_FORMATS", one_pass_formats)
        torch.manual_seed(1)
        start = torch.randn(300, 132) * torch.randn(300, 132).mul(3).exp()
        start[7, 40] = float("nan")
        start[150] = 0
        weight = parameter(QUANTIZERS[name](fp8_dtype, device)(start.to(device)))
        optimizer = AdamW([weight], lr=1e-2, master_weights=False, seed=5)
        train(optimizer, 3)
        results.append(everything(optimizer))
    assert_same(*results)


def test_a_seed_determines_the_result():
    def run(seed):
        weight = parameter(QUANTIZERS["current"](E4M3, "cpu")(normal((64, 64), 1)))
        optimizer = AdamW([weight], master_weights=False, seed=seed)
        train(optimizer, 3)
        return bytes_of(weight)

    assert_same(run(5), run(5))
    assert not torch.equal(run(5)[0], run(6)[0])
    run(2**64 - 1)


# --- the interface of an optimizer --------------------------------------------------------------


@with_and_without_masters
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path, masters, state_dtype):
    options = {"master_weights": masters, "state_dtype": state_dtype, "seed": 9}
    first = AdamW(mixed(), **options)
    train(first, 2)
    torch.save((first.state_dict(), first.param_groups[0]["params"]), tmp_path / "saved")
    state, params = torch.load(tmp_path / "saved", weights_only=True)
    second = AdamW(params, lr=0.5)
    second.load_state_dict(state)
    for p in params:
        for name, value in second.state[p].items():
            moment = name in ("exp_avg", "exp_avg_sq")
            assert value.dtype == (state_dtype if moment else torch.float32)
    # A pickle copies the delayed scale and amax, as any checkpoint does.
    train(first, 2, seed=1)
    train(second, 2, seed=1)
    assert_same(everything(second), everything(first))


@with_and_without_masters
def test_a_step_skipped_by_a_grad_scaler_changes_no_byte(masters):
    params = mixed()
    optimizer = AdamW(params, master_weights=masters)
    reference = AdamW(copy.deepcopy(params), master_weights=masters)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    # This creates the scaler's scale.
    scaler.scale(torch.zeros(()))
    train(optimizer, 1)
    train(reference, 1)
    before = everything(optimizer)
    for p in params:
        p.grad = torch.full_like(p.grad, torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert_same(everything(optimizer), before)
    assert scaler.get_scale() == 512.0
    # The next step gives the result of an optimizer that did not skip one.
    for i, (p, q) in enumerate(zip(params, reference.param_groups[0]["params"], strict=True)):
        q.grad = normal(p.shape, i).to(q.grad.dtype)
        p.grad = q.grad * 512
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    reference.step()
    assert_same(everything(optimizer), everything(reference))


def test_a_step_on_the_cpu_waits_for_the_scalars_of_another_device():
    """`Tensor.to` copies asynchronously into pinned memory, but the step reads the values."""
    waited = []

    class OnAnotherDevice(torch.Tensor):
        device = torch.device("cuda")

        def to(self, device, non_blocking=False, **kwargs):
            waited.append(not non_blocking)
            return self.as_subclass(torch.Tensor).to(device)

    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = AdamW([weight], lr=torch.tensor(0.5).as_subclass(OnAnotherDevice))
    optimizer.grad_scale = torch.tensor(1.0).as_subclass(OnAnotherDevice)
    optimizer.found_inf = torch.zeros(1).as_subclass(OnAnotherDevice)
    weight.grad = torch.ones(4)
    optimizer.step()
    assert waited == [True] * 3
    assert optimizer.state[weight]["step"] == 1 and weight.max() < 0.6


@each_quantizer
def test_a_skipped_step_keeps_codes_whose_scales_do_not_come_from_their_maxima(name, device):
    """Such codes come from a checkpoint or from writes to parts of a weight."""
    weight = parameter(QUANTIZERS[name](E4M3, device)(normal((70, 36), 1).to(device)))
    for plane in weight.detach().planes:
        if plane is not None:
            # The values are at most 1.875.
            plane.data.view(torch.uint8).bitwise_and_(0xBF)
    optimizer = AdamW([weight], master_weights=False)
    optimizer.found_inf = torch.ones(1, device=device)
    before = bytes_of(weight)
    train(optimizer, 1)
    assert_same(bytes_of(weight), before)


@pytest.mark.parametrize("name", ["1x32", "1x128"])
def test_a_skipped_step_does_not_round_masters_again(name):
    weight = parameter(QUANTIZERS[name](E4M3, "cpu")(normal((70, 36), 1)))
    optimizer = AdamW([weight], stochastic_rounding=True)
    train(optimizer, 1)
    before = everything(optimizer)
    optimizer.found_inf = torch.ones(1)
    train(optimizer, 1)
    assert_same(everything(optimizer), before)


@each_quantizer
def test_masters_are_rounded_stochastically_if_requested(name):
    """Values between two codes round to both of them."""
    weight = parameter(QUANTIZERS[name](E4M3, "cpu")(torch.ones(64, 128)))
    # In every format, these values determine the scales.
    weight.detach().index_fill_(1, torch.arange(0, 128, 32), 4.0)
    optimizer = AdamW([weight], lr=1 / 32, weight_decay=0, stochastic_rounding=True)
    weight.grad = torch.ones(64, 128) * (torch.arange(128) % 32 != 0)
    optimizer.step()
    moved = weight.detach().dequantize()[:, 1:32]
    assert optimizer.state[weight]["master"][:, 1:32].unique().numel() == 1
    assert moved.unique().numel() == 2


def test_groups_have_their_own_options_which_are_checked():
    first, second = (parameter(torch.ones(4).bfloat16()) for _ in range(2))
    optimizer = AdamW([{"params": [first], "state_dtype": torch.bfloat16}])
    optimizer.add_param_group({"params": [second], "master_weights": False, "lr": 0.5})
    train(optimizer, 1)
    assert optimizer.state[first]["exp_avg"].dtype == torch.bfloat16
    assert optimizer.state[second]["exp_avg"].dtype == torch.float32
    assert "master" in optimizer.state[first] and "master" not in optimizer.state[second]
    for option in ({"betas": (0.9, 1.5)}, {"lr": -1.0}, {"state_dtype": torch.float16}):
        with pytest.raises(ValueError, match=next(iter(option))):
            optimizer.add_param_group({"params": [parameter(torch.ones(2))], **option})
    assert len(optimizer.param_groups) == 2


def test_hooks_see_and_change_the_loaded_state():
    weight = parameter(normal((8, 4), 1).bfloat16())
    optimizer = AdamW([weight])
    train(optimizer, 1)
    saved = optimizer.state_dict()
    moments = []

    def halve(_, state_dict):
        state = {k: {**v, "exp_avg": v["exp_avg"] / 2} for k, v in state_dict["state"].items()}
        return {**state_dict, "state": state}

    optimizer.register_load_state_dict_pre_hook(halve)
    optimizer.register_load_state_dict_post_hook(
        lambda o: moments.append(o.state[weight]["exp_avg"].clone())
    )
    wanted = optimizer.state[weight]["exp_avg"] / 2
    optimizer.load_state_dict(saved)
    assert torch.equal(optimizer.state[weight]["exp_avg"], wanted)
    assert torch.equal(moments[0], wanted)


def test_schedulers_clipping_and_closures_work():
    params = mixed()
    optimizer = AdamW(params, lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    train(optimizer, 1)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5
    norm = torch.nn.utils.clip_grad_norm_(params, 0.1)
    assert norm > 0.1
    assert abs(torch.nn.utils.get_total_norm([p.grad.float() for p in params]) - 0.1) < 1e-3

    def closure():
        assert torch.is_grad_enabled()
        return 3.0

    assert optimizer.step(closure) == 3.0


def test_a_learning_rate_may_be_a_tensor():
    for capturable in (False, True):
        a = mixed()
        b = mixed()
        lr = torch.tensor(3e-3)
        first = AdamW(a, lr=lr, capturable=capturable)
        second = AdamW(b, lr=float(lr))
        train(first, 2)
        train(second, 2)
        lr.fill_(1e-2)
        second.param_groups[0]["lr"] = float(lr)
        train(first, 1, seed=1)
        train(second, 1, seed=1)
        assert_same(everything(first), everything(second))


def test_writes_increase_version_counters():
    for p in mixed():
        optimizer = AdamW([p])
        before = p._version
        train(optimizer, 1)
        assert p._version > before


@pytest.fixture
def one_rank():
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_states_of_dtensors_are_dtensors(one_rank):
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    models = [torch.nn.Linear(12, 5), torch.nn.Linear(12, 5)]
    models[1].load_state_dict(models[0].state_dict())
    for model in models:
        fully_shard(model)
    ours = AdamW(models[0].parameters(), state_dtype=torch.float32)
    theirs = torch.optim.AdamW(models[1].parameters(), weight_decay=1e-2)
    for model, optimizer in zip(models, (ours, theirs), strict=True):
        model(normal((4, 12), 1)).square().sum().backward()
        optimizer.step()
    for p, q in zip(*(m.parameters() for m in models), strict=True):
        # The first step of each is within its error bound of the exact step, which is about 1e-7.
        assert (p.full_tensor() - q.full_tensor()).abs().max() < 1e-6
        for name in ("exp_avg", "exp_avg_sq"):
            a = ours.state[p][name]
            b = theirs.state[q][name]
            assert isinstance(a, DTensor) and isinstance(b, DTensor)
            assert (a.placements, a.shape, a.device_mesh) == (b.placements, b.shape, b.device_mesh)


@with_and_without_masters
def test_opcheck(device, masters):
    """Schema, fake kernel, functionalization and compilation, for every kind of call."""

    def f32(*shape):
        return torch.rand(shape, device=device)

    for kind in ("plain", "measure", "known", "rows", "codes"):
        shape = (5, 128) if kind == "codes" else (5, 7)
        param = f32(*shape) if kind == "plain" else f32(*shape).to(E4M3)
        scales = {"plain": [], "rows": [f32(5, 1)]}.get(kind, [f32()])
        moments = [f32(*shape), f32(*shape)]
        ranges = []
        if kind == "codes":
            moments = [(moment * 100).to(torch.uint8) for moment in moments]
            ranges = [f32(5, 2) + torch.tensor([1.0, 0.0], device=device) for _ in moments]
        arguments = (
            [f32(*shape)], moments[:1], moments[1:], [param], [f32(*shape)] if masters else [],
            [torch.ones((), device=device)], scales, [f32()] if kind in ("known", "codes") else [],
            [f32()] if kind == "measure" else [], ranges[:1], ranges[1:],
            [3], [1], f32(), f32() + 1, None,
        )  # fmt: skip
        options = {
            "lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1,
            "maximize": False, "seed": 5, "block": [1, -1] if kind == "rows" else [],
        }  # fmt: skip
        # torch's schema check multiplies its inputs, which is not implemented for FP8.
        schema = ["test_schema"] if kind == "plain" else []
        utils = (
            *schema,
            "test_autograd_registration",
            "test_faketensor",
            "test_aot_dispatch_dynamic",
        )
        torch.library.opcheck(ops.adamw_.default, arguments, options, test_utils=utils)


@pytest.mark.parametrize("first", [False, True])
def test_random_numbers_depend_on_the_parameters_index_only(first):
    weights = [parameter(QUANTIZERS["current"](E4M3, "cpu")(normal((70, 36), i))) for i in range(2)]
    alone = copy.deepcopy(weights)
    optimizers = [AdamW(params, master_weights=False) for params in (weights, alone)]
    for weight, other in zip(weights, alone, strict=True):
        weight.grad = other.grad = torch.ones(70, 36)
    alone[1 - first].grad = None
    for optimizer in optimizers:
        optimizer.step()
    assert_same(bytes_of(alone[first]), bytes_of(weights[first]))


def delayed_layer():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    return convert_to_float8_training(model, recipe="delayed", fp8_weights=True)[0]


def test_codes_keep_their_scale_if_no_delayed_scale_is_known():
    layer = delayed_layer()
    layer.fp8_scale.zero_()
    before = layer.weight.dequantize()
    layer.weight.grad = torch.ones(32, 32)
    AdamW(layer.parameters(), lr=0.0).step()
    assert (layer.weight.dequantize() - before).norm() < 0.05 * before.norm()


def test_scales_that_the_host_knows_give_the_bytes_of_those_it_does_not_know():
    def trained(host_scales):
        torch.manual_seed(0)
        layer = torch.nn.Linear(32, 32, bias=False)
        model = convert_to_float8_training(
            torch.nn.Sequential(layer), recipe="delayed", fp8_weights=True
        )
        optimizer = AdamW(model.parameters(), lr=1e-2)
        for i in range(4):
            optimizer.zero_grad()
            model(normal((32, 32), i)).square().sum().backward()
            if not host_scales:
                model[0].fp8_ready = (False, False, False)
            ready = model[0].fp8_ready[0]
            optimizer.step()
        assert ready is host_scales
        return everything(optimizer) + bytes_of(*model.buffers())

    assert_same(trained(True), trained(False))


def test_a_master_that_its_scale_saturates_is_kept_when_its_code_is_written_again():
    layer = delayed_layer()
    weight = layer.weight
    optimizer = AdamW(layer.parameters(), lr=0.0, weight_decay=0.0)
    weight.grad = torch.ones(32, 32)
    optimizer.step()
    largest = tuple(weight.dequantize().abs().eq(448 * weight.rowwise.scale).nonzero()[0].tolist())
    master = optimizer.state[weight]["master"]
    master[largest] = beyond = master[largest].sign() * 480 * weight.rowwise.scale
    with torch.no_grad():
        weight.copy_(weight.detach().clone())
    optimizer.step()
    assert master[largest] == beyond


def outgrown():
    """Return a model and its optimizer after a step moved a third of the weights out of range."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 64, bias=False)
    torch.nn.init.uniform_(layer.weight, -0.03, 0.03)
    options = {"fp8_weights": True, "preserve_high_precision_init_val": True}
    model = convert_to_float8_training(torch.nn.Sequential(layer), recipe="delayed", **options)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    train(optimizer, 1)
    # With a learning rate of 0, only later writes change the weight.
    optimizer.param_groups[0]["lr"] = 0.0
    return model, optimizer


@pytest.mark.parametrize("method", ["exchanged", "loaded", "loaded after the optimizer"])
def test_masters_beyond_their_scale_are_kept_when_their_codes_are_restored(method):
    model, optimizer = outgrown()
    weight = model[0].weight
    before = optimizer.state[weight]["master"].clone()
    assert (before.abs() > weight.detach().dequantize().abs().max() * 8 / 7).sum() > 100
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    if method == "exchanged":
        with torch.no_grad():
            weight.copy_(normal((64, 64), 2))
    elif method == "loaded after the optimizer":
        model, optimizer = outgrown()
        train(optimizer, 1)
        optimizer.load_state_dict(saved[1])
    model.load_state_dict(saved[0])
    train(optimizer, 1)
    assert torch.equal(optimizer.state[model[0].weight]["master"], before)


@pytest.mark.parametrize("factor", [0.9, 0.5])
@pytest.mark.parametrize("constant", [True, False])
def test_masters_follow_smaller_values_even_if_the_codes_are_equal(factor, constant):
    """With the smaller scale, the largest code no longer represents all larger masters."""
    model, optimizer = outgrown()
    weight = model[0].weight
    with torch.no_grad():
        if constant:
            weight.fill_(0.5)
            train(optimizer, 1)
        weight.copy_(weight.detach().dequantize() * factor)
    written = weight.detach().dequantize()
    train(optimizer, 1)
    master = optimizer.state[weight]["master"]
    assert ((master - written).abs() <= written.abs() / 16 + 2.0**-14).all()


def test_a_loaded_state_is_a_copy():
    weights = [parameter(normal((8, 4), 1)) for _ in range(2)]
    first, second = (AdamW([weight]) for weight in weights)
    train(first, 1)
    second.load_state_dict(first.state_dict())
    before = everything(first)
    train(second, 1)
    assert_same(everything(first), before)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -1.0}, "lr is -1.0; it must be a finite number of at least 0"),
        ({"lr": torch.ones(2)}, r"lr is tensor\(\[1., 1.\]\); .* a tensor of one element"),
        ({"eps": -1.0}, "eps is -1.0; it must be"),
        ({"weight_decay": float("nan")}, "weight_decay is nan; it must be"),
        ({"betas": (0.9, 1.0)}, r"betas is \(0.9, 1.0\); it must be two numbers"),
        ({"betas": (0.9,)}, r"betas is \(0.9,\); it must be two numbers"),
        ({"state_dtype": torch.float16}, "state_dtype is torch.float16; it must be"),
        ({"seed": 2**64}, "seed is 18446744073709551616; it must be an int of 64 bits"),
        ({"seed": 1.5}, "seed is 1.5; it must be an int"),
        ({"lr": None}, "lr is None; it must be a finite number"),
        ({"eps": "1e-8"}, "eps is '1e-8'; it must be a finite number"),
        ({"betas": 0.9}, "betas is 0.9; it must be two numbers"),
        ({"betas": (0.9, None)}, r"betas is \(0.9, None\); it must be two numbers"),
        ({"maximize": 1}, "maximize is 1; it must be a bool"),
        ({"master_weights": "no"}, "master_weights is 'no'; it must be a bool"),
        ({"stochastic_rounding": 0}, "stochastic_rounding is 0; it must be a bool or None"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        AdamW([parameter(torch.ones(2))], **options)


@pytest.mark.parametrize(
    "dtype, grad, error, message",
    [
        (
            torch.float64,
            torch.ones(4, 4).double(),
            TypeError,
            "a parameter has dtype torch.float64",
        ),
        (torch.float32, torch.ones(4, 4).to_sparse(), TypeError, "layout torch.sparse_coo"),
        (torch.float32, torch.ones(4, 4).double(), TypeError, "a gradient has dtype torch.float64"),
    ],
)
def test_unsuitable_gradients_are_refused_before_anything_is_written(dtype, grad, error, message):
    params = mixed()
    bad = parameter(torch.ones(4, 4, dtype=dtype))
    optimizer = AdamW([*params, bad])
    for p in params:
        p.grad = torch.ones(p.shape, dtype=p.dtype)
    bad.grad_dtype = None
    bad.grad = grad
    before = bytes_of(*params)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert_same(bytes_of(*params), before)
    assert not optimizer.state


def test_options_of_a_later_group_are_checked_before_the_first_is_stepped():
    first, second = mixed()[:2]
    optimizer = AdamW([{"params": [first]}, {"params": [second]}])
    train(optimizer, 1)
    before = everything(optimizer)
    # A custom schedule may set it.
    optimizer.param_groups[1]["lr"] = float("nan")
    with pytest.raises(ValueError, match="lr is nan"):
        optimizer.step()
    assert_same(everything(optimizer), before)


@pytest.mark.parametrize("step", [3, 3.0, torch.tensor(3.0), torch.tensor(3)])
def test_the_state_of_torchs_adamw_can_be_loaded(step):
    value = normal((8, 4), 1)
    theirs = parameter(value.clone())
    ours = parameter(value.clone())
    reference = torch.optim.AdamW([theirs])
    optimizer = AdamW([ours])
    train(reference, 3)
    with torch.no_grad():
        ours.copy_(theirs)
    state = copy.deepcopy(reference.state_dict())
    state["state"][0]["step"] = step
    optimizer.load_state_dict(state)
    train(reference, 2, seed=5)
    train(optimizer, 2, seed=5)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_options_that_a_loaded_state_lacks_keep_their_values():
    first, second = (parameter(normal((8, 4), i).bfloat16()) for i in range(2))
    theirs = torch.optim.AdamW([{"params": [first]}, {"params": [second], "lr": 0.5}])
    group_options = {
        "state_dtype": "bfloat16",
        "master_weights": False,
        "stochastic_rounding": True,
        "seed": 7,
    }
    optimizer = AdamW([{"params": [first]}, {"params": [second], **group_options}])
    optimizer.param_groups[0]["seed"] = 9
    optimizer.load_state_dict(theirs.state_dict())
    groups = optimizer.param_groups
    assert groups[1] == {**groups[1], **group_options, "lr": 0.5}
    assert groups[0] == {**groups[0], "seed": 9, "state_dtype": "float32", "master_weights": True}


def test_a_loaded_master_without_moments_starts_from_zero_moments():
    weight = parameter(normal((8, 4), 1).bfloat16())
    theirs = MasterWeights([weight], torch.optim.SGD)
    train(theirs, 1)
    optimizer = AdamW([weight])
    optimizer.load_state_dict(theirs.state_dict())
    assert torch.equal(optimizer.state[weight]["master"], theirs.state[weight]["master"])
    train(optimizer, 1)
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize(
    "other, message",
    [
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "amsgrad=True"),
        (lambda p: torch.optim.Adam(p, weight_decay=0.1), "Adam with weight_decay=0.1"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), "state_dict has momentum_buffer .* have step"),
        (lambda p: torch.optim.RMSprop(p), "state_dict has step, square_avg .* have step, exp_avg"),
        (lambda p: AdamW([parameter(torch.ones(4, 8))]), r"exp_avg .* shape \(4, 8\)"),
    ],
)
def test_a_state_of_another_optimizer_or_parameter_is_refused_entirely(other, message):
    weight = parameter(normal((8, 4), 1))
    theirs = other([weight])
    train(theirs, 1)
    optimizer = AdamW([weight])
    train(optimizer, 1)
    before = everything(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(theirs.state_dict())
    assert_same(everything(optimizer), before)


# --- CUDA ---------------------------------------------------------------------------------------


@pytest.mark.gpu
@each_format
@with_and_without_masters
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.9)])
@pytest.mark.parametrize("name", [*QUANTIZERS, "plain"])
def test_cuda_writes_the_bytes_of_the_cpu(
    name, fp8_dtype, masters, stochastic, state_dtype, grad_dtype, betas
):
    shapes = [
        *SHAPES,
        (130, 4096),
        (33, 4100),
        (9, 16384),
        (3, 17000),
        (5, 16388),
        (257, 260),
        (1, 1),
    ]
    optimizers = []
    for device in ("cpu", "cuda"):
        params = []
        for i, shape in enumerate(shapes):
            values = normal(shape, i).to(device)
            if name == "plain":
                dtype = (torch.float32, torch.bfloat16, torch.float16)[i % 3]
                params.append(parameter(values.to(dtype)))
            else:
                params.append(parameter(QUANTIZERS[name](fp8_dtype, device)(values)))
        optimizers.append(
            AdamW(
                params,
                lr=3e-2,
                betas=betas,
                master_weights=masters,
                stochastic_rounding=stochastic,
                state_dtype=state_dtype,
                seed=77,
            )
        )
        train(optimizers[-1], 3, grad_dtype)
    assert_same(everything(optimizers[1]), everything(optimizers[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("state_dtype", [torch.float32, "fp8"])
@pytest.mark.parametrize("eps", [1e-30, 1e-8, 2.0])
def test_cuda_steps_numbers_of_any_magnitude(eps, state_dtype):
    """Four adjacent elements may need different square roots and divisions on a GPU."""
    shape = (64, 1024)
    generator = torch.Generator().manual_seed(0)
    exponents = torch.empty(shape).uniform_(-126, 60, generator=generator)
    # In the second half, all elements are of a usual size, so a group of four has one method.
    exponents[32:] = exponents[32:] / 100 - 10
    gradients = normal(shape, 1) * torch.exp2(exponents)
    gradients[torch.rand(shape, generator=generator) < 0.1] = 0.0

    optimizers = []
    for device in ("cpu", "cuda"):
        weight = parameter(normal(shape, 2).to(device))
        optimizer = AdamW(
            [weight], lr=1e-3, eps=eps, state_dtype=state_dtype, state_filter=lambda p: True
        )
        for factor in (1.0, 0.0, 1e-3):
            weight.grad = gradients.to(device) * factor
            optimizer.step()
        optimizers.append(optimizer)
    assert_same(everything(optimizers[1]), everything(optimizers[0]))


@pytest.mark.gpu
@pytest.mark.parametrize("offset", [1, 2, 4])
@pytest.mark.parametrize("name", IN_ONE_PASS)
def test_cuda_steps_misaligned_shards(name, offset):
    """Gradients are views of a buffer. Rows may begin at any element of the unsharded weight."""
    results = []
    for device in ("cpu", "cuda"):
        weight = parameter(QUANTIZERS[name](E4M3, device)(normal((70, 36), 1).to(device)))
        optimizer = AdamW([weight], lr=3e-2, master_weights=False)
        buffer = torch.zeros(70 * 36 + offset, device=device)
        weight.grad = buffer[offset:].view(70, 36).copy_(normal((70, 36), 2))
        optimizer.step()
        results.append(everything(optimizer))
    assert_same(*results)
    cpu, cuda = (
        launch_at(QUANTIZERS["delayed"](E4M3, d)(normal((70, 36), 1).to(d)), offset, d)
        for d in ("cpu", "cuda")
    )
    assert torch.equal(cpu, cuda.cpu())


def launch_at(weight, offset, device):
    """Step a tensor whose first element is element ``offset`` of another."""
    codes = weight.rowwise.data
    m, v = torch.zeros(2, *codes.shape, device=device)
    ops.adamw_(
        [normal(codes.shape, 7).to(device)], [m], [v], [codes], [],
        [torch.tensor(5.0, device=device)], [weight.rowwise.scale],
        [torch.tensor(0.02, device=device)], [], [], [], [offset], [2],
        lr=0.05, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, maximize=False, seed=1,
        block=[],
    )  # fmt: skip
    return codes.view(torch.uint8)


@pytest.mark.gpu
@each_kind_of_moments
@with_and_without_masters
def test_cuda_skips_a_step_that_a_grad_scaler_rejects(params_on, adamw, masters):
    optimizer = adamw(params_on("cuda"), master_weights=masters)
    train(optimizer, 1)
    before = everything(optimizer)
    optimizer.grad_scale = torch.tensor(8.0, device="cuda")
    optimizer.found_inf = torch.ones(1, device="cuda")
    train(optimizer, 1, seed=1)
    assert_same(everything(optimizer), before)


@pytest.mark.gpu
@each_kind_of_moments
@with_and_without_masters
def test_a_captured_step_is_replayed_with_new_gradients_rates_and_steps(params_on, adamw, masters):
    """The graph reads the step, the learning rate and the gradients from fixed addresses."""
    eager = params_on("cuda")
    graphed = params_on("cuda")
    rates = [torch.tensor(3e-3, device="cuda") for _ in range(2)]
    options = {"master_weights": masters, "capturable": True}
    a = adamw(eager, lr=rates[0], **options)
    b = adamw(graphed, lr=rates[1], **options)
    train(a, 1)
    train(b, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        b.step()
    for seed in range(1, 4):
        rates[0].fill_(1e-3 * seed)
        rates[1].fill_(1e-3 * seed)
        train(a, 1, seed=seed)
        for i, p in enumerate(graphed):
            p.grad.copy_(normal(p.shape, 1000 * seed + i))
        graph.replay()
        assert_same(everything(b), everything(a))


@pytest.mark.gpu
@each_kind_of_moments
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_step_does_not_synchronize(params_on, adamw):
    optimizer = adamw(params_on("cuda"), lr=torch.tensor(1e-3, device="cuda"), capturable=True)
    train(optimizer, 1)
    try:
        torch.cuda.set_sync_debug_mode("error")
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
