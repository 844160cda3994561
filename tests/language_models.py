"""Small models of transformers, and a training loop for them."""

import pytest
import torch


def llama(device, **options):
    """Return a Llama model with two layers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **heads, **sizes, **options)
    return transformers.LlamaForCausalLM(config).to(device)


def mixtral(device, hidden_size, intermediate_size):
    """Return a Mixtral model with one layer, whose four experts have 3-D parameters."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    return transformers.MixtralForCausalLM(config).to(device)


def train_on(tokens, model, steps):
    """Train a model to repeat ``tokens`` and return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    losses = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
