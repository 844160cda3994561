"""transformers and compressed-tensors read exported files and get the exact values."""

from __future__ import annotations

import json
import os
import resource
import signal

import pytest
import torch
from safetensors import safe_open

import fp8rs
from distributed import ranks
from distributed.models import make, shard
from fp8rs.export import save_pretrained, tensors
from fp8rs.export.files import ExportWriter
from language_models import mixtral

pytest.importorskip("transformers", "5.0")
pytest.importorskip("compressed_tensors", "0.15")

from transformers import (
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    LlamaConfig,
    LlamaForCausalLM,
)

pytestmark = pytest.mark.newest_torch

#: For each format: the recipe that has it, and the argument with which transformers dequantizes it.
CASES = {
    "bf16": ("current", {}, lambda: None),
    "fp8-block": ("block", {}, lambda: FineGrainedFP8Config(dequantize=True)),
    "fp8-block ue8m0": (
        "current",
        {"scale_fmt": "ue8m0"},
        lambda: FineGrainedFP8Config(dequantize=True, scale_fmt="ue8m0"),
    ),
    "fp8-row": ("rowwise", {}, lambda: CompressedTensorsConfig(dequantize=True)),
    "fp8-tensor": ("delayed", {}, lambda: CompressedTensorsConfig(dequantize=True)),
    "mxfp8": ("mxfp8", {}, lambda: CompressedTensorsConfig(dequantize=True)),
}


def llama(recipe, **options):
    """Return a model whose sizes are multiples of 128, as transformers requires for blocks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=64,
        **{"tie_word_embeddings": False, **options},
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    return fp8rs.convert_to_float8_training(model, recipe=recipe, filter_fqns=["lm_head"])


def values(exported_tensors, name):
    """Compute a weight's values by the format's conventions, without fp8rs."""
    codes = exported_tensors[name].float()
    scales = [t for n, t in exported_tensors.items() if n.startswith(name + "_")]
    if not scales:
        return codes
    scale = scales[0]
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.double() - 127).float().repeat_interleave(32, 1)
    elif name + "_scale_inv" in exported_tensors:
        scale = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        scale = scale[: codes.shape[0], : codes.shape[1]]
    return codes * scale


SCALES = ("_scale", "_scale_inv")


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("case", list(CASES))
def test_transformers_reads_the_exported_values(case, tmp_path):
    recipe, options, reader = CASES[case]
    model = llama(recipe)
    save_pretrained(model, tmp_path, case.split()[0], max_shard_bytes=200_000, **options)
    stored = dict(tensors(model, case.split()[0], **options))
    config = reader()
    extra = {} if config is None else {"quantization_config": config}
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, **extra)
    parameters = dict(read.named_parameters())
    names = [name for name in stored if not name.endswith(SCALES)]
    # transformers 5.17 keeps the scales of dequantized weights.
    assert sorted(name for name in parameters if not name.endswith(SCALES)) == sorted(names)
    for name in names:
        assert torch.equal(parameters[name], values(stored, name).to(torch.bfloat16)), name


@pytest.mark.parametrize("format", ["fp8-row", "fp8-tensor", "mxfp8"])
def test_transformers_keeps_the_exported_codes(format, tmp_path):
    """Without ``dequantize=True``, codes and scales have the shapes that its layers expect."""
    model = llama("current")
    save_pretrained(model, tmp_path, format)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    stored = {n: t.clone() for n, t in tensors(model, format)}
    for name, layer in read.model.named_modules():
        if not isinstance(layer, torch.nn.Linear):
            continue
        codes, scale = (stored[f"model.{name}.{key}"] for key in ("weight", "weight_scale"))
        loaded = layer.state_dict()
        assert loaded["weight"].dtype == codes.dtype == torch.float8_e4m3fn
        assert torch.equal(loaded["weight"].view(torch.uint8), codes.view(torch.uint8))
        # transformers converts scales to the dtype of the model.
        assert torch.equal(loaded["weight_scale"], scale.to(loaded["weight_scale"].dtype))


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("format", ["fp8-block", "fp8-row"])
def test_layers_in_high_precision_are_listed(format, tmp_path):
    model = mixtral("cpu", hidden_size=128, intermediate_size=128).to(torch.bfloat16)
    keep = ["lm_head", "v_proj"]
    fp8rs.convert_to_float8_training(model, recipe="block", filter_fqns=keep)
    save_pretrained(torch.compile(model), tmp_path, format)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["MixtralForCausalLM"]
    key = {"fp8-block": "modules_to_not_convert", "fp8-row": "ignore"}[format]
    listed = written["quantization_config"][key]
    layer = "model.layers.0."
    high_precision = [layer + "self_attn.v_proj", layer + "mlp.gate", "lm_head"]
    files = [layer + "block_sparse_moe.gate"]
    assert sorted(name for name in listed if "experts" not in name) == sorted(
        high_precision + files
    )
    extra = {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, **(extra if format == "fp8-block" else {})
    )
    for name in high_precision:
        for key, parameter in read.get_submodule(name).named_parameters():
            assert torch.equal(parameter, model.get_submodule(name).get_parameter(key))


@pytest.mark.parametrize("format", ["fp8-block", "fp8-tensor"])
def test_a_tied_head_is_read(format, tmp_path):
    model = llama("current", tie_word_embeddings=True)
    save_pretrained(model, tmp_path, format)
    assert "lm_head.weight" not in dict(tensors(model, format))
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert read.lm_head.weight is read.model.embed_tokens.weight
    assert torch.equal(read.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize("format", ["fp8-row", "fp8-tensor", "mxfp8"])
def test_compressed_tensors_decompresses_the_exported_values(format, tmp_path):
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = llama("current")
    save_pretrained(model, tmp_path, format)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    written.pop("quant_method")
    scheme = QuantizationConfig(**written).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(written["format"])
    exported_tensors = dict(tensors(model, format))
    name = "model.layers.0.mlp.down_proj.weight"
    state = {"weight": exported_tensors[name], "weight_scale": exported_tensors[name + "_scale"]}
    decompressed = compressor.decompress(state, scheme)["weight"].float()
    # The library multiplies in the dtype of the scales. The scales of MXFP8 are powers of two in
    # bfloat16.
    assert torch.equal(decompressed, values(exported_tensors, name))


def test_the_index_lists_every_tensor_and_files_have_the_requested_size(tmp_path):
    model = llama("current")
    save_pretrained(model, tmp_path, "fp8-tensor", max_shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    exported_tensors = {n: t.clone() for n, t in tensors(model, "fp8-tensor")}
    assert index["weight_map"].keys() == exported_tensors.keys()
    total = 0
    for file in set(index["weight_map"].values()):
        with safe_open(tmp_path / file, "pt") as opened:
            file_tensors = {n: opened.get_tensor(n) for n in opened.keys()}  # noqa: SIM118
        assert file_tensors.keys() == {n for n, f in index["weight_map"].items() if f == file}
        nbytes = sum(t.nbytes for t in file_tensors.values())
        assert nbytes <= 100_000 or len(file_tensors) == 1
        total += nbytes
        for name, tensor in file_tensors.items():
            assert torch.equal(
                tensor.view(-1).view(torch.uint8), exported_tensors[name].view(-1).view(torch.uint8)
            )
    assert total == index["metadata"]["total_size"]


def test_a_second_export_removes_the_files_of_the_first(tmp_path):
    model = llama("current")
    save_pretrained(model, tmp_path, "fp8-tensor", max_shard_bytes=100_000)
    (tmp_path / "tokenizer.json").write_text("{}")
    save_pretrained(model, tmp_path, "bf16")
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())


def test_a_full_disk_leaves_the_previous_export(tmp_path):
    model = llama("current")
    save_pretrained(model, tmp_path, "fp8-tensor")
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limit[1]))
    try:
        with pytest.raises(OSError, match="too large"):
            save_pretrained(model, tmp_path, "bf16")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


@ranks(2, cuda=False)
def test_an_error_on_the_writing_rank_is_raised_on_all(rig):
    model = shard(make((64,), recipe="current"), rig)
    with pytest.raises(OSError, match="/proc/nowhere"):
        save_pretrained(model, "/proc/nowhere", "fp8-tensor")
    # This is checked before anything is gathered.
    with pytest.raises(TypeError, match="not int"):
        save_pretrained(model, 5, "fp8-tensor")


class ConnectionLost(OSError):
    """An error that cannot be pickled, whose class takes other arguments than a text."""

    def __init__(self, host, reconnect):
        super().__init__(f"lost the connection to {host}")
        self.reconnect = reconnect


@ranks(2, cuda=False)
def test_an_error_of_a_store_is_raised_on_all(rig):
    def add(self, name, tensor):
        raise ConnectionLost("bucket", lambda: None)

    model = shard(make((64,), recipe="current"), rig)
    original = ExportWriter.add
    ExportWriter.add = add
    prefix = "" if rig.rank == 0 else "rank 0: "
    try:
        with pytest.raises(OSError, match=f"^{prefix}lost the connection to bucket"):
            save_pretrained(model, f"memory://bucket/{rig.rank}", "fp8-tensor")
    finally:
        ExportWriter.add = original
