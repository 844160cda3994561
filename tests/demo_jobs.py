"""Functions that tests run with `launch` of benches/."""

from __future__ import annotations

import os
import runpy
import shutil
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import fp8rs
from fp8rs.demo.model import Llama, LlamaConfig
from fp8rs.export import tensors
from internals import local_of


def quick_start(arguments: dict[str, Any], report: Any) -> list[float]:
    """Run the first script on a small model, then a few steps of training."""
    config = LlamaConfig(vocabulary=64, dim=48, layers=2, heads=4, kv_heads=2, hidden=96)
    model = Llama(config)
    model.init_weights(torch.Generator().manual_seed(0))
    names: dict[str, Any] = {"model": model.to(arguments["device"])}
    exec(arguments["code"], names)
    optimizer: torch.optim.Optimizer = names["optimizer"]
    assert all(isinstance(block.attention.wq, fp8rs.nn.Linear) for block in model.blocks)
    tokens = torch.arange(2 * 33).reshape(2, 33) % 64
    losses = []
    for _ in range(12):
        loss = model.loss(tokens.to(arguments["device"]))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def pages(arguments: dict[str, Any], report: Any) -> dict[str, str | list[float]]:
    """Run the code blocks of documentation pages, each with new globals.

    Args:
        arguments: "folder" is the working directory. "blocks" maps a name to a list of
            sources, which run one after the other with the same globals.
        report: Not used.

    Returns:
        For each name, the traceback of its error, or the bytes per element of each FP8 weight of
        the variable ``model``.
    """
    os.chdir(arguments["folder"])
    results: dict[str, str | list[float]] = {}
    # The ranks are initialized already, and all blocks share their process group.
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        for name, texts in arguments["blocks"].items():
            names: dict[str, Any] = {}
            try:
                for text in texts:
                    exec(compile(text, name, "exec", dont_inherit=True), names)
            except Exception:
                results[name] = traceback.format_exc(limit=-1)
                continue
            parameters = names["model"].parameters() if "model" in names else ()
            results[name] = [_bytes_at_rest(p) for p in parameters if _is_quantized(p)]
    return results


def examples(arguments: dict[str, Any], report: Any) -> dict[str, Any]:
    """Run the examples that need no other library, each with few steps.

    Args:
        arguments: "examples" is their folder, and "folder" one that the ranks share.
        report: Not used.
    """
    folder = Path(arguments["folder"])

    def run(name: str, *options: Any) -> dict[str, Any]:
        example = runpy.run_path(str(Path(arguments["examples"], f"{name}.py")))
        result: dict[str, Any] = example["main"]([str(option) for option in options])
        return result

    # The ranks are initialized already, and all examples share their process group.
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        lora = run("lora", "--steps", 20, "--save", folder / "adapters.pt")
        frozen = [p for p in lora.pop("model").parameters() if not p.requires_grad]
        lora["bytes"] = [_bytes_at_rest(p) for p in frozen if _is_quantized(p)]
        stream = run("rl_weight_stream", "--updates", 12)
        policy = stream.pop("policy")
        engine = stream.pop("engine")
        for name, tensor in tensors(policy, format="fp8-row"):
            if engine is not None:
                engine.receive(name, tensor)
        with torch.no_grad():
            tokens = (torch.arange(34) % 32).view(2, 17).to(local_of(policy.head.weight).device)
            logits = policy(tokens).float()
            if engine is not None:
                error = (engine.model(tokens) - logits).norm() / logits.norm()
                stream["error"] = error.item()
        steps = ("--folder", folder / "checkpoints", "--steps", 4, "--save-every", 2)
        first = run("resume", *steps)["losses"]
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder / "checkpoints" / "step-4")
        dist.barrier()
        resumed = run("resume", *steps)["losses"]
    return {"lora": lora, "stream": stream, "first": first, "resumed": resumed}


def _is_quantized(parameter: Any) -> bool:
    return isinstance(local_of(parameter), fp8rs.QuantizedTensor)


def _bytes_at_rest(parameter: Any) -> float:
    part = local_of(parameter)
    return sum(t.nbytes for plane in part.planes if plane for t in (plane.data, plane.scale)) / (
        part.numel()
    )
