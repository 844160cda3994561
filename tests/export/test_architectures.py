"""Every mixture of experts of transformers is exported as its own ``save_pretrained`` stores it."""

from __future__ import annotations

import json

import pytest
import torch

import fp8rs
from fp8rs.export import load, save_pretrained, tensors
from language_models import MIXTURES, tiny_mixture

pytest.importorskip("transformers", "5.0")

from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

pytestmark = [
    pytest.mark.newest_torch,
    pytest.mark.filterwarnings("ignore:lm_head is not converted"),
]

#: One architecture of each kind of files. The second tier tests the others.
KINDS = {
    "qwen3_moe": "a matrix for each expert",
    "granitemoe": "renamed stacks",
    "llama4_text": "transposed stacks",
    "lara_mini": "layers joined into one tensor",
    "bailing_hybrid": "a tensor divided along its first dimension",
    "inkling2_text": "interleaved rows and a padded vocabulary",
}
every_architecture = pytest.mark.parametrize(
    "model_type",
    [
        pytest.param(name, marks=() if name in KINDS else pytest.mark.second_tier)
        for name in MIXTURES
    ],
)

#: Architectures whose experts are (E, in_features, out_features).
TRANSPOSED = {"aria_text", "gpt_oss", "llama4_text"}


def converted(model_type):
    """Return a converted model in bf16 with the values of `tiny_mixture`."""
    model = tiny_mixture(model_type).bfloat16()
    return fp8rs.convert_to_float8_training(
        model, recipe="rowwise", filter_fqns=["lm_head"], experts="gather"
    )


def own_files(model, folder):
    """Return the tensors that transformers writes."""
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def assert_close(values, expected):
    """Check values that were rounded to E4M3 with scales of rows."""
    values = values.float()
    expected = expected.float()
    error = (values - expected).abs()
    assert (error <= expected.abs() / 16 + expected.abs().max() * 2**-9).all()


@every_architecture
def test_files_in_high_precision_equal_those_of_transformers(model_type, tmp_path):
    expected = own_files(tiny_mixture(model_type).bfloat16(), tmp_path / "own")
    model = converted(model_type)
    exported = dict(tensors(model, "bf16"))
    assert exported.keys() == expected.keys()
    for name, tensor in expected.items():
        assert exported[name].dtype == tensor.dtype
        assert torch.equal(exported[name], tensor), name

    save_pretrained(model, tmp_path / "exported", "bf16")
    state = model.state_dict()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16)
    for name, tensor in read.state_dict().items():
        assert torch.equal(tensor.float(), state[name].float()), name

    other = converted(model_type)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    loaded = load(other, tmp_path / "own")
    assert loaded.missing_keys == loaded.unexpected_keys == []
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@every_architecture
def test_fp8_files_have_the_same_names_or_are_refused(model_type, tmp_path):
    expected = own_files(tiny_mixture(model_type).bfloat16(), tmp_path / "own")
    model = converted(model_type)
    if model_type in TRANSPOSED:
        with pytest.raises(ValueError, match=r"gate_up_proj has transposed matrices"):
            save_pretrained(model, tmp_path / "exported", "fp8-row")
        assert not (tmp_path / "exported").exists()
        return

    save_pretrained(model, tmp_path / "exported", "fp8-row")
    files = load_file(tmp_path / "exported" / "model.safetensors")
    scales = {name for name in files if name.endswith("_scale") and name not in expected}
    assert files.keys() - scales == expected.keys()
    for name, tensor in expected.items():
        values = files[name].float()
        if f"{name}_scale" in scales:
            values = values * files[f"{name}_scale"]
        assert_close(values, tensor)

    other = converted(model_type)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    loaded = load(other, tmp_path / "exported")
    assert loaded.missing_keys == loaded.unexpected_keys == []
    state = model.state_dict()
    for name, tensor in other.state_dict().items():
        assert_close(tensor, state[name])


@pytest.mark.parametrize("format", ["bf16", "fp8-block"])
def test_routers_choose_the_same_experts_after_an_export(format, tmp_path):
    """Correction biases differ by less than bf16's steps at 7, where published files have them."""
    model = tiny_mixture("deepseek_v3").bfloat16()
    pinned = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("gate.weight", "e_score_correction_bias")):
            tensor.data = torch.rand(tensor.shape) / 32 + 6.9
            pinned[name] = tensor.data.clone()
    fp8rs.convert_to_float8_training(model, recipe="block", filter_fqns=["lm_head"])
    assert pinned and all(dict(tensors(model, format))[n].equal(t) for n, t in pinned.items())

    save_pretrained(model, tmp_path, format)
    other = tiny_mixture("deepseek_v3").bfloat16()
    for name, tensor in (*other.named_parameters(), *other.named_buffers()):
        if name in pinned:
            tensor.data = tensor.data.float()
    load(fp8rs.convert_to_float8_training(other, recipe="block"), tmp_path)
    state = other.state_dict()
    assert all(torch.equal(state[name], values) for name, values in pinned.items())


@pytest.mark.parametrize(
    "model_type, gate", [("qwen2_moe", "mlp.shared_expert_gate"), ("hunyuan_v1_moe", "mlp.gate.wg")]
)
@pytest.mark.parametrize(
    "format, key", [("fp8-row", "ignore"), ("fp8-block", "modules_to_not_convert")]
)
def test_routers_and_gates_are_on_the_list_of_layers_in_high_precision(
    model_type, gate, format, key, tmp_path
):
    save_pretrained(converted(model_type), tmp_path, format)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    files = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.{gate}"
        assert name in config[key]
        assert files[f"{name}.weight"].dtype in (torch.bfloat16, torch.float32)
