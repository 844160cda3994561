"""Measure the overhead of a monitor: time logged steps, other steps, and steps without a monitor.

    python benches/monitor.py --device cuda                   # one GPU, 4 layers of Llama-3-8B
    python benches/monitor.py --device cuda --recipes delayed,mxfp8 --compiled
    torchrun --nproc-per-node 2 benches/monitor.py            # a small sharded model on CPUs

Each round times one step of each kind. Times are medians over rounds, in milliseconds: wall time on
a GPU, and CPU time of the process on a CPU, which other processes do not affect. The time of a
logged step includes its preparation at the end of the step before. "memory" is the peak on a GPU in
bytes. Times exclude compilation, except for "first_logged", the first logged step. Rank 0 prints
JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import fp8rs
from fp8rs.demo.model import Llama, LlamaConfig

SIZES = {
    "cuda": LlamaConfig(8192, dim=4096, layers=4, heads=32, kv_heads=8, hidden=14336),
    "cpu": LlamaConfig(256, dim=256, layers=4, heads=4, kv_heads=2, hidden=768),
}
TOKENS = {"cuda": 8192, "cpu": 256}


class Bench:
    """Trains a model and times its steps."""

    def __init__(self, recipe: str, device: str, compiled: bool) -> None:
        self.device = torch.device(device)
        config = SIZES[device]
        torch.manual_seed(0)
        with self.device:
            self.model = Llama(config)
            self.tokens = torch.randint(config.vocabulary, (1, TOKENS[device] + 1))
        fp8rs.convert_to_float8_training(
            self.model, recipe=recipe, filter_fqns=["head"], gemms="fp8"
        )
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.model.blocks:
            if compiled:
                block.compile(fullgraph=True)
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)

    def step(self, monitor: fp8rs.Monitor | None) -> tuple[float, int]:
        """Run a step, and return its time in milliseconds and peak memory."""
        self._wait()
        clock = time.process_time
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            clock = time.perf_counter
        start = clock()
        self.model.loss(self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
        self._wait()
        memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return (clock() - start) * 1e3, memory

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def run(self, rounds: int) -> dict[str, Any]:
        """Return the measurements."""
        for _ in range(4):  # first scales, and graphs
            self.step(None)
        found: dict[str, list[tuple[float, int]]] = {"without": [], "logged": [], "others": []}
        first = 0.0
        for n in range(rounds + 1):
            without = self.step(None)
            with fp8rs.monitor(self.model, every=3) as monitor:
                made, others, prepares, logged = (self.step(monitor) for _ in range(4))
                names = len(monitor.latest)
            if n == 0:
                first = made[0]
                continue
            found["without"].append(without)
            found["others"].append(others)
            found["logged"].append((logged[0] + prepares[0] - others[0], logged[1]))
        medians = {
            kind: round(statistics.median(ms for ms, _ in of), 3) for kind, of in found.items()
        }
        peaks = {kind: max(memory for _, memory in of) for kind, of in found.items()}
        return {
            **medians,
            "first_logged": round(first, 1),
            "logged_costs_steps": round(medians["logged"] / medians["without"] - 1, 3),
            "others_ratio": round(medians["others"] / medians["without"], 4),
            "memory": peaks if self.device.type == "cuda" else None,
            "statistics": names,
        }


def main() -> None:
    """Time steps with and without a monitor, and print the times as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--recipes", default="current,delayed,rowwise,mxfp8")
    parser.add_argument("--compiled", action="store_true", help="also measure compiled blocks")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29544")
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    found: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "ranks": dist.get_world_size(),
    }
    for recipe in options.recipes.split(","):
        for compiled in (False, True) if options.compiled else (False,):
            torch.compiler.reset()
            name = f"{recipe}, compiled" if compiled else recipe
            found[name] = Bench(recipe, options.device, compiled).run(options.rounds)
    if dist.get_rank() == 0:
        print(json.dumps(found, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
