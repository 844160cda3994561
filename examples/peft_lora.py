"""Train LoRA or DoRA on FP8 layers.

torchrun --nproc-per-node 2 examples/peft_lora.py
"""

import argparse
import inspect

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from fp8rs import convert_to_float8_training
from fp8rs.integrations.accelerate import fsdp2_on_cpu


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="current", help="a recipe of fp8rs, or bf16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--dora", action="store_true")
    parser.add_argument("--convert", choices=["before", "after"], default="after", help="PEFT")
    parser.add_argument("--save", help="a folder for the adapter")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        fsdp2_on_cpu()  # accelerate shards only on accelerators
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    lora = LoraConfig(r=8, target_modules="all-linear", use_dora=args.dora, task_type="CAUSAL_LM")
    convert = args.convert if args.recipe != "bf16" else None
    if convert == "before":
        convert_to_float8_training(model, recipe=args.recipe, filter_fqns=["lm_head"])
    model = get_peft_model(model, lora)
    if convert == "after":  # adapters stay in high precision, as FP8 does not help small ranks
        convert_to_float8_training(model, recipe=args.recipe, filter_fqns=["lm_head", "lora_"])
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=1e-2)
    rows = torch.tensor(list(inspect.getsource(argparse).encode())[: 64 * 1024]).view(-1, 64)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4))
    losses = []
    for _, batch in zip(range(args.steps), data, strict=False):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
    accelerator.print(losses)
    if args.save:
        state = accelerator.get_state_dict(model)  # on every rank
        model.save_pretrained(
            args.save, is_main_process=accelerator.is_main_process, state_dict=state
        )
    return {"losses": losses}


if __name__ == "__main__":
    main()
