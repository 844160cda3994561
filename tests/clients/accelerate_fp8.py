"""A job that trains with accelerate's ``mixed_precision="fp8"``, or converts the model first.

The model and its data are small. The "fp8" mode is `fp8rs.integrations.accelerate.use_fp8rs`.
"""

import argparse
import contextlib

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import AORecipeKwargs
from accelerate.utils.ao import find_first_last_linear_layers
from transformers import LlamaConfig, LlamaForCausalLM

import fp8rs
from fp8rs.integrations.accelerate import fsdp2_on_cpu, use_fp8rs


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", help="for use_fp8rs; its default reads accelerate's config")
    parser.add_argument("--way", choices=["fp8", "plain"], required=True)
    args = parser.parse_args(argv)
    fsdp2_on_cpu()
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    ends = find_first_last_linear_layers(model)
    # In both modes, create the optimizer before the model is converted.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    with contextlib.ExitStack() as stack:
        if args.way == "fp8":
            stack.enter_context(use_fp8rs(args.recipe))
        else:
            config = None if args.recipe else AORecipeKwargs().config
            fp8rs.convert_to_float8_training(
                model,
                recipe=args.recipe,
                config=config,
                module_filter_fn=lambda _, name: name not in ends,
            )
        precision = "fp8" if args.way == "fp8" else "bf16"
        accelerator = Accelerator(mixed_precision=precision, fsdp_plugin=plugin)
        model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    batch = torch.randint(0, 256, (4, 16), generator=generator)
    losses = []
    for _ in range(5):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    layers = [m for m in model.modules() if isinstance(m, fp8rs.nn.Linear)]
    return {
        "losses": losses,
        "ends": list(ends),
        "backend": str(accelerator.fp8_backend),
        "recipes": sorted({layer.recipe.name for layer in layers}),
        "torchao": sorted(
            {type(m).__name__ for m in model.modules() if "ao" in type(m).__module__}
        ),
    }
