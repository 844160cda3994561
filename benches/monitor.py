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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Step:
    """The time of a step in milliseconds, and the peak memory in bytes, 0 on a CPU."""

    ms: float
    peak_memory: int


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

    def step(self, monitor: fp8rs.Monitor | None) -> Step:
        """Run a step, and return its time and peak memory."""
        self._wait()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            clock = time.perf_counter
        else:
            clock = time.process_time

        start = clock()
        self.model.loss(self.tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
        self._wait()
        peak_memory = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return Step((clock() - start) * 1e3, peak_memory)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()

    def run(self, rounds: int) -> dict[str, Any]:
        """Return the measurements."""
        for _ in range(4):  # first scales, and graphs
            self.step(None)

        first_logged_ms = 0.0
        steps: dict[str, list[Step]] = {"without": [], "logged": [], "others": []}
        for round_number in range(rounds + 1):
            without = self.step(None)
            # The first step and each third one are logged. The step before prepares it.
            with fp8rs.monitor(self.model, every=3) as monitor:
                first_logged = self.step(monitor)
                other = self.step(monitor)
                preparing = self.step(monitor)
                logged = self.step(monitor)
                statistics_count = len(monitor.latest)
            if round_number == 0:
                first_logged_ms = first_logged.ms
                continue

            preparation_ms = preparing.ms - other.ms
            steps["without"].append(without)
            steps["others"].append(other)
            steps["logged"].append(Step(logged.ms + preparation_ms, logged.peak_memory))

        median_ms = {}
        peaks = {}
        for kind, steps_of_kind in steps.items():
            median_ms[kind] = round(statistics.median(step.ms for step in steps_of_kind), 3)
            peaks[kind] = max(step.peak_memory for step in steps_of_kind)
        return {
            **median_ms,
            "first_logged": round(first_logged_ms, 1),
            "logged_costs_steps": round(median_ms["logged"] / median_ms["without"] - 1, 3),
            "others_ratio": round(median_ms["others"] / median_ms["without"], 4),
            "memory": peaks if self.device.type == "cuda" else None,
            "statistics": statistics_count,
        }


def main() -> None:
    """Time steps with and without a monitor, and print the times as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--recipes", default="current,delayed,rowwise,mxfp8")
    parser.add_argument("--compiled", action="store_true", help="also measure compiled blocks")
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()

    # Without torchrun, one rank.
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29544")
    dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    if options.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))

    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "ranks": dist.get_world_size(),
    }
    modes = [False, True] if options.compiled else [False]
    for recipe in options.recipes.split(","):
        for compiled in modes:
            torch.compiler.reset()
            name = f"{recipe}, compiled" if compiled else recipe
            report[name] = Bench(recipe, options.device, compiled).run(options.rounds)
    if dist.get_rank() == 0:
        print(json.dumps(report, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
