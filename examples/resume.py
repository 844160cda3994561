"""Train on real text, save asynchronously, and resume from the last checkpoint.

torchrun --standalone --nproc-per-node 2 examples/resume.py. It resumes on any number of processes.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fp8rs import checkpoint, convert_to_float8_training
from fp8rs.demo.data import load_corpus
from fp8rs.demo.train import Settings, build_model, shard
from fp8rs.optim import AdamW


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default="checkpoints", help="folder of the checkpoints"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20, help="steps")
    options = parser.parse_args(argv)

    rank = int(os.environ["LOCAL_RANK"])
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    device = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    save_group = dist.new_group(backend="gloo")  # for the thread that saves

    settings = Settings.choose(device, ranks, options.steps)
    corpus = load_corpus()
    model = build_model(settings)
    convert_to_float8_training(
        model,
        recipe="delayed",
        filter_fqns=["head"],
        fp8_weights=True,
        preserve_high_precision_init_val=True,
    )
    shard(model)  # calls fully_shard
    optimizer = AdamW(model.parameters(), lr=settings.learning_rate)

    state = {
        "model": checkpoint.Model(model),
        "step": 0,
        "optimizer": checkpoint.Optimizer(model, optimizer),
    }
    # A directory without .metadata is not a checkpoint: the save has not finished.
    saved_steps = []
    for path in options.folder.glob("step-*/.metadata"):
        saved_steps.append(int(path.parent.name.removeprefix("step-")))
    if saved_steps:
        last = options.folder / f"step-{max(saved_steps)}"
        checkpoint.load(state, last)
        if rank == 0:
            print(f"resumed from {last.name} on {ranks} ranks", flush=True)

    pending_save = None
    losses = {}
    for step in range(state["step"], settings.steps):
        rows = corpus.batch(settings.seed, step, settings.rows, settings.length)
        loss = model.loss(rows.chunk(ranks)[dist.get_rank()].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        mean_loss = loss.detach() / ranks
        dist.all_reduce(mean_loss)
        losses[step] = mean_loss.item()
        if rank == 0:
            print(f"step {step}: loss {losses[step]:.4f}", flush=True)

        if (step + 1) % options.save_every == 0:
            if pending_save is not None:
                pending_save.result()  # an error of the last save is raised here
            state["step"] = step + 1
            folder = options.folder / f"step-{step + 1}"
            pending_save = checkpoint.async_save(state, folder, process_group=save_group)
    if pending_save is not None:
        pending_save.result()
    time.sleep(0.1)  # gloo may abort the exit otherwise, see docs/troubleshooting.md
    dist.destroy_process_group()
    return {"losses": losses}


if __name__ == "__main__":
    main()
