"""accelerate with FSDP2: torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py"""

import argparse
import inspect

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from fp8rs import convert_to_float8_training
from fp8rs.integrations.accelerate import fsdp2_on_cpu


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="current", help="a recipe of fp8rs, or bf16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--cpu-ram-efficient-loading", action="store_true")
    parser.add_argument("--resume", help="a folder that --save wrote")
    parser.add_argument("--save", help="a folder")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        fsdp2_on_cpu()  # accelerate alone shards on GPUs only
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        state_dict_type="SHARDED_STATE_DICT",
        cpu_ram_efficient_loading=args.cpu_ram_efficient_loading,
    )
    accelerator = Accelerator(
        mixed_precision="bf16", gradient_accumulation_steps=args.accumulate, fsdp_plugin=plugin
    )
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    if args.recipe != "bf16":
        convert_to_float8_training(model, recipe=args.recipe, filter_fqns=["lm_head"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(inspect.getsource(argparse).encode()))
    rows = text[: len(text) // 64 * 64].view(-1, 64)
    data = DataLoader(rows, batch_size=4, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses = []
    if args.resume:
        accelerator.load_state(args.resume)
    for batch in data:
        if len(losses) == args.steps:
            break
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        accelerator.print(f"step {len(losses)}: loss {losses[-1]:.4f}")
    if args.save:
        accelerator.save_state(args.save)
    return {"losses": losses}


if __name__ == "__main__":
    main()
