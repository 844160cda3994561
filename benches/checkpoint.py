"""Time saving and loading a model of 1 B parameters with fp8rs.checkpoint, and its bytes on disk.

    python benches/checkpoint.py --device cuda [--folder DIR]       # one rank
    torchrun --nproc-per-node 2 benches/checkpoint.py --layers 2    # a smaller model on CPUs

Saves weights without an optimizer: bf16 and fp32 parameters of the unconverted model with
torch.distributed.checkpoint, then fp32 master weights and FP8 weights of each recipe with
fp8rs.checkpoint. "async" is the time until `async_save` returns. Files are written to a temporary
folder. Reads may come from the operating system's cache. Rank 0 prints JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard

import fp8rs
from fp8rs import checkpoint
from fp8rs.demo.model import Llama, LlamaConfig

VARIANTS = ("bf16", "fp32", "masters", "current", "delayed", "rowwise", "block", "mxfp8")

T = TypeVar("T")


def sharded(variant: str, layers: int, device: torch.device) -> Llama:
    """Return the model of a variant, sharded over all ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(32000, dim=2048, layers=layers, heads=16, kv_heads=4, hidden=5632)
    with device:
        model = Llama(config)

    if variant == "bf16":
        model.bfloat16()
    elif variant == "masters":
        fp8rs.convert_to_float8_training(model, recipe="current", gemms="fp8", filter_fqns=["head"])
    elif variant != "fp32":
        fp8rs.convert_to_float8_training(
            model,
            recipe=variant,  # type: ignore[arg-type]
            gemms="fp8",
            filter_fqns=["head"],
            fp8_weights=True,
        )

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def timed(call: Callable[[], T]) -> tuple[float, T]:
    """Return the seconds until a call has ended on all ranks, and its result."""
    dist.barrier()
    start = time.perf_counter()
    result = call()
    dist.barrier()
    return time.perf_counter() - start, result


def measure(variant: str, layers: int, device: torch.device, folder: Path) -> dict[str, Any]:
    """Return the measurements of a variant."""
    model = sharded(variant, layers, device)
    async_group = dist.new_group(backend="gloo")

    # Both modules have functions with these names.
    state: dict[str, Any]
    if variant in ("bf16", "fp32"):
        library: Any = dcp
        folder_argument = "checkpoint_id"
        state = model.state_dict()
    else:
        library = checkpoint
        folder_argument = "directory"
        state = {"model": checkpoint.Model(model)}

    saved_to = {folder_argument: folder / "saved"}
    async_saved_to = {folder_argument: folder / "async"}
    save_seconds, _ = timed(lambda: library.save(state, **saved_to))
    load_seconds, _ = timed(lambda: library.load(state, **saved_to))
    async_seconds, future = timed(
        lambda: library.async_save(state, **async_saved_to, process_group=async_group)
    )
    future.result()

    nbytes = 0
    for path in (folder / "saved").rglob("*"):
        if path.is_file():
            nbytes += path.stat().st_size
    row = {
        "variant": variant,
        "save": save_seconds,
        "load": load_seconds,
        "async": async_seconds,
        "bytes": nbytes,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }
    # Rank 0 removes the files after all ranks have read their sizes.
    dist.barrier()
    return row


def main() -> None:
    """Measure each variant."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--folder", help="the folder to write to; default: a temporary one")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29512")
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    for variant in options.variants.split(","):
        # All ranks write to the folder of rank 0.
        folders = [tempfile.mkdtemp(dir=options.folder)]
        dist.broadcast_object_list(folders)
        folder = Path(folders[0])
        row = measure(variant, options.layers, device, folder)
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
            shutil.rmtree(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
