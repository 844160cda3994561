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


def mixture(kind, device="cpu", **options):
    """Return a small mixture of experts: "mixtral", "qwen3_moe", "deepseek_v3" or "gpt_oss"."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    names = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3"}
    name = {**names, "gpt_oss": "GptOss"}[kind]
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"moe_intermediate_size": 48, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    of_kind = {
        "mixtral": {"intermediate_size": 48, "num_local_experts": 4},
        "qwen3_moe": {"num_experts": 8, "head_dim": 16},
        "gpt_oss": {"intermediate_size": 48, "num_local_experts": 4, "head_dim": 16},
        "deepseek_v3": {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "v_head_dim": 16}
        | {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
        | {"num_key_value_heads": 4, "first_k_dense_replace": 1},
    }[kind]
    torch.manual_seed(0)
    options = {**sizes, **experts, **of_kind, **options}
    config = getattr(transformers, f"{name}Config")(vocab_size=64, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config).to(device)


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
