"""Swap the layers of a transformers Llama for fp8rs.nn.TransformerLayer, and compare losses.

python examples/swap_transformer_layers.py, on one GPU or on the CPU. In eager mode, the layers of
fp8rs have kernels that quantize norms and gated activations without writing their results.
"""

import argparse
import copy
import json
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fp8rs import convert_to_float8_training
from fp8rs.nn import TransformerLayer, load_transformer_layer


class Layer(TransformerLayer):
    """A TransformerLayer with the arguments of transformers' decoder layers."""

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, **_: Any) -> Any:
        return super().forward(hidden_states, rotary_pos_emb=position_embeddings)


def swap_layers(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Replace each decoder layer by one of fp8rs with the same weights."""
    config = model.config
    for i, old in enumerate(model.model.layers):
        weight = old.self_attn.q_proj.weight
        new = Layer(
            config.hidden_size,
            config.intermediate_size,
            config.num_attention_heads,
            num_gqa_groups=config.num_key_value_heads,
            layernorm_epsilon=config.rms_norm_eps,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias=False,
            activation="swiglu",
            normalization="RMSNorm",
            device=weight.device,
            dtype=weight.dtype,
        )
        load_transformer_layer(new, old.state_dict(), names="llama")
        model.model.layers[i] = new
    return model


def train(model: LlamaForCausalLM, tokens: torch.Tensor, steps: int) -> list[float]:
    """Train on one batch and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        loss = model(tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> dict[str, list[float]]:
    """Train with transformers' layers, with those of fp8rs, and with these in FP8."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--recipe", default="current")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(device, getattr(torch, options.dtype))
    tokens = torch.randint(config.vocab_size, (4, 64)).to(device)

    swapped = swap_layers(copy.deepcopy(model))
    in_fp8 = swap_layers(copy.deepcopy(model))
    # A model this small is not faster in FP8: the default gemms="auto" would not use it on a GPU.
    convert_to_float8_training(in_fp8, recipe=options.recipe, filter_fqns=["lm_head"], gemms="fp8")
    losses = {
        "transformers": train(model, tokens, options.steps),
        "swapped": train(swapped, tokens, options.steps),
        "fp8": train(in_fp8, tokens, options.steps),
    }
    print(json.dumps(losses, indent=2))
    return losses


if __name__ == "__main__":
    main()
