"""A job that trains LoRA adapters and a head of PEFT's ``modules_to_save`` under FSDP2.

PEFT copies the head and wraps both copies in a module that passes attributes on to the trained one.
"""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.distributed.fsdp import fully_shard

import fp8rs

RECIPES = ("current", "delayed", "rowwise", "block", "mxfp8")
ORDERS = ("before", "after")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(64, 128)
        self.down = nn.Linear(128, 64)
        self.head = nn.Linear(64, 64)

    def forward(self, x):
        return self.head(self.down(self.up(x).relu()))


def adapted(recipe=None, fp8_weights=False, order="before"):
    """Return a model that is converted before or after PEFT, or not at all."""
    torch.manual_seed(0)
    model = Model()
    options = {"recipe": recipe, "fp8_weights": fp8_weights}
    if recipe and order == "before":
        fp8rs.convert_to_float8_training(model, **options)
    config = LoraConfig(r=4, target_modules=["up", "down"], modules_to_save=["head"])
    model = get_peft_model(model, config)
    if recipe and order == "after":
        fp8rs.convert_to_float8_training(model, filter_fqns=["lora_"], **options)
    return model


def train(model, steps=8):
    """Return the losses, and the names of the parameters that changed."""
    trained = [p for p in model.parameters() if p.requires_grad]
    before = {name: plain(p) for name, p in model.named_parameters()}
    optimizer = fp8rs.optim.AdamW(trained, lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(2, 32, 64, generator=generator)
    losses = []
    for _ in range(steps):
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    moved = []
    for name, parameter in model.named_parameters():
        if not torch.equal(plain(parameter), before[name]):
            moved.append(name)
    return losses, moved


def plain(parameter):
    """Return a copy of this rank's values."""
    values = parameter.detach()
    if isinstance(values, torch.distributed.tensor.DTensor):
        values = values.to_local()
    return values.dequantize() if isinstance(values, fp8rs.QuantizedTensor) else values.clone()


def main(argv):
    torch.distributed.init_process_group("gloo")
    results = {"reference": train(sharded(adapted()))}
    for recipe in RECIPES:
        for fp8_weights in (False, True):
            for order in ORDERS:
                model = sharded(adapted(recipe, fp8_weights, order))
                weights = "FP8 weights" if fp8_weights else "masters"
                results[f"{recipe}, {weights}, {order}"] = train(model)
    return results


def sharded(model):
    fully_shard(model.base_model.model.head)
    return fully_shard(model)
