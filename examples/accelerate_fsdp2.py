"""accelerate with FSDP2: torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py"""

import argparse
import inspect

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from fp8rs import convert_to_float8_training
from fp8rs.integrations.accelerate import fsdp2_on_cpu
from fp8rs.optim import MasterWeights


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="current", help="a recipe of fp8rs, or bf16")
    parser.add_argument("--fp8-weights", action="store_true", help="keep weights in FP8 at rest")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="where to save the state after the last step")
    parser.add_argument("--resume", help="what --save wrote: FOLDER/step_N")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        fsdp2_on_cpu()  # accelerate itself shards on accelerators alone
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap"
    )
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    if args.recipe != "bf16":
        convert_to_float8_training(
            model,
            recipe=args.recipe,
            filter_fqns=["lm_head"],
            fp8_weights=args.fp8_weights,
            preserve_high_precision_init_val=args.fp8_weights,
        )
    if args.fp8_weights:  # torch's AdamW would lose steps shorter than half a code's
        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = torch.tensor(list(inspect.getsource(argparse).encode())[: 64 * 1024]).view(-1, 64)
    data = DataLoader(rows[64:], batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    losses, first = [], int(args.resume.rpartition("_")[2]) if args.resume else 0
    if args.resume:
        accelerator.load_state(args.resume)
    for step, batch in enumerate(accelerator.skip_first_batches(data, first), first + 1):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
        accelerator.print(f"step {step}: loss {losses[-1]:.4f}")
        if step == args.steps:
            break
    if args.save:
        accelerator.save_state(f"{args.save}/step_{step}")
    with torch.no_grad():
        held_out = rows[:64].to(accelerator.device)
        evaluation = model.eval()(input_ids=held_out, labels=held_out).loss.item()
    return {"losses": losses, "evaluation": evaluation}


if __name__ == "__main__":
    main()
