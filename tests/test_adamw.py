"""fp8rs.optim.AdamW: against torch's, against the quantizers, and against itself on another device."""

import copy

import pytest
import torch

from fp8rs import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    MXFP8Quantizer,
    QuantizedTensor,
)
from fp8rs.optim import AdamW, weights

ops = torch.ops.fp8rs
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
EPS32 = 2.0**-23

#: A quantizer of weights, with one plane at rest, for every way in which codes are made.
QUANTIZERS = {
    "current": lambda f, d: Float8CurrentScalingQuantizer(f, columnwise=False),
    "current, powers of two": lambda f, d: Float8CurrentScalingQuantizer(
        f, columnwise=False, power_2_scale=True, amax_epsilon=0.5
    ),
    "delayed": lambda f, d: Float8Quantizer(
        torch.tensor(0.01, device=d), torch.zeros((), device=d), f, columnwise=False
    ),
    "rows": lambda f, d: Float8BlockQuantizer(f, columnwise=False, block=(1, -1)),
    "128x128": lambda f, d: Float8BlockQuantizer(f, columnwise=False, block=(128, 128)),
    "128x128, powers of two": lambda f, d: Float8BlockQuantizer(
        f, columnwise=False, block=(128, 128), power_2_scale=True, amax_epsilon=0.5
    ),
    "32x32": lambda f, d: MXFP8Quantizer(f, columnwise=False, block=(32, 32)),
    "32x32, floor": lambda f, d: MXFP8Quantizer(
        f, columnwise=False, block=(32, 32), scale_rounding="floor"
    ),
    "1x32": lambda f, d: MXFP8Quantizer(f, block=(1, 32)),
    "1x128": lambda f, d: Float8BlockQuantizer(f, columnwise=False, block=(1, 128)),
}
#: Those whose codes the kernel of the update writes.
IN_ONE_PASS = [name for name in QUANTIZERS if name not in ("1x32", "1x128")]
#: Larger than a block of every kind, not made of whole ones; a row; one element; none.
SHAPES = [(300, 132), (70, 33), (1, 5), (), (0, 8), (3, 40, 36)]

each_quantizer = pytest.mark.parametrize("name", QUANTIZERS)
each_format = pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
with_and_without_masters = pytest.mark.parametrize("masters", [True, False])


def normal(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def parameter(values):
    return torch.nn.Parameter(values)


def bytes_of(*tensors):
    """All bytes of tensors, also of quantized ones."""
    parts = []
    for t in tensors:
        t = t.detach()
        if isinstance(t, QuantizedTensor):
            parts += [x for p in t.planes if p is not None for x in (p.data, p.scale)]
            parts += t._store.delayed or ()
        else:
            parts.append(t)
    return [p.cpu().contiguous().reshape(-1).view(torch.uint8).clone() for p in parts]


def assert_same(got, want):
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(a, b), f"tensor {i} differs in {(a != b).sum()} of {a.numel()} bytes"


def everything(optimizer):
    """The bytes of all parameters and states."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    states = [optimizer.state[p][k] for p in params for k in sorted(optimizer.state[p])]
    return bytes_of(*params, *states)


def train(optimizer, steps, grad_dtype=torch.float32, seed=0):
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        for i, p in enumerate(params):
            grad = normal(p.shape, 1000 * seed + 100 * step + i, grad_dtype)
            # Autograd would refuse another dtype than the parameter's; FSDP2 reduces in one.
            p.grad = None
            p.grad_dtype = grad_dtype
            p.grad = grad.to(p.device)
        optimizer.step()


# --- against torch ------------------------------------------------------------------------------


def exact(group, p, g, m, v, step):
    """A step in float64, and how far float32 may be from it: half an ulp for each rounding.

    The weight: its factor, the product and the difference. The update: its numerator has four
    roundings of at most |m| + |g|; the denominator ten less, of which none cancels.
    """
    p, g, m, v = (t.double() for t in (p, g, m, v))
    (beta1, beta2), lr = group["betas"], group["lr"]
    g = -g if group["maximize"] else g
    largest = m.abs() + g.abs()
    w = p * (1 - lr * group["weight_decay"])
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + (1 - beta2) * g * g
    size, denominator = lr / (1 - beta1**step), (v / (1 - beta2**step)).sqrt() + group["eps"]
    bound = EPS32 / 2 * (3 * w.abs() + 15 * size * largest / denominator)
    return w - size * m / denominator, m, v, bound, EPS32 / 2 * 4 * largest


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.3, 0.95), (0.0, 0.5)])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_plain_float32_is_as_near_to_exact_as_its_roundings_and_torch_is_no_nearer_than_that(
    maximize, betas, weight_decay
):
    options = {"lr": 1e-2, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
    ours, theirs = parameter(normal((64, 33), 1)), parameter(normal((64, 33), 1))
    a, b = AdamW([ours], **options), torch.optim.AdamW([theirs], **options)
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
        # From the same place again, so that nothing adds up.
        theirs.data.copy_(ours.detach())
        m, v = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
        b.state[theirs]["exp_avg"].copy_(m)
        b.state[theirs]["exp_avg_sq"].copy_(v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@with_and_without_masters
def test_low_precision_parameters_are_the_rounded_float32_step(dtype, grad_dtype, masters):
    start = normal((40, 33), 1).to(dtype)
    low, high = parameter(start.clone()), parameter(start.float())
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


def test_bfloat16_moments_are_rounded_float32_ones_and_steps_use_them_unrounded():
    p, q = parameter(normal((40, 33), 1)), parameter(normal((40, 33), 1))
    a, b = AdamW([p], state_dtype=torch.bfloat16), AdamW([q])
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
def test_fp8_weights_are_what_the_quantizer_makes_of_the_float32_step(
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
        assert_same(bytes_of(*weight._store.tensors()), bytes_of(*want._store.tensors()))
        for key in ("exp_avg", "exp_avg_sq"):
            assert_same(bytes_of(a.state[weight][key]), bytes_of(b.state[values][key]))
        if masters:
            assert torch.equal(a.state[weight]["master"], values.detach())
        else:
            values.data.copy_(want.dequantize(torch.float32))
    if name == "delayed":
        # The first cast, of the initial values, counted in one of the two.
        seen = max(other.amax, normal(shape, 1).abs().max()) if weight.numel() else other.amax
        assert torch.equal(quantizer.amax, seen)
