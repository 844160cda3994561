"""What a step sends, on paper (``python -m fp8rs links``).

A table in Markdown, for one host of 8 GPUs and for 8 of them: bytes that a GPU takes in, in a step,
within its host and over the network, by recipe and by what ``set_links`` chooses. The model is made
on the meta device. Gathers and reductions within a host bring each GPU all parts but its own. Over
the network a ring brings a host each part of the others once, split over its GPUs' adapters; with
HSDP it is the gradients of the replicas alone, reduced and spread again in float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fp8rs.convert.report import report
from fp8rs.quantize.recipes import RecipeName

#: GPUs of a host, hosts, and bytes a second that each GPU's network adapter takes in.
GPUS, HOSTS, NETWORK = 8, 8, 50e9
WAYS = (("torch", torch.float32), ("set_links", torch.bfloat16))


def rows(model: nn.Module, recipe: RecipeName | None) -> Iterator[tuple[str, str, float, float]]:
    """Layout, way of the reduction, and bytes within the host and over the network.

    Args:
        model: not sharded; None as ``recipe`` leaves it in high precision.
        recipe: a recipe's short name.
    """
    for layout, shards in (("1 host", GPUS), ("8 hosts, HSDP", GPUS), ("8 hosts", GPUS * HOSTS)):
        for way, dtype in WAYS:
            if layout == "8 hosts" and dtype == torch.bfloat16:
                continue  # between hosts that have several ranks each torch's ring sends less
            found = report(model, recipe=recipe or "current", world_size=shards, reduce_dtype=dtype)
            gathered = found.gathered if recipe else found.gathered_high_precision
            all_parts = gathered + found.scattered
            network = 0.0
            if layout == "8 hosts":
                network = all_parts / GPUS * (HOSTS - 1) / HOSTS
            elif layout != "1 host":
                shard = 4 / dtype.itemsize * found.scattered / GPUS  # in float32 either way
                network = 2 * shard * (HOSTS - 1) / HOSTS
            yield layout, way, all_parts * (GPUS - 1) / GPUS, network


def table(model: nn.Module, recipes: tuple[RecipeName | None, ...]) -> str:
    """The rows of several recipes in Markdown; None is bf16."""
    lines = [
        "| recipe | layout | reduction | GB within the host | GB over the network | ms of it |",
        "|---|---|---|---|---|---|",
    ]
    for recipe in recipes:
        for layout, way, inside, network in rows(model, recipe):
            seconds = f"{network / NETWORK * 1e3:.0f}" if network else ""
            lines.append(
                f"| {recipe or 'bf16'} | {layout} | {way} | {inside / 1e9:.2f} "
                f"| {network / 1e9:.2f} | {seconds} |"
            )
    return "\n".join(lines)
