"""Train a mixture of experts of transformers 5 with FSDP2, its experts gathered in FP8.

torchrun --nproc-per-node 2 examples/experts_transformers.py --recipe current --experts fp8
"""

import argparse
import inspect

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from fp8rs import convert_to_float8_training


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="current", help="a recipe of fp8rs, or bf16")
    parser.add_argument("--experts", default="auto", help="auto, fp8, gather or off")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 128, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes |= {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    with torch.device(device):
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))
    if args.recipe != "bf16":
        # The routers of transformers are not linear layers, so they stay in high precision.
        options = {"recipe": args.recipe, "experts": args.experts}
        convert_to_float8_training(model, filter_fqns=["lm_head"], **options)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor(list(inspect.getsource(argparse).encode())[: 64 * 1024])
    rows = text.view(-1, 64).to(device)
    losses = []
    for step in range(args.steps):
        batch = rows[8 * (step * dist.get_world_size() + dist.get_rank()) :][:8]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.detach().float() / dist.get_world_size()
        dist.all_reduce(mean_loss)
        losses.append(mean_loss.item())
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    return {"losses": losses}


if __name__ == "__main__":
    main()
