"""Train with torchtitan 0.3.

torchrun --nproc-per-node 2 examples/torchtitan_llama.py --recipe current

``llama3_debugmodel_fp8rs`` also works with torchtitan's launcher:
torchrun ... -m torchtitan.train --module examples.torchtitan_llama --config llama3_debugmodel_fp8rs
"""

import argparse
from dataclasses import dataclass
from functools import partial

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

from fp8rs.integrations.torchtitan import Float8Converter
from fp8rs.optim import AdamW


class Fp8Optimizers(OptimizersContainer):
    """torchtitan's optimizers, with 8-bit moments in AdamW."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name):
        if name == "AdamW":
            return partial(AdamW, state_dtype="fp8")
        return OptimizersContainer._resolve_optimizer_factory(name)


def llama3_debugmodel_fp8rs(recipe="current", **parallelism) -> Trainer.Config:
    """Return torchtitan's debug config, with FP8 linear layers except the head."""
    config = llama3_debugmodel()
    if recipe != "bf16":
        converter = Float8Converter.Config(recipe=recipe, filter_fqns=["lm_head"])
        config.model_spec = model_registry("debugmodel", converters=[converter])
    config.parallelism = ParallelismConfig(**parallelism)
    return config


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="current", help="a recipe of fp8rs, or bf16")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel degree")
    parser.add_argument("--replicas", type=int, default=1, help="HSDP's")
    parser.add_argument("--fp8-moments", action="store_true", help="AdamW with 8-bit moments")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--folder", default="outputs", help="checkpoints; the last one is resumed")
    parser.add_argument("--save-every", type=int, default=5)
    args = parser.parse_args(argv)
    config = llama3_debugmodel_fp8rs(
        args.recipe,
        tensor_parallel_degree=args.tp,
        data_parallel_replicate_degree=args.replicas,
    )
    if args.fp8_moments:
        config.optimizer = Fp8Optimizers.Config(param_groups=config.optimizer.param_groups)
    config.training.steps = args.steps
    config.dump_folder = args.folder
    config.activation_checkpoint = SelectiveAC.Config()
    config.compile = CompileConfig(enable=args.compile, components=["model"])
    config.checkpoint = CheckpointManager.Config(
        enable=True, interval=args.save_every, last_save_model_only=False
    )
    config.debug = DebugConfig(seed=0)
    trainer = config.build()
    trainer.train()
    trainer.close()


if __name__ == "__main__":
    main()
