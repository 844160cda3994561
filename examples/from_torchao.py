"""Train one model with the same `Float8LinearConfig` in torchao and in fp8rs. Needs torchao.

python examples/from_torchao.py torchao
python examples/from_torchao.py fp8rs
"""

import argparse
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig

if sys.argv[1:] == ["torchao"]:
    from torchao.float8 import convert_to_float8_training
else:
    from fp8rs import convert_to_float8_training


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


# Predicts the next byte of a text from the 8 bytes before it.
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
blocks = [Block(256) for _ in range(4)]
model = nn.Sequential(nn.Embedding(256, 32), nn.Flatten(), *blocks, nn.Linear(256, 256))
model.to(device)
text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
batches = text.unfold(0, 9, 1)[torch.randint(len(text) - 8, (100, 512))].to(device)

config = Float8LinearConfig(emulate=device == "cpu")
convert_to_float8_training(model, config=config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, tokens in enumerate(batches, 1):
    loss = F.cross_entropy(model(tokens[:, :-1]), tokens[:, -1])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step in (1, 10, 50, 100):
        print(f"step {step}: loss {loss.item():.4f}")
