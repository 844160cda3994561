"""Train a mixture of experts of torchtitan 0.3, its experts gathered in FP8.

torchrun --nproc-per-node 2 examples/experts_torchtitan.py --recipe current --experts fp8

torchtitan shards experts on Shard(0), or on Shard(1) if there are more ranks than experts. Both are
gathered in FP8. ``qwen3_moe_debug_fp8rs`` also works with torchtitan's launcher:
torchrun ... -m torchtitan.train --module examples.experts_torchtitan --config qwen3_moe_debug_fp8rs
"""

import argparse

from torchtitan.config import DebugConfig, ParallelismConfig
from torchtitan.models.qwen3 import model_registry
from torchtitan.models.qwen3.config_registry import qwen3_moe_debug
from torchtitan.trainer import Trainer

from fp8rs.integrations.torchtitan import Float8Converter


def qwen3_moe_debug_fp8rs(recipe="current", experts="auto", **parallelism) -> Trainer.Config:
    """Return torchtitan's debug config of Qwen3-MoE, with FP8 layers and experts."""
    config = qwen3_moe_debug()
    if recipe != "bf16":
        # Routers are small, and their scores decide which experts run.
        converter = Float8Converter.Config(
            recipe=recipe, experts=experts, filter_fqns=["lm_head", "router"]
        )
        config.model_spec = model_registry("debugmodel_moe", converters=[converter])
    config.parallelism = ParallelismConfig(**parallelism)
    return config


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="current", help="a recipe of fp8rs, or bf16")
    parser.add_argument("--experts", default="auto", help="auto, fp8, gather or off")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--ep", type=int, default=1, help="expert parallel degree")
    parser.add_argument("--folder", default="outputs")
    args = parser.parse_args(argv)
    config = qwen3_moe_debug_fp8rs(args.recipe, args.experts, expert_parallel_degree=args.ep)
    config.training.steps = args.steps
    # torchtitan's default token dispatcher synchronizes with the host.
    config.training.disable_cuda_graphs = args.ep > 1
    config.dump_folder = args.folder
    config.debug = DebugConfig(seed=0)
    trainer = config.build()
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
