"""Start the ranks of the demo, run both trainings on them, and show the comparison."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

from fp8rs import UnsupportedError
from fp8rs.gemm.devices import check_cuda
from fp8rs.quantize.recipes import RecipeName, resolve_recipe

from .report import Outcome, show
from .train import DTYPES, Settings, steps_in, train

#: How long the steps of both trainings take on a CPU, together and without the evaluations.
CPU_SECONDS = 80


def run(
    ranks: int | None,
    recipe: RecipeName,
    steps: int | None,
    device: str | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Train both models, print the comparison and write the files.

    Raises:
        ValueError: the device cannot run the demo.
        torch.multiprocessing.ProcessException: a rank failed.
    """
    device, ranks = _choose_device(device, ranks, recipe)
    settings = Settings.choose(device, ranks, steps)
    if device == "cpu":
        settings = replace(settings, dtype=faster_dtype())

    print(
        f"training in {settings.dtype}, then with {recipe}, on {ranks} {device} ranks", flush=True
    )
    if settings.dtype == "fp32":
        print(
            "This CPU multiplies bf16 matrices slower than fp32 matrices. What is not in FP8 is "
            "therefore fp32.",
            flush=True,
        )

    # The ranks share the cores.
    threads = max(1, torch.get_num_threads() // ranks)
    for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
        os.environ.setdefault(name, str(threads))
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Otherwise gloo resolves the name of the host, which fails in many containers.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    # This process holds the store, on a port that the system chooses.
    store = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    spawn(
        _run_rank,
        (ranks, store.port, settings, recipe, steps is None, json_path, plot_path),
        nprocs=ranks,
        daemon=True,  # Ctrl-C ends the ranks too.
    )


def faster_dtype() -> str:
    """Return "bf16" or "fp32", whichever this CPU multiplies faster.

    A CPU without AMX or AVX-512 runs torch's bf16 GEMMs 10 to 20 times slower than fp32 GEMMs.
    """
    # The shape of the demo's largest GEMM on each of two ranks.
    tokens, inputs, outputs = 1024, 512, 192
    seconds = {}
    for name, dtype in DTYPES.items():
        x = torch.ones(tokens, inputs, dtype=dtype)
        weight = torch.ones(outputs, inputs, dtype=dtype)
        durations = []
        # Other processes can delay a GEMM, so compare the shortest of several.
        for _ in range(5):
            start = time.perf_counter()
            F.linear(x, weight)
            durations.append(time.perf_counter() - start)
        seconds[name] = min(durations)
    return min(seconds, key=seconds.__getitem__)


def _choose_device(device: str | None, ranks: int | None, recipe: RecipeName) -> tuple[str, int]:
    """Return the device and the number of ranks, by default one rank for each GPU."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is None:
        device = "cuda" if gpus else "cpu"
    if device == "cpu":
        return device, ranks or 2

    if not gpus:
        raise ValueError("--device cuda: torch finds no GPU; --device cpu works")
    ranks = ranks or gpus
    if ranks > gpus:
        raise ValueError(
            f"--ranks {ranks}: each rank needs a GPU, and this machine has {gpus}; give fewer "
            "ranks, or --device cpu"
        )
    try:
        for index in range(ranks):
            check_cuda(index, resolve_recipe(recipe).name)
    except UnsupportedError as error:
        raise ValueError(f"--recipe {recipe}: {error}") from error
    return device, ranks


def _run_rank(
    rank: int,
    ranks: int,
    port: int,
    settings: Settings,
    recipe: RecipeName,
    fit_steps: bool,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Run both trainings on one rank. Rank 0 shows the comparison."""
    on_gpu = settings.device == "cuda"
    if on_gpu:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.TCPStore("127.0.0.1", port),  # type: ignore[attr-defined]
        rank=rank,
        world_size=ranks,
        device_id=torch.device("cuda", rank) if on_gpu else None,
    )

    if fit_steps and not on_gpu:
        settings = replace(settings, steps=steps_in(CPU_SECONDS, settings, recipe))

    reference = train(settings, None)
    fp8 = train(settings, recipe)
    if rank == 0:
        outcome = Outcome(
            ranks, settings.device, settings.dtype, recipe, settings.steps, reference, fp8
        )
        show(outcome, json_path, plot_path)

    time.sleep(0.1)  # Threads of gloo could abort the exit otherwise.
    dist.destroy_process_group()
