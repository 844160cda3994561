"""Time a training step under FSDP2 with fp8rs, bf16, torchao and TransformerEngine.

The workload has 16 layers with Llama-3-8B's shapes, vocabulary 32000, sequence length 8192, batch
size 1 per GPU, fp32 master weights, AdamW, head and embedding in bf16, reduce-scatter in fp32, and
no activation checkpointing. The loss is measured after 12 steps on one fixed random batch. Variants
that end in -fp8 convert with fp8_weights=True and train with fp8rs.optim.AdamW. Variants of torchao
are "torchao" (one scale per tensor, with its FP8 all-gather), "torchao-rowwise" and
"torchao-rowwise_with_gw_hp", which gather in bf16, because torchao gathers no scales of rows.
Variants "te-bf16", "te-current" and "te-delayed" have TransformerEngine's TransformerLayer as
blocks, whose weights FSDP2 gathers in bf16. In "te-current-fp8" and "te-delayed-fp8", its weights
are FP8, gathered in FP8 and trained by its FusedAdam with masters; they require +bf16-params.

Settings can follow a variant's name, each after a +. They override options of the same names:

- no-masters, masters: masters of fp8rs.optim.AdamW
- bf16-state, fp32-state, fp8-state: dtype of its moments
- bf16-reduce, fp32-reduce: dtype of the reduce-scatter
- bf16-params, fp32-params: dtype of stored parameters and sharded gradients; the logical dtype of
  FP8 weights
- save-input, save-codes: what layers save for the backward
- recompute: as --recompute
- squares: wgrad_input_block=(128, 128), for block variants
- modules: blocks are fp8rs.nn.TransformerLayer, as with --blocks modules
- auto: gemms="auto", the default of a conversion. Other variants of fp8rs have FP8 GEMMs only
- comm: fp8rs.comm.set_fsdp_comm
- torch-symm-mem: FSDP2's set_symm_mem_for_comm, since torch 2.12. NCCL uses copy engines if the
  environment has NCCL_CTA_POLICY=2

    python benches/end_to_end.py                       # every variant on every GPU
    python benches/end_to_end.py --ranks 2 --variants bf16,current
    python benches/end_to_end.py --variants bf16-compiled,rowwise-compiled,\
rowwise_with_gw_hp-compiled,torchao-rowwise_with_gw_hp-compiled
    python benches/end_to_end.py --variants bf16,current-fp8,current-fp8+no-masters+bf16-reduce
    python benches/end_to_end.py --variants current-fp8+no-masters+bf16-state+bf16-params,\
current-fp8+no-masters+fp8-state+bf16-params,current-fp8+fp8-state
    python benches/end_to_end.py --ranks 2 --profile --variants bf16-compiled,bf16-compiled+comm
    python benches/end_to_end.py --ranks 2 --variants bf16,current,current+modules,te-current
    python benches/end_to_end.py --device cpu --ranks 2 --dim 256 --layers 2 --sequence 64 \
        --vocabulary 512 --steps 2                     # a smoke run without a GPU

Each variant runs in separate processes with a time limit. A failure is recorded with its reason,
and the other variants run. The JSON file is written after each variant. Variants of torchao and of
TransformerEngine are skipped with a message if the library cannot be imported. Install it, or add a
folder that contains it (`pip install --no-deps --target DIR torchao`) to PYTHONPATH.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import statistics
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from blocks import replace_blocks
from launch import RankFailed, launch
from meter import Meter, converted_weights, peak_memory
from torch.autograd import DeviceType
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from traffic import converted_share, counted

from fp8rs import convert_to_float8_training
from fp8rs.comm import set_fsdp_comm
from fp8rs.demo.model import Llama, LlamaConfig, parameter_count
from fp8rs.demo.train import HIGH_PRECISION, shard
from fp8rs.optim import AdamW
from fp8rs.quantize.recipes import RECIPES, resolve_recipe

#: So small that the loss on the one batch still falls after the warm-up, and that gradients are
#: those of a training. With 1e-5, the loss is 3e-5 after 14 steps. With 3e-4, it is chaotic after
#: six, in bf16 too.
LEARNING_RATE = 1e-6

#: Dtypes by the names in options.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: The state_dtype of fp8rs.optim.AdamW by the names in options.
STATE_DTYPES = {**DTYPES, "fp8": "fp8"}


@dataclass(frozen=True)
class Variant:
    """A library and recipe to train with, compiled or not."""

    library: str
    recipe: str | None
    compiled: bool
    fp8_weights: bool = False


def _variants() -> dict[str, Variant]:
    found = {"bf16": Variant("torch", None, False)}
    for recipe in RECIPES:
        if recipe != "tensorwise":
            found[recipe] = Variant("fp8rs", recipe, False)
            found[f"{recipe}-fp8"] = Variant("fp8rs", recipe, False, fp8_weights=True)
    found["torchao"] = Variant("torchao", "tensorwise", False)
    for recipe in ("rowwise", "rowwise_with_gw_hp"):
        found[f"torchao-{recipe}"] = Variant("torchao", recipe, False)
    for recipe in ("current", "delayed"):
        found[f"te-{recipe}"] = Variant("transformer_engine", recipe, False)
        found[f"te-{recipe}-fp8"] = Variant("transformer_engine", recipe, False, fp8_weights=True)
    found["te-bf16"] = Variant("transformer_engine", None, False)
    compiled = {f"{k}-compiled": dataclasses.replace(v, compiled=True) for k, v in found.items()}
    # TransformerEngine's modules are not compiled: they have kernels of their own.
    compiled = {k: v for k, v in compiled.items() if v.library != "transformer_engine"}
    return {**found, **compiled}


VARIANTS = _variants()

#: Settings that can follow a variant's name after a +: an option and its value.
MODIFIERS: dict[str, tuple[str, Any]] = {
    "masters": ("masters", True),
    "no-masters": ("masters", False),
    "save-input": ("save_input", True),
    "save-codes": ("save_input", False),
    "recompute": ("recompute", True),
    "squares": ("squares", True),
    "auto": ("gemms", "auto"),
    "modules": ("blocks", "modules"),
    "comm": ("comm", True),
    "torch-symm-mem": ("torch_symm_mem", True),
    **{
        f"{dtype}-{kind}": (option, dtype)
        for dtype in DTYPES
        for kind, option in (
            ("reduce", "reduce_dtype"),
            ("params", "param_dtype"),
        )
    },
    **{f"{dtype}-state": ("state_dtype", dtype) for dtype in STATE_DTYPES},
}


def parsed(name: str) -> tuple[Variant, dict[str, Any]]:
    """Parse a variant and its settings.

    Raises:
        ValueError: a variant or setting is not known.
    """
    base, *modifiers = name.split("+")
    if base not in VARIANTS:
        raise ValueError(f"variant {base} is not known; the names are {', '.join(VARIANTS)}")
    unknown = [modifier for modifier in modifiers if modifier not in MODIFIERS]
    if unknown:
        raise ValueError(
            f"{name}: setting {unknown[0]} is not known; the names are {', '.join(MODIFIERS)}"
        )
    own = dict(MODIFIERS[modifier] for modifier in modifiers)
    has_our_optimizer = VARIANTS[base].fp8_weights and VARIANTS[base].library == "fp8rs"
    if not has_our_optimizer and not {"masters", "state_dtype"}.isdisjoint(own):
        raise ValueError(
            f"{name}: masters and state require fp8rs.optim.AdamW, which -fp8 variants use"
        )
    if VARIANTS[base].recipe != "block" and "squares" in own:
        raise ValueError(f"{name}: squares requires a block variant")
    if VARIANTS[base].library == "transformer_engine" and "blocks" in own:
        raise ValueError(f"{name}: variants of TransformerEngine have its blocks")
    return VARIANTS[base], own


#: Libraries that may be missing, by the names that variants have.
PEERS = {"torchao": "torchao", "transformer_engine": "TransformerEngine"}


def main() -> int:
    """Measure all variants."""
    options = _options()
    try:
        for name in options.variants:
            parsed(name)
    except ValueError as error:
        print(error)
        return 2
    if options.device == "cpu" and options.dim >= 4096:
        print(
            "this workload requires a GPU, and torch finds none. For a smoke run on the CPU:\n"
            "    python benches/end_to_end.py --dim 256 --layers 2 --sequence 64 --vocabulary 512 "
            "--steps 2",
            file=sys.stderr,
        )
        return 2
    report: dict[str, Any] = {"workload": _workload(options), "machine": _machine(options)}
    report["variants"] = {}
    for name in options.variants:
        report["variants"][name] = _measured(name, options)
        options.out.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))
    if options.plot is not None:
        plot(report, options.plot)
    return 1 if all("error" in v for v in report["variants"].values()) else 0


def _measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    variant, own = parsed(name)
    if variant.library in PEERS and importlib.util.find_spec(variant.library) is None:
        peer = PEERS[variant.library]
        reason = f"{peer} cannot be imported: add a folder that contains it to PYTHONPATH"
        print(f"{name}: skipped: {reason}", flush=True)
        return {"error": reason}
    start = time.perf_counter()

    def show(event: dict[str, Any]) -> None:
        print(f"{name}: {time.perf_counter() - start:6.1f} s  {event['what']}", flush=True)

    try:
        results = launch(
            rank,
            {"variant": name, **_workload(options), **own},
            ranks=options.ranks,
            device=options.device,
            on_event=show,
            limit_seconds=options.limit,
        )
    except (RankFailed, TimeoutError) as error:
        print(f"{name}: failed: {error}", flush=True)
        return {"error": str(error)}
    first = results[0]
    first["peak_memory"] = max(result["peak_memory"] for result in results)
    return dict(first)


def rank(arguments: dict[str, Any], report: Any) -> dict[str, Any]:
    """Train and measure a variant on one rank."""
    (variant, _), ranks = parsed(arguments["variant"]), dist.get_world_size()
    device = torch.device("cuda", dist.get_rank()) if torch.cuda.is_available() else "cpu"
    device = torch.device(device if arguments["device"] == "cuda" else "cpu")
    config = LlamaConfig(**arguments["model"])
    batch = _batch(arguments, device)
    meter = Meter()
    with device:
        model = Llama(config)
    # All ranks initialize equal weights, because they shard one model.
    model.init_weights(torch.Generator(device).manual_seed(0))
    model.to(DTYPES[arguments["param_dtype"]])
    is_peer = variant.library == "transformer_engine"
    with _weights_of_peer(variant):
        replace_blocks(model, "te" if is_peer else arguments["blocks"])
    params, weights = parameter_count(model), converted_weights(model)
    if is_peer:
        matrices = (name for name, weight in model.named_parameters() if weight.ndim == 2)
        weights = {name for name in matrices if name.startswith("blocks.")}
    options = {"save_input": arguments["save_input"]}
    if arguments.get("squares"):
        options["wgrad_input_block"] = (128, 128)
    after_step = _prepare(model, variant, arguments, device.type, options)
    shard(model, device.type, ranks, reduce_dtype=DTYPES[arguments["reduce_dtype"]])
    if arguments.get("comm"):
        set_fsdp_comm(model)
    if arguments.get("torch_symm_mem"):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_symm_mem_for_comm()
    optimizer = _optimizer(model, variant, arguments)
    report({"what": f"{params / 1e9:.2f} G parameters"})

    def step() -> torch.Tensor:
        with sdpa_kernel(_ATTENTION, set_priority=True):
            with _autocast(variant):
                loss = model.loss(batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step(model)
        return loss.detach()

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(arguments["warm_up"]):
        step()
    loss = step()
    dist.all_reduce(loss)
    report({"what": f"loss after {arguments['warm_up']} steps: {loss.item() / ranks:.4f}"})
    seconds = _timed(step, arguments["steps"], device)
    peak = peak_memory(device.type)
    if arguments["profile"]:
        trace = arguments["trace"] if dist.get_rank() == 0 else None
        name = None if trace is None else Path(trace) / f"{arguments['variant']}.json.gz"
        report({"what": profiled(step, name)})
    with counted(model, ranks) as traffic:
        step()
    model.reshard()  # type: ignore[operator]
    at_rest = meter.at_rest(model, optimizer, weights)
    hooked = variant.library in ("fp8rs", "torchao")
    return {
        "params": params,
        "loss": loss.item() / ranks,
        "step_seconds": seconds,
        "tokens_per_second": arguments["sequence"] / statistics.median(seconds),
        "peak_memory": peak,
        "at_rest": dataclasses.asdict(at_rest),
        "reduce_scatter_bytes": sum(traffic.scatters),
        "all_reduces": len(traffic.all_reduces),
        "allgather_bytes": traffic.total,
        "weight_bytes": traffic.handed_over
        if hooked
        else converted_share(traffic, model, weights, ranks, itemsize=2),
    }


_ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def _recipe_of_peer(variant: Variant) -> Any:
    """Return TransformerEngine's recipe of a variant."""
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    return DelayedScaling() if variant.recipe == "delayed" else Float8CurrentScaling()


def _weights_of_peer(variant: Variant) -> AbstractContextManager[Any]:
    """Return the context in which TransformerEngine creates the weights of a variant."""
    if variant.library != "transformer_engine" or not variant.fp8_weights:
        return nullcontext()
    from transformer_engine.pytorch import quantized_model_init

    context: AbstractContextManager[Any] = quantized_model_init(recipe=_recipe_of_peer(variant))
    return context


def _autocast(variant: Variant) -> AbstractContextManager[Any]:
    """Return the context of a forward: TransformerEngine's, for a recipe of it."""
    if variant.library != "transformer_engine" or variant.recipe is None:
        return nullcontext()
    from transformer_engine.pytorch import fp8_autocast

    recipe = _recipe_of_peer(variant)
    context: AbstractContextManager[Any] = fp8_autocast(enabled=True, fp8_recipe=recipe)
    return context


def _optimizer(model: Llama, variant: Variant, arguments: dict[str, Any]) -> torch.optim.Optimizer:
    if variant.fp8_weights and variant.library == "transformer_engine":
        from transformer_engine.pytorch.optimizers import FusedAdam

        # torch's default weight decay.
        peer: torch.optim.Optimizer = FusedAdam(
            model.parameters(), LEARNING_RATE, weight_decay=0.01, master_weights=True
        )
        return peer
    if variant.fp8_weights:
        return AdamW(
            model.parameters(),
            lr=LEARNING_RATE,
            state_dtype=STATE_DTYPES[arguments["state_dtype"]],
            master_weights=arguments["masters"],
        )
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)


def _prepare(
    model: Llama,
    variant: Variant,
    arguments: dict[str, Any],
    device: str,
    options: dict[str, Any],
) -> Any:
    """Convert and compile the model, and return a function to call after each optimizer step.

    ``options`` are fields of the recipe that differ from its defaults.
    """

    def nothing(model: Llama) -> None:
        pass

    after_step: Any = nothing
    if variant.library == "fp8rs":
        assert variant.recipe is not None
        recipe = dataclasses.replace(resolve_recipe(variant.recipe), **options)
        fp8 = variant.fp8_weights
        masters = fp8 and arguments["masters"]
        convert_to_float8_training(
            model,
            recipe=recipe,
            filter_fqns=HIGH_PRECISION,
            gemms=arguments.get("gemms", "fp8"),
            fp8_weights=fp8,
            preserve_high_precision_init_val=masters,
        )
    elif variant.library == "torchao":
        from torchao import float8 as peer

        assert variant.recipe is not None
        has_fp8_gather = variant.recipe == "tensorwise"
        config = dataclasses.replace(
            peer.Float8LinearConfig.from_recipe_name(variant.recipe),
            enable_fsdp_float8_all_gather=has_fp8_gather,
            emulate=device == "cpu",
        )
        peer.convert_to_float8_training(
            model, config=config, module_filter_fn=lambda _, name: name != "head"
        )
        if has_fp8_gather:
            after_step = peer.precompute_float8_dynamic_scale_for_fsdp
    if variant.compiled:
        if arguments["recompute"]:
            torch._functorch.config.ban_recompute_materialized_backward = False
        for block in model.blocks:
            block.compile()
    return after_step


def _timed(step: Any, steps: int, device: torch.device) -> list[float]:
    """Return the seconds of each step, from CUDA events or from the clock on a CPU."""
    if device.type != "cuda":
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return seconds
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    dist.barrier()
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


#: Kinds of communication, by a part of the kernel's name in a profile. The driver's copies use no
#: SM. They include copies within a GPU.
COMMUNICATION = {
    "AllGather": "gathers",
    "ReduceScatter": "reductions",
    "SendRecv": "all to all",
    "sum_rows": "their sums",
    "AllReduce": "all-reduces",
    "Memcpy PtoP": "copies by copy engine, between GPUs",
    "Memcpy DtoD": "copies by copy engine, DtoD",
}


def communication(kernels: list[Any], steps: int) -> str:
    """Return a line with the time per step of communication kernels in a profile."""
    times = dict.fromkeys(COMMUNICATION.values(), 0.0)
    for kernel in kernels:
        for part, what in COMMUNICATION.items():
            if part in kernel.key:
                times[what] += kernel.self_device_time_total
                break
    found = ", ".join(f"{what} {time / steps / 1e3:.2f}" for what, time in times.items())
    return f"communication, ms of a step: {found}"


def profiled(step: Any, trace: Path | None) -> str:
    """Profile two steps and return their kernels, sorted by time.

    Args:
        step: the step to run.
        trace: a file to write a trace to, or None.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        for _ in range(2):
            step()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(trace))
    on_device = [e for e in found.key_averages() if e.device_type != DeviceType.CPU]
    kernels = [e for e in on_device if e.self_device_time_total and not e.is_user_annotation]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    lines = [
        f"{e.self_device_time_total / 2e3:9.2f} ms {e.count // 2:5d} x {e.key[:200]}"
        for e in kernels
    ]
    events = [e for e in found.events() if e.device_type != DeviceType.CPU]
    return "\n".join([communication(kernels, 2), busy(events, 2), "a step:", *lines[:40]])


def busy(events: list[Any], steps: int) -> str:
    """Return a line with the time per step in which the device computes.

    The rest of the time, it waits for the host or for communication.
    """
    spans = sorted(
        (e.time_range.start, e.time_range.end)
        for e in events
        if not e.is_user_annotation and not any(part in e.key for part in COMMUNICATION)
    )
    computing, until = 0.0, float("-inf")
    for start, end in spans:
        computing += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = until - spans[0][0] if spans else 0.0
    return (
        f"computing, ms of a step: {computing / steps / 1e3:.2f} of {whole / steps / 1e3:.2f} "
        "from the first to the last kernel, while profiled"
    )


def _batch(arguments: dict[str, Any], device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    vocabulary = arguments["model"]["vocabulary"]
    shape = (1, arguments["sequence"] + 1)
    return torch.randint(vocabulary, shape, generator=generator).to(device)


def table(report: dict[str, Any]) -> str:
    """Return a Markdown table of all variants. Ratios compare with bf16, eager or compiled."""
    variants = report["variants"]
    lines = [
        "| variant | tokens/s/GPU | vs bf16 | peak GB "
        "| stored B per parameter: weights + optimizer | gathered GB per step "
        "| of which converted weights | reduced GB | all-reduces | loss |",
        "|---" * 10 + "|",
    ]
    for name, found in variants.items():
        if "error" in found:
            lines.append(f"| {name} | {found['error'].strip().splitlines()[-1]} |{' |' * 8}")
            continue
        kind = "bf16-compiled" if parsed(name)[0].compiled else "bf16"
        rest = found["at_rest"]
        base = variants.get(kind, {}).get("tokens_per_second")
        ratio = f"{found['tokens_per_second'] / base:.3f}" if base else ""
        lines.append(
            f"| {name} | {found['tokens_per_second']:,.0f} | {ratio} "
            f"| {found['peak_memory'] / 1e9:.1f} "
            f"| {rest['weights']:.2f} + {rest['optimizer']:.2f} "
            f"| {found['allgather_bytes'] / 1e9:.2f} | {found['weight_bytes'] / 1e9:.2f} "
            f"| {found['reduce_scatter_bytes'] / 1e9:.2f} | {found['all_reduces']} "
            f"| {found['loss']:.4f} |"
        )
    return "\n".join(lines)


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot throughput, peak memory and gathered bytes as bars."""
    from matplotlib.figure import Figure

    found = {name: v for name, v in report["variants"].items() if "error" not in v}
    panels = (
        ("tokens/s/GPU", [v["tokens_per_second"] for v in found.values()]),
        ("peak memory, GB", [v["peak_memory"] / 1e9 for v in found.values()]),
        ("gathered per step, GB", [v["allgather_bytes"] / 1e9 for v in found.values()]),
    )
    figure = Figure(figsize=(12, 1.5 + 0.4 * len(found)), layout="constrained")
    for axes, (title, values) in zip(figure.subplots(1, 3, sharey=True), panels, strict=True):
        bars = axes.barh(list(found), values)
        axes.bar_label(bars, fmt="{:,.4g}", padding=3)
        axes.set_title(title)
        axes.margins(x=0.2)
        axes.invert_yaxis()
    figure.savefig(path, dpi=120)


def _workload(options: argparse.Namespace) -> dict[str, Any]:
    heads = max(1, options.dim // 128)
    return {
        "device": options.device,
        "ranks": options.ranks,
        "model": {
            "vocabulary": options.vocabulary,
            "dim": options.dim,
            "layers": options.layers,
            "heads": heads,
            "kv_heads": max(1, heads // 4),
            "hidden": options.dim * 7 // 2,
            "rope_base": 500_000.0,
        },
        "sequence": options.sequence,
        "steps": options.steps,
        "warm_up": options.warm_up,
        "save_input": options.save_input,
        "masters": options.masters,
        "state_dtype": options.state_dtype,
        "reduce_dtype": options.reduce_dtype,
        "param_dtype": options.param_dtype,
        "recompute": options.recompute,
        "blocks": options.blocks,
        "profile": options.profile or options.trace is not None,
        "trace": None if options.trace is None else str(options.trace.resolve()),
    }


def _machine(options: argparse.Namespace) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    return {"torch": torch.__version__, "cuda": torch.version.cuda, "gpu": gpu}


def _options() -> argparse.Namespace:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpus else "cpu")
    parser.add_argument("--ranks", type=int, default=gpus or 2)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=12, help="steps before the loss is measured")
    parser.add_argument(
        "--profile", action="store_true", help="print the kernels of a step by time"
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FOLDER", help="profile, and write a trace to this folder"
    )
    parser.add_argument(
        "--save-input",
        action=argparse.BooleanOptionalAction,
        help="whether recipes save inputs or codes (default: inputs if compiled)",
    )
    parser.add_argument(
        "--recompute",
        action="store_true",
        help="let compiled backwards recompute inputs of GEMMs, which torch saves by default",
    )
    parser.add_argument(
        "--masters",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether fp8rs.optim.AdamW keeps masters, for -fp8 variants",
    )
    parser.add_argument(
        "--blocks",
        choices=("plain", "modules"),
        default="plain",
        help="plain layers, or fp8rs.nn.TransformerLayer, which has kernels of its own if eager",
    )
    for name, what in (
        ("state", "dtype of the moments of fp8rs.optim.AdamW"),
        ("reduce", "dtype of the reduce-scatter"),
        ("param", "dtype of stored parameters and of their sharded gradients"),
    ):
        choices = STATE_DTYPES if name == "state" else DTYPES
        parser.add_argument(f"--{name}-dtype", choices=choices, default="fp32", help=what)
    parser.add_argument(
        "--limit", type=float, default=240, help="time limit of a variant in seconds"
    )
    parser.add_argument("--out", type=Path, default=Path("end_to_end.json"))
    parser.add_argument("--plot", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
