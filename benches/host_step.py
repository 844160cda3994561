"""Measure the host time of training steps under FSDP2, in milliseconds.

    python benches/host_step.py [cpu|cuda] [--variants NAME,...] [--layers N] [--steps N]

A variant is bf16 or a recipe. -compiled after it compiles the blocks, and -fp8 keeps the weights in
FP8. The model is a Llama with tiny layers, so that the host is slower than the device. The process
is rank 0 of two whose other rank does not exist, so collectives take the time of a call.

The device is idle before each step, and nothing waits for it in the step. All times are minima over
steps, except the median. On the CPU, they include the computation, and FP8 GEMMs are emulated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from fp8rs import convert_to_float8_training
from fp8rs.demo.model import Llama, LlamaConfig
from fp8rs.demo.train import HIGH_PRECISION, shard
from fp8rs.optim import AdamW

VARIANTS = "bf16,current,delayed,mxfp8,current-fp8,bf16-compiled,current-compiled"
PARTS = ("forward", "backward", "optimizer")


def training(variant: str, device: str, layers: int) -> tuple[Llama, torch.optim.Optimizer]:
    """Return a sharded model of a variant, and its optimizer."""
    config = LlamaConfig(vocabulary=512, dim=256, layers=layers, heads=2, kv_heads=1, hidden=512)
    with torch.device(device):
        model = Llama(config)

    recipe, *settings = variant.split("-")
    fp8_weights = "fp8" in settings
    if recipe != "bf16":
        convert_to_float8_training(
            model,
            recipe=recipe,
            gemms="fp8",
            filter_fqns=HIGH_PRECISION,
            fp8_weights=fp8_weights,
            preserve_high_precision_init_val=False,
        )
    if "compiled" in settings:
        for block in model.blocks:
            block.compile()
    shard(model)

    optimizer: torch.optim.Optimizer
    if fp8_weights:
        optimizer = AdamW(model.parameters(), lr=1e-4)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, optimizer


def step_ms(model: Llama, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> list[float]:
    """Return the host time of each of the `PARTS` of a step."""
    if batch.is_cuda:
        torch.cuda.synchronize()
    forward_start = time.perf_counter()
    loss = model.loss(batch)
    backward_start = time.perf_counter()
    loss.backward()
    optimizer_start = time.perf_counter()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    end = time.perf_counter()
    return [
        1e3 * (backward_start - forward_start),
        1e3 * (optimizer_start - backward_start),
        1e3 * (end - optimizer_start),
    ]


def main() -> None:
    """Time the steps of each variant, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--variants", default=VARIANTS, metavar="NAME,...")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", metavar="FILE", help="write the times to this file")
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    batch = torch.randint(512, (1, 65), device=args.device)

    report: dict[str, dict[str, float]] = {}
    print("| variant | step, ms | median | " + " | ".join(PARTS) + " | first steps, s |")
    print("|---" * 7 + "|", flush=True)
    for variant in args.variants.split(","):
        start = time.perf_counter()
        model, optimizer = training(variant, args.device, args.layers)
        for _ in range(5):
            step_ms(model, optimizer, batch)
        first_steps_seconds = time.perf_counter() - start

        steps = [step_ms(model, optimizer, batch) for _ in range(args.steps)]
        totals_ms = [sum(parts_ms) for parts_ms in steps]
        min_ms = {"step": min(totals_ms)}
        for part, times_ms in zip(PARTS, zip(*steps, strict=True), strict=True):
            min_ms[part] = min(times_ms)
        report[variant] = min_ms

        cells = [f"{min_ms['step']:.2f}", f"{statistics.median(totals_ms):.2f}"]
        for part in PARTS:
            cells.append(f"{min_ms[part]:.2f}")
        print(f"| {variant} | {' | '.join(cells)} | {first_steps_seconds:.1f} |", flush=True)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(report, file)


if __name__ == "__main__":
    main()
