"""Trains the model of ``examples/lightning_fsdp2.py`` with the monitoring callback of its page."""

import re
from pathlib import Path

import lightning
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.utils.data import DataLoader

ROOT = Path(__file__).resolve().parents[2]


class Kept(DummyLogger):
    def __init__(self):
        super().__init__()
        self.steps = []
        self.names = []

    def log_metrics(self, metrics, step=None):
        self.steps.append(step)
        self.names.append(list(metrics))


def main(argv):
    page = (ROOT / "docs/clients.md").read_text()
    (block,) = re.findall(r"```python\n([^`]*class Watch.*?)```", page, re.DOTALL)
    names = {"__name__": __name__}
    for code in ((ROOT / "examples/lightning_fsdp2.py").read_text(), block):
        exec(code.replace("every=100", "every=2"), names)
    callbacks = [names["Watch"]()]
    logger = Kept()
    options = {"max_steps": 4, "accumulate_grad_batches": 2, "limit_val_batches": 0, "devices": 2}
    options |= {"enable_checkpointing": False, "callbacks": callbacks, "logger": logger}
    data = DataLoader((torch.arange(64) + torch.arange(400)[:, None]) % 256, batch_size=4)
    lightning.Trainer(strategy=ModelParallelStrategy(2, 1), **options).fit(
        names["Llama"]("current"), data
    )
    return {"steps": logger.steps, "names": logger.names}
