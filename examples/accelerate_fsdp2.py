"""Train with accelerate and FSDP2.

torchrun --nproc-per-node 2 examples/accelerate_fsdp2.py
"""

import argparse

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from fp8rs import convert_to_float8_training
from fp8rs.integrations.accelerate import fsdp2_on_cpu
from fp8rs.optim import AdamW, MasterWeights


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="current", help="a recipe of fp8rs, or bf16")
    parser.add_argument("--fp8-weights", action="store_true", help="store weights in FP8")
    parser.add_argument("--fp8-moments", action="store_true", help="AdamW with 8-bit moments")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save", help="where to save the state after the last step")
    parser.add_argument("--resume", help="a state that --save wrote: FOLDER/step_N")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        fsdp2_on_cpu()  # accelerate shards only on accelerators
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=fsdp)
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
    if args.recipe != "bf16":
        options = {"filter_fqns": ["lm_head"], "fp8_weights": args.fp8_weights}
        options["preserve_high_precision_init_val"] = args.fp8_weights
        convert_to_float8_training(model, recipe=args.recipe, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if args.fp8_weights:  # without masters, updates smaller than half a code are lost
        optimizer = MasterWeights(model.parameters(), torch.optim.AdamW, lr=1e-3)
    if args.fp8_moments:
        optimizer = AdamW(model.parameters(), lr=1e-3, state_dtype="fp8")
    rows = torch.from_file(argparse.__file__, size=64 * 1024, dtype=torch.uint8).long().view(-1, 64)
    model, optimizer, data = accelerator.prepare(model, optimizer, DataLoader(rows[64:], 4))

    resumed_step = 0
    if args.resume:
        accelerator.load_state(args.resume)
        resumed_step = int(args.resume.rpartition("_")[2])
    batches = accelerator.skip_first_batches(data, resumed_step)

    losses = []
    for step, batch in zip(range(resumed_step + 1, args.steps + 1), batches, strict=False):
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
        accelerator.print(f"step {step}: loss {losses[-1]:.4f}")
    if args.save:
        accelerator.save_state(f"{args.save}/step_{step}")

    model.eval()
    held_out = rows[:64].to(accelerator.device)
    with torch.no_grad():
        loss = model(input_ids=held_out, labels=held_out).loss
    return {"losses": losses, "evaluation": loss.item()}


if __name__ == "__main__":
    main()
