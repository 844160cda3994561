"""Train with Lightning and FSDP2.

torchrun --nproc-per-node 2 examples/lightning_fsdp2.py
"""

import argparse
import os

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import fp8rs


class Llama(lightning.LightningModule):
    def __init__(self, recipe):
        super().__init__()
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, num_attention_heads=4, **sizes))
        self.recipe = recipe
        self.losses = {True: [], False: []}

    def configure_model(self):  # called for each stage
        if isinstance(self.model, FSDPModule):
            return
        if self.recipe != "bf16":
            fp8rs.convert_to_float8_training(self.model, recipe=self.recipe, filter_fqns=["head"])
        for part in (*self.model.model.layers, self.model):
            fully_shard(part, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))

    def training_step(self, batch):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.losses[self.training].append(loss.item())
        return loss

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="current", help="a recipe of fp8rs, or bf16")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--checkpoint", default="checkpoint", help="resumed if there is one")
    args = parser.parse_args(argv)
    data = DataLoader((torch.arange(64) + torch.arange(400)[:, None]) % 256, batch_size=4)
    ranks = int(os.environ["WORLD_SIZE"])
    options = {"max_steps": args.steps, "limit_val_batches": 2, "logger": False}
    options |= {"enable_checkpointing": False, "devices": ranks}
    trainer = lightning.Trainer(strategy=ModelParallelStrategy(ranks, 1), **options)
    resumed = args.checkpoint if os.path.exists(args.checkpoint) else None
    module = Llama(args.recipe)
    trainer.fit(module, data, ckpt_path=resumed)
    trainer.save_checkpoint(args.checkpoint)
    trainer.validate(module, data)
    return {"losses": module.losses[True], "evaluated": module.losses[False]}


if __name__ == "__main__":
    main()
