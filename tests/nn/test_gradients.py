"""FP8 training equals a simulation in plain torch: rounded operands, fp32 accumulation."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cases import skip_without_block_gemms
from fp8rs.convert.convert import convert_to_float8_training
from fp8rs.quantize.recipes import Float8CurrentScaling
from oracle.compare import relative
from oracle.elements import E4M3, E5M2
from oracle.linear import linear


class Mlp(nn.Module):
    """A gated residual block with sizes that need padding."""

    def __init__(self, linear=None):
        super().__init__()
        self.norm = nn.LayerNorm(40)
        self.gate = nn.Linear(40, 72)
        self.up = nn.Linear(40, 72, bias=False)
        self.down = nn.Linear(72, 40)
        self.linear = linear or (lambda module, x: module(x))

    def forward(self, x):
        h = self.norm(x)
        gate = self.linear(self.gate, h)
        up = self.linear(self.up, h)
        return x + self.linear(self.down, nn.functional.silu(gate) * up)


class Codes(TorchDispatchMode):
    """Records the outputs and writes of every quantizing operator, in order."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "fp8rs":
            name = func._schema.name.split("::")[1]
            if name.lstrip("_").startswith(("quantize", "multi_quantize", "rebase")):
                written = [
                    value
                    for value, argument in zip(args, func._schema.arguments, strict=False)
                    if argument.alias_info is not None
                ]
                self.calls.append((name, [t.clone() for t in tensors((out, written))]))
        return out

    def by(self, name):
        return [outputs for by, outputs in self.calls if by == name]


def tensors(value):
    """Yield the tensors in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    return [t for item in value or () for t in tensors(item)]


def models(device, fp8_format="e4m3", dtype=torch.float32):
    """Build a model in FP8, simulated and in high precision."""
    torch.manual_seed(0)
    grad_dtype = E4M3 if fp8_format == "e4m3" else E5M2

    def simulate(module, x):
        return linear(x, module.weight, module.bias, grad_dtype=grad_dtype)

    fp8 = Mlp()
    simulated = Mlp(simulate)
    plain = Mlp()
    for model in (fp8, simulated, plain):
        model.load_state_dict(plain.state_dict())
        model.to(device, dtype)
    convert_to_float8_training(
        fp8,
        # The simulation accumulates in fp32. FP8 tensor cores do so approximately.
        recipe=Float8CurrentScaling(fp8_format=fp8_format, fast_accumulation=(False, False, False)),
        enable_fsdp_float8_all_gather=False,
    )
    return fp8, simulated, plain


def run(model, dtype=torch.float32):
    device = model.norm.weight.device
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(6, 11, 40, generator=generator).to(device, dtype)
    target = torch.randn(6, 11, 40, generator=generator).to(device, dtype)
    loss = (model(x) - target).float().square().mean()
    model.zero_grad()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
def test_gradients_equal_the_simulation(device, fp8_format):
    fp8, simulated, plain = models(device, fp8_format)
    loss, grads = run(fp8)
    expected_loss, expected = run(simulated)
    _, exact = run(plain)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=0)
    # FP8 tensor cores round partial sums to about 14 bits. The norms of this model amplify it.
    limit = 2e-3 if device.type == "cpu" else 1e-2
    for a, b in zip(grads, expected, strict=True):
        assert relative(a, b) < limit

    def error(gs):
        return relative(
            torch.cat([g.flatten() for g in gs]), torch.cat([g.flatten() for g in exact])
        )

    assert error(grads) == pytest.approx(error(expected), rel=0.02)
    assert error(grads) > 0.01, "the operands are rounded"


def keep_operands(model):
    """Record the inputs and output gradients of the layers in one forward and backward."""
    inputs = {}
    gradients = {}

    def keep(name, x, y):
        inputs[name] = x.detach().flatten(0, -2)
        y.register_hook(lambda dy: gradients.update({name: dy.flatten(0, -2)}))

    for name in ("gate", "up", "down"):
        getattr(model, name).register_forward_hook(
            lambda layer, args, y, name=name: keep(name, args[0], y)
        )
    return inputs, gradients


@pytest.mark.parametrize("fp8_format", ["e4m3", "hybrid"])
def test_operands_equal_the_simulation(device, fp8_format):
    """Compare layer by layer with equal inputs, so that summation order does not matter."""
    from oracle.tensorwise import quantize, scale_from_amax

    fp8, _, _ = models(device, fp8_format)
    inputs, gradients = keep_operands(fp8)
    with Codes() as codes:
        run(fp8)
    operands = codes.by("quantize_current")
    remade = codes.by("quantize")
    weights = {name: getattr(fp8, name).weight.detach() for name in ("gate", "up", "down")}
    # In call order. Autograd chooses the order of the gradients of up and gate.
    forward = [inputs["gate"], weights["gate"], weights["up"], inputs["down"], weights["down"]]
    assert inputs["up"].data_ptr() == inputs["gate"].data_ptr(), "quantized once"
    backward = [gradients["down"], gradients["up"], gradients["gate"]]
    assert (len(operands), len(remade)) == (len(forward) + len(backward), len(weights))
    grad_dtype = E4M3 if fp8_format == "e4m3" else E5M2
    dtypes = [E4M3] * len(forward) + [grad_dtype] * len(backward)
    compared = 0
    for x, dtype, (row, col, scale) in zip(forward + backward, dtypes, operands, strict=True):
        expected = scale_from_amax(x.abs().max(), dtype)
        assert torch.equal(scale, expected)
        bytes_ = quantize(x, expected, dtype)
        for plane, wanted in ((row, bytes_), (col, bytes_.t())):
            if plane.numel():
                assert plane.dtype == dtype
                rows, cols = wanted.shape
                got = plane.view(torch.uint8).flatten(0, -2)
                assert torch.equal(got[:rows, :cols], wanted)
                # On a GPU, tokens are padded with zeros for wgrad.
                assert not got[rows:].any() and not got[:, cols:].any()
                compared += 1
    # Inputs and gradients have both planes. Weights have only the rowwise plane, because the
    # backward computes the plane for dgrad.
    assert compared == 2 * (2 + 3) + 3
    for name, (_, col) in zip(("down", "up", "gate"), remade, strict=True):
        expected = scale_from_amax(weights[name].abs().max(), E4M3)
        wanted = quantize(weights[name], expected, E4M3).t()
        assert torch.equal(col.view(torch.uint8), wanted)


def test_bf16_gradients_equal_the_simulation(device):
    fp8, simulated, _ = models(device, dtype=torch.bfloat16)
    loss, grads = run(fp8, torch.bfloat16)
    expected_loss, expected = run(simulated, torch.bfloat16)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2, atol=0)
    for a, b in zip(grads, expected, strict=True):
        assert relative(a, b) < 2e-2


@pytest.mark.parametrize("recipe", ["current", "delayed"])
def test_training_lowers_the_loss_as_high_precision_does(device, recipe):
    finals = {}
    for kind in ("plain", recipe):
        torch.manual_seed(0)
        model = Mlp().to(device)
        if kind != "plain":
            convert_to_float8_training(model, recipe=kind, enable_fsdp_float8_all_gather=False)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        first = None
        for _ in range(60):
            loss, _ = run(model)
            optimizer.step()
            first = loss if first is None else first
        finals[kind] = (loss / first).item()
    assert finals["plain"] < 0.5
    assert finals[recipe] < finals["plain"] + 0.05


#: The quantizations of a step, by operator: inputs, weights, gradients, and weights for dgrad.
OPERATORS = {
    "current": {"quantize_current": 2 + 3 + 3, "quantize": 3},
    "delayed": {"_quantize_delayed": 2 + 3 + 3, "quantize": 3},
    "rowwise": {"quantize_blocks": 2 + 3 + 3 + 3},
    "block": {"quantize_blocks": 2 + 3 + 3 + 3},
    "mxfp8": {"quantize_blocks": 2 + 3 + 3 + 3},
    "rowwise_with_gw_hp": {"quantize_blocks": 2 + 3 + 3 + 3},
}


@pytest.mark.parametrize("recipe", list(OPERATORS))
def test_two_runs_with_one_seed_give_the_same_bytes(device, recipe):
    """All quantized activations, weights and gradients have equal bytes."""
    if recipe == "block":
        skip_without_block_gemms(device)

    def train():
        torch.manual_seed(0)
        model = Mlp().to(device)
        convert_to_float8_training(model, recipe=recipe, enable_fsdp_float8_all_gather=False)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        losses = []
        with Codes() as codes:
            for _ in range(4):
                losses.append(run(model)[0])
                optimizer.step()
        return losses, codes, [p.detach().clone() for p in model.parameters()]

    torch.use_deterministic_algorithms(True)
    try:
        first = train()
        second = train()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first[0], second[0], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first[2], second[2], strict=True))
    for operator, count in OPERATORS[recipe].items():
        assert len(first[1].by(operator)) == 4 * count
    for (name, a), (other, b) in zip(first[1].calls, second[1].calls, strict=True):
        assert name == other
        assert sum(t.numel() for t in a) > 0
        for x, y in zip(a, b, strict=True):
            assert torch.equal(
                x.reshape(-1).contiguous().view(torch.uint8),
                y.reshape(-1).contiguous().view(torch.uint8),
            )
