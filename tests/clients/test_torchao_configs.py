"""The names and fields of torchao's configs, and models that torchao quantizes after training."""

from __future__ import annotations

import copy
import dataclasses
import os
import re
import subprocess
import sys

import pytest
import torch
from harness import ROOT, need
from torch import nn

from convert.torchao_configs import NAMED
from fp8rs import convert_to_float8_training, convert_to_high_precision

need("torchao", "0.18")

# Importing torchao emits many warnings.
pytestmark = pytest.mark.filterwarnings("default")


def recipe_of(config):
    return convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config=config)[0].recipe


def test_recipe_names_equal_torchaos():
    from torchao import float8

    assert {name.value for name in float8.config.Float8LinearRecipeName} == set(NAMED)


@pytest.mark.parametrize("name", NAMED)
def test_configs_equal_the_copies(name):
    from torchao.float8 import Float8LinearConfig

    assert recipe_of(Float8LinearConfig.from_recipe_name(name)) == recipe_of(NAMED[name])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_wgrad_of_rowwise_with_gw_hp_equals_torchaos(dtype):
    """torchao is the reference: its wgrad multiplies the same operands."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8 import convert_to_float8_training as convert_by_torchao

    name = "rowwise_with_gw_hp"
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 48)).to(dtype)
    ours = convert_to_float8_training(
        copy.deepcopy(plain), config=Float8LinearConfig.from_recipe_name(name)
    )
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(name), emulate=True)
    theirs = convert_by_torchao(copy.deepcopy(plain), config=config)
    x = torch.randn(32, 64).to(dtype)
    dy = torch.randn(32, 48).to(dtype)
    results = []
    for model in (ours, theirs, plain):
        x = x.detach().requires_grad_()
        y = model(x)
        y.backward(dy)
        results.append((y.detach(), x.grad, model[0].weight.grad))
    (y, dx, dw), (their_y, their_dx, their_dw), (_, exact_dx, exact_dw) = results
    assert torch.equal(dw, exact_dw)
    torch.testing.assert_close(dw, their_dw)
    torch.testing.assert_close(y, their_y, rtol=2**-7, atol=2**-7)
    # torchao's dgrad has one scale per tensor for the weight.
    assert (dx - exact_dx).norm() < 1.1 * (their_dx - exact_dx).norm()


@pytest.mark.parametrize("fp8_weights", [False, True])
@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("config", ["Float8WeightOnlyConfig", "Int8WeightOnlyConfig"])
def test_a_trained_model_is_quantized_by_torchao(config, back, fp8_weights):
    """With or without a conversion to high precision, the layers compute torchao's products."""
    from torchao import quantization

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    convert_to_float8_training(model, fp8_weights=fp8_weights)
    plain = convert_to_high_precision(copy.deepcopy(model))
    if back:
        convert_to_high_precision(model)
    for module in (plain, model):
        quantization.quantize_(module, getattr(quantization, config)())
    x = torch.randn(32, 64)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


@pytest.mark.long
def test_the_example_trains_alike_in_both_libraries():
    losses = {}
    for library in ("torchao", "fp8rs"):
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "from_torchao.py"), library],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        losses[library] = [float(x) for x in re.findall(r"loss (\S+)", done.stdout)]
    assert len(losses["fp8rs"]) == 4
    assert losses["fp8rs"] == pytest.approx(losses["torchao"], rel=0.01)
