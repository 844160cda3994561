"""A job that loads models of which only rank 0 has the values, and trains them for two steps.

This is accelerate's ``cpu_ram_efficient_loading``. The models are small.
"""

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

from fp8rs import QuantizedTensor, convert_to_float8_training
from fp8rs.integrations.accelerate import fsdp2_on_cpu
from fp8rs.optim import MasterWeights

#: Each rank shards whole blocks of 128 rows, so that no value is rounded twice.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
RECIPES = ("current", "delayed", "rowwise", "block", "mxfp8")


def main(argv):
    fsdp2_on_cpu()
    results = {}
    for recipe in RECIPES:
        for fp8_weights in (False, True):
            weights = "FP8 weights" if fp8_weights else "masters"
            results[f"{recipe}, {weights}"] = load_and_train(recipe, fp8_weights)
    return results


def load_and_train(recipe, fp8_weights):
    """Return what differs from rank 0's values after the load, and two losses."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=True,
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model = build(accelerator)
    convert_to_float8_training(
        model,
        recipe=recipe,
        filter_fqns=["lm_head"],
        fp8_weights=fp8_weights,
        preserve_high_precision_init_val=fp8_weights,
    )
    values = {}
    if accelerator.is_main_process:
        for name, parameter in model.named_parameters():
            values[name] = plain(parameter)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if fp8_weights:
        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)

    model, optimizer = accelerator.prepare(model, optimizer)

    differing = []
    quantized = []
    for name, parameter in model.named_parameters():
        loaded = plain(parameter.full_tensor())
        if accelerator.is_main_process and not torch.equal(loaded, values[name]):
            differing.append(name)
        if isinstance(parameter.to_local(), QuantizedTensor):
            quantized.append(name)

    losses = []
    rows = torch.arange(4 * 32).view(4, 32)
    for _ in range(2):
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return {"differing": differing, "quantized": quantized, "losses": losses}


def build(accelerator):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **SIZES))
    if not accelerator.is_main_process:
        # Memory that was not initialized may have any bytes.
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, float("nan"))
    return model


def plain(parameter):
    """Return a copy of a parameter's values."""
    values = parameter.detach()
    return values.dequantize() if isinstance(values, QuantizedTensor) else values.clone()
