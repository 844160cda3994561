"""Nested inputs: torch's own encoder makes them."""

import pytest
import torch
from torch import nn

import fp8rs
from cases import skip_without_block_gemms
from oracle.compare import relative

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def data(device, *shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


@pytest.mark.parametrize("recipe", ["current", "delayed", "rowwise", "block", "mxfp8"])
def test_a_nested_input(device, recipe):
    """As ``nn.TransformerEncoder`` makes it of a padding mask."""
    if recipe == "block":
        skip_without_block_gemms(device)
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(32, 48)).to(device)
    fp8rs.convert_to_float8_training(layer, recipe=recipe)
    rows = [data(device, n, 32, seed=n).requires_grad_() for n in (3, 5, 0, 1)]
    y = layer(torch.nested.as_nested_tensor(rows))
    torch.nested.to_padded_tensor(y, 0.0).sum().backward()
    found = torch.cat(y.unbind()), torch.cat([x.grad for x in rows]), layer[0].weight.grad
    layer.zero_grad()
    flat = torch.cat(rows).detach().requires_grad_()
    expected = layer(flat)
    expected.sum().backward()
    assert torch.equal(found[0], expected)
    assert torch.equal(found[1], flat.grad)
    assert torch.equal(found[2], layer[0].weight.grad)


def test_an_encoder_with_a_padding_mask_whose_layers_have_hooks(device):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 2).to(device).eval()
    x, mask = data(device, 2, 6, 32), torch.zeros(2, 6, dtype=torch.bool, device=device)
    mask[1, 4:] = True
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=mask)
        fp8rs.convert_to_float8_training(model)
        for part in model.layers:
            part.linear1.register_forward_pre_hook(lambda *args: None)
        got = model(x, src_key_padding_mask=mask)
    assert not torch.equal(got, expected), "FP8"
    assert relative(got, expected) < 0.05
