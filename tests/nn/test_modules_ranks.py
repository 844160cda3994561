"""Transformer layers on several ranks: FSDP2, HSDP, DCP, tensor and sequence parallelism."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fp8rs
from cases import each_kind_of_recipe
from distributed import ranks
from distributed.folders import shared_folder
from distributed.models import RECIPES
from fp8rs.nn import TransformerLayer, rotary_pos_emb
from fp8rs.optim import AdamW
from fp8rs.tensor_parallel import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
)
from internals import counted_fusions

WIDTH, HEADS, LENGTH = 64, 4, 16
every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
each_norm = pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
both_weights = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])


class Model(nn.Module):
    """An encoder layer and a decoder layer."""

    def __init__(self, normalization="LayerNorm", device=None):
        super().__init__()
        options = {
            "num_gqa_groups": 2,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "normalization": normalization,
            "device": device,
        }
        self.encoder = TransformerLayer(WIDTH, 96, HEADS, activation="swiglu", **options)
        self.decoder = TransformerLayer(WIDTH, 96, HEADS, layer_type="decoder", **options)

    def forward(self, x):
        rotation = rotary_pos_emb(x.shape[1], WIDTH // HEADS, device=x.device)
        h = self.encoder(x, rotary_pos_emb=rotation)
        return self.decoder(x, encoder_output=h, rotary_pos_emb=rotation)


def build(rig, recipe, normalization="LayerNorm", seed=0, **convert):
    torch.manual_seed(seed)
    model = Model(normalization).to(rig.device)
    if recipe is not None:
        fp8rs.convert_to_float8_training(model, recipe=RECIPES[recipe], **convert)
    return model


def shard(model, mesh):
    for layer in (model.encoder, model.decoder):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def batch(rig, n=0):
    """Return a batch that is equal on all ranks, so that they compute the bytes of one process."""
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(n)).to(rig.device)


def full_value(t):
    t = t.detach()
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def train(model, rig, steps=3):
    """Train and return the outputs and whole gradients of each step."""
    optimizer = AdamW(model.parameters(), 1e-3)
    results = []
    for n in range(steps):
        y = model(batch(rig, n))
        y.square().mean().backward()
        results.append([y.detach(), *(full_value(p.grad) for p in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    return results


def assert_same(a, b):
    for step, (left, right) in enumerate(zip(a, b, strict=True)):
        for i, (x, y) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(x, y), (step, i)


@ranks(2)
@each_kind_of_recipe
@each_norm
@both_weights
def test_sharded_layers_train_as_one_process_does(rig, recipe, normalization, fp8_weights):
    reference = build(rig, recipe, normalization, fp8_weights=fp8_weights)
    model = build(rig, recipe, normalization, fp8_weights=fp8_weights)
    assert_same(train(shard(model, rig.mesh()), rig), train(reference, rig))


@ranks(2)
@pytest.mark.parametrize("recipe", ["current", "rowwise"])
@both_weights
def test_norms_and_activations_of_sharded_layers_are_fused(rig, recipe, fp8_weights):
    """Gathered in bf16. A decoder has three norms, and its activation is not gated."""
    model = build(rig, recipe, fp8_weights=fp8_weights)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in (model.encoder, model.decoder):
        fully_shard(layer, mesh=rig.mesh(), mp_policy=policy)
    fully_shard(model, mesh=rig.mesh(), mp_policy=policy)
    with counted_fusions() as decisions:
        model(batch(rig)).sum().backward()
    assert decisions == [recipe == "current"] * 6


@ranks(4)
@every_recipe
@both_weights
def test_hybrid_sharded_layers_train_as_one_process_does(rig, recipe, fp8_weights):
    mesh = rig.mesh(2, 2, names=("replicas", "shards"))
    reference = build(rig, recipe, fp8_weights=fp8_weights)
    model = build(rig, recipe, fp8_weights=fp8_weights)
    assert_same(train(shard(model, mesh), rig), train(reference, rig))


@ranks(2)
@each_kind_of_recipe
@both_weights
def test_checkpoints_of_sharded_layers(rig, recipe, fp8_weights):
    """DCP saves under the names of the unconverted model and loads into other values."""
    folder = shared_folder(rig)
    model, other = (
        shard(build(rig, recipe, seed=seed, fp8_weights=fp8_weights), rig.mesh()) for seed in (0, 1)
    )
    # With FP8 weights, histories of delayed scaling are in the state dict too.
    names = {name for name in model.state_dict() if ".fp8_" not in name}
    assert names == set(Model().state_dict())
    train(model, rig)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(other, state)
    with torch.no_grad():
        # With delayed scaling, both models compute first scales from the data.
        model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()})
        assert torch.equal(model(batch(rig)), other(batch(rig)))


TORCH = PrepareModuleInput, ColwiseParallel, RowwiseParallel
FLOAT8 = PrepareFloat8ModuleInput, Float8ColwiseParallel, Float8RowwiseParallel


def plan(styles, kind):
    """Return torchtitan's plan of a layer: sequences are sharded outside attention and MLP."""
    prepare, column, row = styles
    placed = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    source = {
        "input_kwarg_layouts": {"encoder_output": Shard(1)},
        "desired_input_kwarg_layouts": {"encoder_output": Replicate()},
    }
    styles_by_name = {"mlp": prepare(**placed), "mlp.down_proj": row(output_layouts=Shard(1))}
    columns = ["mlp.up_proj", *(["mlp.gate_proj"] if kind == "encoder" else [])]
    for norm, name, more in (
        ("input_layernorm", "self_attn", {}),
        ("cross_attn_layernorm", "cross_attn", source),
    )[: 1 + (kind == "decoder")]:
        styles_by_name[norm] = SequenceParallel()
        styles_by_name[name] = prepare(**placed, **more)
        styles_by_name[f"{name}.o_proj"] = row(output_layouts=Shard(1))
        columns += [f"{name}.{n}_proj" for n in "qkv"]
    styles_by_name["post_attention_layernorm"] = SequenceParallel()
    return {**styles_by_name, **{name: column() for name in columns}}


def gradients(layer, dy, rotation, *inputs):
    """Return the output and gradients of this rank's part, without the bias of the keys."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    source = {"encoder_output": inputs[1]} if len(inputs) == 2 else {}
    y = layer(inputs[0], rotary_pos_emb=rotation, **source)
    y.backward(dy)
    weight_grads = {n: p.grad for n, p in layer.named_parameters() if n != "cross_attn.k_proj.bias"}
    return {
        "output": y.detach(),
        **{f"input {i}": x.grad for i, x in enumerate(inputs)},
        **weight_grads,
    }


@ranks(2)
@every_recipe
@each_norm
@both_weights
@pytest.mark.parametrize("styles", [TORCH, FLOAT8], ids=["torch", "fp8rs"])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_sequence_parallel_layers_compute_the_whole(
    rig, recipe, normalization, fp8_weights, styles, kind
):
    layers = {"plain": getattr(build(rig, None, normalization), kind)}
    for name in ("one", "split"):
        model = build(rig, recipe, normalization, fp8_weights=fp8_weights)
        layers[name] = getattr(model, kind)
    parallelize_module(layers["split"], rig.mesh(names=("tp",)), plan(styles, kind))
    dy, *inputs = (batch(rig, n) for n in range(2 + (kind == "decoder")))
    rotation = rotary_pos_emb(LENGTH, WIDTH // HEADS, device=rig.device)
    exact, unsplit = (gradients(layers[name], dy, rotation, *inputs) for name in ("plain", "one"))
    part = [t.chunk(2, 1)[rig.rank].contiguous() for t in (dy, *inputs)]
    split = gradients(layers["split"], part[0], rotation, *part[1:])
    for name in ("output", *(f"input {i}" for i in range(len(inputs)))):  # this rank's positions
        parts = [torch.empty_like(split[name]) for _ in range(2)]
        dist.all_gather(parts, split[name].contiguous())
        split[name] = torch.cat(parts, 1)
    assert not torch.equal(split["output"], exact["output"]), "it is FP8"
    for i, value in exact.items():
        error = (full_value(split[i]) - value).norm()
        allowed = (unsplit[i] - value).norm()
        # Local scales are at most as coarse as the scales of the whole tensors.
        assert error < 1.5 * allowed + 1e-4 * value.norm(), i
