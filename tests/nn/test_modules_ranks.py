"""Transformer layers on several ranks: FSDP2, HSDP, DCP, tensor and sequence parallelism."""

from __future__ import annotations

import shutil
import tempfile

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import fp8rs
from distributed import ranks
from distributed.models import RECIPES
from fp8rs.nn import TransformerLayer, rotary_pos_emb
from fp8rs.optim import AdamW

WIDTH, HEADS, LENGTH = 64, 4, 16
every_recipe = pytest.mark.parametrize("recipe", list(RECIPES))
each_norm = pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
both_weights = pytest.mark.parametrize("fp8_weights", [False, True], ids=["masters", "fp8"])


class Model(nn.Module):
    """An encoder's layer and a decoder's."""

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
    """The same on all ranks: then they compute what one process does, to the bit."""
    return torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(n)).to(rig.device)


def whole(t):
    t = t.detach()
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def train(model, rig, steps=3):
    """The outputs and whole gradients of some steps."""
    optimizer = AdamW(model.parameters(), 1e-3)
    seen = []
    for n in range(steps):
        y = model(batch(rig, n))
        y.square().mean().backward()
        seen.append([y.detach(), *(whole(p.grad) for p in model.parameters())])
        optimizer.step()
        optimizer.zero_grad()
    return seen


def assert_same(a, b):
    for step, (left, right) in enumerate(zip(a, b, strict=True)):
        for i, (x, y) in enumerate(zip(left, right, strict=True)):
            assert torch.equal(x, y), (step, i)


@ranks(2)
@every_recipe
@each_norm
@both_weights
def test_sharded_layers_train_as_one_process_does(rig, recipe, normalization, fp8_weights):
    one = build(rig, recipe, normalization, fp8_weights=fp8_weights)
    model = build(rig, recipe, normalization, fp8_weights=fp8_weights)
    assert_same(train(shard(model, rig.mesh()), rig), train(one, rig))


@ranks(4)
@every_recipe
@both_weights
def test_hybrid_sharded_layers_train_as_one_process_does(rig, recipe, fp8_weights):
    mesh = rig.mesh(2, 2, names=("replicas", "shards"))
    one = build(rig, recipe, fp8_weights=fp8_weights)
    model = build(rig, recipe, fp8_weights=fp8_weights)
    assert_same(train(shard(model, mesh), rig), train(one, rig))


@ranks(2)
@every_recipe
@both_weights
def test_checkpoints_of_sharded_layers(rig, recipe, fp8_weights):
    """Under the names of the unconverted model, by DCP into one with other values."""
    folder = [tempfile.mkdtemp(prefix="fp8rs-modules-") if rig.rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    try:
        model, other = (
            shard(build(rig, recipe, seed=seed, fp8_weights=fp8_weights), rig.mesh())
            for seed in (0, 1)
        )
        assert set(model.state_dict()) == set(Model().state_dict())
        train(model, rig)
        dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
        state = get_model_state_dict(other)
        dcp.load(state, checkpoint_id=folder[0])
        set_model_state_dict(other, state)
        with torch.no_grad():
            # Delayed scaling has its first scales from the data again, as in the other model.
            model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()})
            assert torch.equal(model(batch(rig)), other(batch(rig)))
    finally:
        dist.barrier()
        if rig.rank == 0:
            shutil.rmtree(folder[0])


#: A layer's plan as torchtitan writes it: sequences are cut outside of attention and MLP.
GATHERED = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
PLAN = {
    "input_layernorm": SequenceParallel(),
    "self_attn": GATHERED,
    "self_attn.q_proj": ColwiseParallel(),
    "self_attn.k_proj": ColwiseParallel(),
    "self_attn.v_proj": ColwiseParallel(),
    "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
    "post_attention_layernorm": SequenceParallel(),
    "mlp": GATHERED,
    "mlp.gate_proj": ColwiseParallel(),
    "mlp.up_proj": ColwiseParallel(),
    "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
}


def gradients(layer, x, dy, rotation):
    """Output, and gradients of input and parameters; of this rank's part of the sequence."""
    x = x.clone().requires_grad_()
    y = layer(x, rotary_pos_emb=rotation)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


@ranks(2)
@every_recipe
@each_norm
@both_weights
def test_sequence_parallel_layers_compute_the_whole(rig, recipe, normalization, fp8_weights):
    layers = {"plain": build(rig, None, normalization).encoder}
    for name in ("one", "split"):
        layers[name] = build(rig, recipe, normalization, fp8_weights=fp8_weights).encoder
    parallelize_module(layers["split"], rig.mesh(names=("tp",)), PLAN)
    x, dy = batch(rig), batch(rig, 1)
    rotation = rotary_pos_emb(LENGTH, WIDTH // HEADS, device=rig.device)
    exact, one = (gradients(layers[name], x, dy, rotation) for name in ("plain", "one"))
    part = [t.chunk(2, 1)[rig.rank].contiguous() for t in (x, dy)]
    split = gradients(layers["split"], *part, rotation)
    for i, t in enumerate(split[:2]):  # output and input's gradient: of a rank's own positions
        parts = [torch.empty_like(t) for _ in range(2)]
        dist.all_gather(parts, t.contiguous())
        split[i] = torch.cat(parts, 1)
    assert not torch.equal(split[0], exact[0]), "it is FP8"
    for i, (expected, by_one, by_two) in enumerate(zip(exact, one, split, strict=True)):
        error, allowed = (whole(by_two) - expected).norm(), (by_one - expected).norm()
        # A rank's own scales are no coarser than those of the whole: the error is of FP8's size.
        assert error < 1.5 * allowed + 1e-4 * expected.norm(), i
