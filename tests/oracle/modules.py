"""Transformer layers in float64, written from the formulas, as functions of named parameters."""

from __future__ import annotations

import math

import torch
from torch import Tensor

Parameters = dict[str, Tensor]


def under(parameters: Parameters, prefix: str) -> Parameters:
    """Return the parameters of one submodule, by their names in it."""
    start = prefix + "."
    return {n.removeprefix(start): p for n, p in parameters.items() if n.startswith(start)}


def linear(p: Parameters, x: Tensor) -> Tensor:
    return x @ p["weight"].T + p.get("bias", 0.0)


def norm(p: Parameters, x: Tensor, eps: float = 1e-5) -> Tensor:
    """Compute a LayerNorm if there is a bias, otherwise an RMSNorm."""
    if "bias" in p:
        x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * p["weight"] + p.get("bias", 0.0)


ACTIVATIONS = {
    "gelu": lambda x: x / 2 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()),
    "relu": lambda x: x.clamp(min=0),
    "swiglu": lambda x: x / (1 + (-x).exp()),
}
ACTIVATIONS["geglu"] = ACTIVATIONS["gelu"]


def mlp(p: Parameters, x: Tensor, activation: str) -> Tensor:
    up = linear(under(p, "up_proj"), x)
    act = ACTIVATIONS[activation]
    gated = "gate_proj.weight" in p
    h = act(linear(under(p, "gate_proj"), x)) * up if gated else act(up)
    return linear(under(p, "down_proj"), h)


def rotate(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate channels i and i + half, as a complex number, by position * base^(-i / half)."""
    length = x.shape[-2]
    half = x.shape[-1] // 2
    position = torch.arange(length).double()[:, None]
    pair = torch.arange(half).double()
    turn = torch.polar(torch.ones(length, half).double(), position * base ** (-pair / half))
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], -1)


def attention(
    p: Parameters,
    x: Tensor,
    source: Tensor | None = None,
    *,
    channels: int,
    causal: bool,
    rotary: bool = False,
    mask: Tensor | None = None,
) -> Tensor:
    """Compute attention for each query head separately, with the keys and values of its group."""
    source = x if source is None else source
    inputs = {"q_proj": x, "k_proj": source, "v_proj": source}
    projections = [linear(under(p, name), of) for name, of in inputs.items()]
    q, k, v = (y.unflatten(-1, (-1, channels)).transpose(1, 2) for y in projections)
    if rotary:
        q = rotate(q)
        k = rotate(k)
    if causal:
        mask = torch.arange(k.shape[2]) <= torch.arange(q.shape[2])[:, None]
    heads = []
    for head in range(q.shape[1]):
        group = head * k.shape[1] // q.shape[1]
        scores = q[:, head] @ k[:, group].mT / math.sqrt(channels)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        heads.append(scores.softmax(-1) @ v[:, group])
    return linear(under(p, "o_proj"), torch.cat(heads, -1))


def layer(
    p: Parameters, x: Tensor, source: Tensor | None = None, *, activation: str, **options: object
) -> Tensor:
    """Compute a pre-norm transformer layer, with cross-attention if there is a ``source``."""
    h = norm(under(p, "input_layernorm"), x)
    x = x + attention(under(p, "self_attn"), h, **options)
    if source is not None:
        h = norm(under(p, "cross_attn_layernorm"), x)
        channels = options["channels"]
        x = x + attention(under(p, "cross_attn"), h, source, channels=channels, causal=False)
    h = norm(under(p, "post_attention_layernorm"), x)
    return x + mlp(under(p, "mlp"), h, activation)
