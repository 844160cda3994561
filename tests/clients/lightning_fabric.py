"""Runs the code block of Fabric in docs/clients.md on two ranks."""

import re
from pathlib import Path

import torch

import fp8rs

ROOT = Path(__file__).resolve().parents[2]


def main(argv):
    page = (ROOT / "docs/clients.md").read_text()
    (block,) = re.findall(r"```python\n([^`]*lightning\.Fabric.*?)```", page, re.DOTALL)
    names = {"__name__": __name__}
    for code in ((ROOT / "examples/lightning_fsdp2.py").read_text(), block):
        exec(code.replace("=8", "=2"), names)

    model = names["model"]
    batch = torch.arange(64).view(1, -1)
    loss = model(input_ids=batch, labels=batch).loss
    names["fabric"].backward(loss)
    layers = [m for m in model.modules() if isinstance(m, fp8rs.Float8Linear)]
    return {"converted": len(layers), "gradients": sum(m.weight.grad is not None for m in layers)}
