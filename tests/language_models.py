"""Small models of transformers, and a training loop for them."""

import contextlib
import inspect

import pytest
import torch


def llama(device, **options):
    """Return a Llama model with two layers."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **{**heads, **sizes, **options})
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


#: All architectures of transformers 5.24 with stacked weights of experts and a causal language
#: model. Each name is a model type of transformers.
MIXTURES = [
    "afmoe",
    "aria_text",
    "axk1",
    "axk2",
    "bailing_hybrid",
    "cohere2_moe",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "dots1",
    "dots3_note_text",
    "ernie4_5_moe",
    "exaone_moe",
    "flex_olmo",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "hy_v3",
    "hy_v4",
    "inkling2_loop_text",
    "inkling2_text",
    "inkling_text",
    "jamba",
    "jetmoe",
    "kimi_linear",
    "kolibri1",
    "laguna",
    "lara_mini",
    "lfm2_moe",
    "llama4_text",
    "longcat_flash",
    "mellum",
    "mimo_v2_flash",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl_text",
    "mixtral",
    "nemotron_h",
    "olmoe",
    "phimoe",
    "qwen2_moe",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
    "qwen4_exp_text",
    "sarvam_mla",
    "sarvam_moe",
    "solar_open",
    "zaya",
]

#: Sizes of a tiny model, by the names that configs have for them.
_SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "num_dense_layers": 0,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}

#: Sizes that single architectures need besides.
_SIZES_OF = {
    "inkling2_loop_text": {"unpadded_vocab_size": 120},
    "inkling2_text": {"unpadded_vocab_size": 120},
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "longcat_flash": {"expert_ffn_hidden_size": 32, "ffn_hidden_size": 64, "num_layers": 1}
    | {"zero_expert_num": 2},
    "zaya": {"num_experts_per_tok": 1},
}


def tiny_mixture(model_type):
    """Return a tiny model of one of `MIXTURES`. Skip the test if transformers lacks it."""
    transformers = pytest.importorskip("transformers", minversion="5.0")
    auto = transformers.models.auto
    name = auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type)
    if name is None:
        pytest.skip(f"transformers {transformers.__version__} does not have {model_type}")

    config_class = auto.configuration_auto.CONFIG_MAPPING[model_type]
    # Sizes that a config computes from others are attributes, but not arguments.
    names = set(inspect.signature(config_class.__init__).parameters)
    with contextlib.suppress(Exception):
        names |= set(vars(config_class()))
    sizes = {size: value for size, value in _SIZES.items() if size in names}
    torch.manual_seed(0)
    config = config_class(**sizes | _SIZES_OF.get(model_type, {}))
    return getattr(transformers, name)(config)


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
