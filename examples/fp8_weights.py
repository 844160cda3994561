"""Train a model with FP8 weights under FSDP2, built on the meta device.

torchrun --standalone --nproc-per-node 2 examples/fp8_weights.py, on GPUs or on CPUs with gloo.
"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8rs import quantized_init
from fp8rs.optim import AdamW


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


rank = int(os.environ["LOCAL_RANK"])
ranks = int(os.environ["LOCAL_WORLD_SIZE"])
device = torch.device("cuda", rank) if torch.cuda.device_count() >= ranks else torch.device("cpu")
if device.type == "cuda":
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
mesh = init_device_mesh(device.type, (ranks,))
torch.manual_seed(0)

# The values before rounding are kept until the optimizer initializes its masters from them.
with torch.device("meta"), quantized_init("current", preserve_high_precision_init_val=True):
    model = nn.Sequential(*(Block(256) for _ in range(2)))
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for module in (*model, model):
    fully_shard(module, mesh=mesh, mp_policy=policy)
model.to_empty(device=device)
for module in model.modules():
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()

optimizer = AdamW(model.parameters(), lr=3e-3)
generator = torch.Generator().manual_seed(1 + rank)
for step in range(30):
    x = torch.randn(64, 256, generator=generator).to(device)
    loss = F.mse_loss(model(x).float(), x.roll(1, dims=1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and step % 29 == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)
time.sleep(0.1)  # gloo may abort the exit otherwise, see docs/troubleshooting.md
dist.destroy_process_group()
