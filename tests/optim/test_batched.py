"""AdamW of batched FP8 weights (E, N, K): each matrix is stepped as a weight alone."""

import copy

import pytest
import torch

from fp8rs.optim import AdamW
from fp8rs.quantize import formats
from fp8rs.quantize.spec import QuantSpec
from fp8rs.tensor.quantizer import Quantizer
from oracle.compare import same

E4M3 = torch.float8_e4m3fn
SHAPE = (3, 45, 96)

each_format = pytest.mark.parametrize("format", formats.FORMATS.values(), ids=lambda f: f.name)


def parameters(device, format, batched, columnwise):
    """A batched weight as one parameter, or as a parameter for each matrix."""
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(device)
    quantizer = Quantizer(QuantSpec(format, E4M3, batched=True), columnwise=columnwise)
    tensors = [values] if batched else list(values)
    return [torch.nn.Parameter(quantizer(x.bfloat16())) for x in tensors]


def gradients(device, step):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(step)).to(device).bfloat16()


@each_format
@pytest.mark.parametrize("columnwise", [False, True], ids=["one plane", "both planes"])
@pytest.mark.parametrize("master_weights", [True, False], ids=["masters", "no masters"])
def test_each_matrix_has_the_bytes_of_a_parameter_alone(device, format, columnwise, master_weights):
    (batch,), singles = (parameters(device, format, b, columnwise) for b in (True, False))
    assert same(torch.stack([p.dequantize() for p in singles]), batch.dequantize())
    before = batch.dequantize()
    optimizers = [
        AdamW(params, lr=1e-2, master_weights=master_weights, stochastic_rounding=False)
        for params in ([batch], singles)
    ]
    for step in range(3):
        batch.grad = gradients(device, step)
        for p, grad in zip(singles, batch.grad, strict=True):
            p.grad = grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for name in ("rowwise", "columnwise"):
        plane = getattr(batch, name)
        for i, p in enumerate(singles):
            single = getattr(p, name)
            assert (single is None) == (plane is None)
            if plane is not None:
                assert same(plane.data[i], single.data) and same(plane.scale[i], single.scale)
    assert not same(batch.dequantize(), before)


@each_format
def test_masters_follow_writes_to_a_matrix(device, format):
    (weight,) = parameters(device, format, True, True)
    optimizer = AdamW([weight], lr=1e-3, stochastic_rounding=False)
    weight.grad = gradients(device, 0)
    optimizer.step()
    old = copy.deepcopy(weight).dequantize()
    with torch.no_grad():
        weight[1].copy_(torch.full(SHAPE[1:], 7.0, device=device))
    weight.grad = torch.zeros_like(weight.grad)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    new = weight.dequantize()
    assert (new[1] - 7).abs().max() < 0.5
    assert same(new[0], old[0]) and same(new[2], old[2])


@each_format
@pytest.mark.parametrize("shape", [(0, 5, 7), (2, 0, 16)], ids=str)
def test_empty_batches_are_stepped(device, format, shape):
    quantizer = Quantizer(QuantSpec(format, E4M3, batched=True), columnwise=False)
    weight = torch.nn.Parameter(quantizer(torch.zeros(shape, device=device)))
    weight.grad = torch.zeros(shape, device=device)
    AdamW([weight]).step()
    assert weight.rowwise.data.shape == shape
