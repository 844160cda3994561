"""A small Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

The demo uses it with a few million parameters, the end-to-end benchmark with Llama-3-8B's layer
shapes. Its linear layers are plain ``torch.nn.Linear``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a Llama."""

    vocabulary: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    rope_base: float = 10_000.0

    @property
    def head_dim(self) -> int:
        """Return the width of one attention head."""
        return self.dim // self.heads


class Attention(nn.Module):
    """Causal self-attention; several query heads share one key/value head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(batch, length, dim) -> (batch, length, dim)."""
        q = self._split_heads(self.wq(x))
        k = self._split_heads(self.wk(x))
        v = self._split_heads(self.wv(x))

        q = _rotate(q, *rotation)
        k = _rotate(k, *rotation)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out: torch.Tensor = self.wo(y.transpose(1, 2).flatten(2))
        return out

    def _split_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, heads * head_dim) -> (batch, heads, length, head_dim)."""
        heads: torch.Tensor = x.unflatten(-1, (-1, self.head_dim))
        return heads.transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1(x)) * w3(x))``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, dim) -> (batch, length, dim)."""
        out: torch.Tensor = self.w2(F.silu(self.w1(x)) * self.w3(x))
        return out


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """(batch, length, dim) -> (batch, length, dim)."""
        x = x + self.attention(self.attention_norm(x), rotation)
        out: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class Llama(nn.Module):
    """Token embedding, blocks, final norm and an output head that is not tied."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.dim)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.head = nn.Linear(config.dim, config.vocabulary, bias=False)

    def init_weights(self, generator: torch.Generator) -> None:
        """Initialize weights, with smaller ones in layers that add to the residual stream."""
        residual = 0.02 / (2 * self.config.layers) ** 0.5
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim == 1:
                    parameter.fill_(1.0)
                    continue
                deviation = residual if name.endswith(("wo.weight", "w2.weight")) else 0.02
                noise = torch.randn(parameter.shape, generator=generator, device=generator.device)
                parameter.copy_(noise * deviation)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """int64 (batch, length) -> logits (batch, length, vocabulary)."""
        x = self.embedding(tokens)
        rotation = _rotation(self.config, tokens.shape[1], x.device)
        for block in self.blocks:
            x = block(x, rotation)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean next-token cross-entropy in nats of int64 (batch, length + 1)."""
        logits = self(tokens[:, :-1])
        return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def parameter_count(module: nn.Module) -> int:
    """Return the number of parameters, each counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _rotation(
    config: LlamaConfig, length: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    # RoFormer (Su et al., 2021), with halves rotated as in transformers.
    exponents = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    angles = torch.outer(
        torch.arange(length, device=device).float(), config.rope_base**-exponents
    ).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((-second, first), dim=-1)
    return (x.float() * cos + rotated.float() * sin).to(x.dtype)
