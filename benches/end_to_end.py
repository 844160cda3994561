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
- hsdp: two replicas of a sharded model, on an even number of ranks
- tp: tensor parallelism of 2 within FSDP2 (layouts.py), for fp8rs and bf16. Two ranks share a
  batch, and gathered bytes include activations

    python benches/end_to_end.py                       # every variant on every GPU
    python benches/end_to_end.py --ranks 2 --variants bf16,current
    python benches/end_to_end.py --variants bf16-compiled,rowwise-compiled,\
rowwise_with_gw_hp-compiled,torchao-rowwise_with_gw_hp-compiled
    python benches/end_to_end.py --variants bf16,current-fp8,current-fp8+no-masters+bf16-reduce
    python benches/end_to_end.py --variants current-fp8+no-masters+bf16-state+bf16-params,\
current-fp8+no-masters+fp8-state+bf16-params,current-fp8+fp8-state
    python benches/end_to_end.py --ranks 2 --profile --variants bf16-compiled,bf16-compiled+comm
    python benches/end_to_end.py --ranks 2 --variants bf16,current,current+modules,te-current
    python benches/end_to_end.py --ranks 4 --variants current-compiled+hsdp,current-compiled+tp
    python benches/end_to_end.py --device cpu --ranks 2 --dim 256 --layers 2 --sequence 64 \
        --vocabulary 512 --steps 2                     # a smoke run without a GPU

Model FLOPs per token are 6 for each parameter outside the embedding, and 12 * layers * dim *
sequence for attention without its causal mask, as torchtitan and PaLM (Chowdhery et al., 2022,
appendix B) count them, so that utilizations (MFU) compare. Utilization is relative to the GPU's
dense peak in bf16, also for FP8.

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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config
import torch.distributed as dist
from blocks import replace_blocks
from launch import RankFailed, Report, launch
from layouts import make_layout, parallelize
from meter import Meter, converted_weights, peak_memory
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, FunctionEventAvg
from torch.distributed.device_mesh import DeviceMesh
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
STATE_DTYPES: dict[str, torch.dtype | str] = {**DTYPES, "fp8": "fp8"}

#: Dense FLOP/s in bf16 by the GPU's name. GPUs of PCIe have other names, and are slower.
BF16_PEAKS = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}


@dataclass(frozen=True)
class Variant:
    """A library and recipe to train with, compiled or not."""

    library: str
    recipe: str | None
    compiled: bool
    fp8_weights: bool = False

    @property
    def has_gather_hooks(self) -> bool:
        """Whether the weights have all-gather hooks, which hand quantized tensors to FSDP2."""
        return self.library in ("fp8rs", "torchao") or self.fp8_weights


def _variants() -> dict[str, Variant]:
    eager = {"bf16": Variant("torch", None, False)}
    for recipe in RECIPES:
        if recipe != "tensorwise":  # Another name of current.
            eager[recipe] = Variant("fp8rs", recipe, False)
            eager[f"{recipe}-fp8"] = Variant("fp8rs", recipe, False, fp8_weights=True)

    eager["torchao"] = Variant("torchao", "tensorwise", False)
    for recipe in ("rowwise", "rowwise_with_gw_hp"):
        eager[f"torchao-{recipe}"] = Variant("torchao", recipe, False)

    for recipe in ("current", "delayed"):
        eager[f"te-{recipe}"] = Variant("transformer_engine", recipe, False)
        eager[f"te-{recipe}-fp8"] = Variant("transformer_engine", recipe, False, fp8_weights=True)
    eager["te-bf16"] = Variant("transformer_engine", None, False)

    compiled = {}
    for name, variant in eager.items():
        # TransformerEngine's modules are not compiled: they have kernels of their own.
        if variant.library != "transformer_engine":
            compiled[f"{name}-compiled"] = dataclasses.replace(variant, compiled=True)
    return {**eager, **compiled}


VARIANTS = _variants()

#: Settings that can follow a variant's name after a +: an option and its value.
MODIFIERS: dict[str, tuple[str, bool | str]] = {
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
    "hsdp": ("layout", "hsdp"),
    "tp": ("layout", "tp"),
}
for _dtype in DTYPES:
    MODIFIERS[f"{_dtype}-reduce"] = ("reduce_dtype", _dtype)
    MODIFIERS[f"{_dtype}-params"] = ("param_dtype", _dtype)
for _dtype in STATE_DTYPES:
    MODIFIERS[f"{_dtype}-state"] = ("state_dtype", _dtype)

#: Libraries that may be missing, by the names that variants have.
PEERS = {"torchao": "torchao", "transformer_engine": "TransformerEngine"}


def parsed(name: str) -> tuple[Variant, dict[str, Any]]:
    """Parse a variant and its settings.

    Raises:
        ValueError: a variant or setting is not known.
    """
    base, *modifiers = name.split("+")
    if base not in VARIANTS:
        raise ValueError(f"variant {base} is not known; the names are {', '.join(VARIANTS)}")
    variant = VARIANTS[base]

    overrides = {}
    for modifier in modifiers:
        if modifier not in MODIFIERS:
            raise ValueError(
                f"{name}: setting {modifier} is not known; the names are {', '.join(MODIFIERS)}"
            )
        option, value = MODIFIERS[modifier]
        overrides[option] = value

    changes_our_optimizer = "masters" in overrides or "state_dtype" in overrides
    has_our_optimizer = variant.fp8_weights and variant.library == "fp8rs"
    if changes_our_optimizer and not has_our_optimizer:
        raise ValueError(
            f"{name}: masters and state require fp8rs.optim.AdamW, which -fp8 variants use"
        )
    if "squares" in overrides and variant.recipe != "block":
        raise ValueError(f"{name}: squares requires a block variant")
    if "blocks" in overrides and variant.library == "transformer_engine":
        raise ValueError(f"{name}: variants of TransformerEngine have its blocks")
    if overrides.get("layout") == "tp":
        has_plain_blocks = variant.library in ("torch", "fp8rs") and "blocks" not in overrides
        if not has_plain_blocks:
            raise ValueError(f"{name}: tp requires plain blocks of bf16 or fp8rs")
    return variant, overrides


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

    results: dict[str, dict[str, Any]] = {}
    report = {
        "workload": _workload(options),
        "machine": _machine(options),
        "variants": results,
    }
    for name in options.variants:
        results[name] = _measured(name, options)
        options.out.write_text(json.dumps(report, indent=2) + "\n")

    print(table(report))
    if options.plot is not None:
        plot(report, options.plot)
    all_failed = all("error" in result for result in results.values())
    return 1 if all_failed else 0


def _measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the results of a variant, or the reason why it has none."""
    variant, overrides = parsed(name)
    if variant.library in PEERS and importlib.util.find_spec(variant.library) is None:
        peer = PEERS[variant.library]
        reason = f"{peer} cannot be imported: add a folder that contains it to PYTHONPATH"
        print(f"{name}: skipped: {reason}", flush=True)
        return {"error": reason}

    start = time.perf_counter()

    def show(event: dict[str, Any]) -> None:
        elapsed = time.perf_counter() - start
        print(f"{name}: {elapsed:6.1f} s  {event['what']}", flush=True)

    try:
        results = launch(
            rank,
            {"variant": name, **_workload(options), **overrides},
            ranks=options.ranks,
            device=options.device,
            on_event=show,
            limit_seconds=options.limit,
        )
    except (RankFailed, TimeoutError) as error:
        print(f"{name}: failed: {error}", flush=True)
        return {"error": str(error)}

    # Rank 0 reports for all ranks, except for the peak memory.
    result: dict[str, Any] = results[0]
    result["peak_memory"] = max(result_of_rank["peak_memory"] for result_of_rank in results)
    return result


def rank(arguments: dict[str, Any], report: Report) -> dict[str, Any]:
    """Train and measure a variant on one rank."""
    variant, _ = parsed(arguments["variant"])
    ranks = dist.get_world_size()
    if arguments["device"] == "cuda":
        device = torch.device("cuda", dist.get_rank())
    else:
        device = torch.device("cpu")
    layout = make_layout(arguments["layout"], device.type, ranks)
    batch = _batch(arguments, device)

    # The meter counts what is allocated from here on.
    meter = Meter()
    with device:
        model = Llama(LlamaConfig(**arguments["model"]))
    # All ranks initialize equal weights, because they shard one model.
    model.init_weights(torch.Generator(device).manual_seed(0))
    model.to(DTYPES[arguments["param_dtype"]])
    has_peer_blocks = variant.library == "transformer_engine"
    with _weights_of_peer(variant):
        replace_blocks(model, "te" if has_peer_blocks else arguments["blocks"])

    param_count = parameter_count(model)
    if has_peer_blocks:
        converted_names = _matrices_of_blocks(model)
    else:
        converted_names = converted_weights(model)

    # Convert and compile first: FSDP2 shards converted weights.
    recipe_options = {"save_input": arguments["save_input"]}
    if arguments.get("squares"):
        recipe_options["wgrad_input_block"] = (128, 128)
    after_step = _prepare(
        model, variant, arguments, device.type, recipe_options, tensor_mesh=layout.tensor
    )
    shard(model, layout.data, reduce_dtype=DTYPES[arguments["reduce_dtype"]])
    # FSDP2 refuses symmetric memory if set_fsdp_comm has set the reduce-scatters before.
    if arguments.get("torch_symm_mem"):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_symm_mem_for_comm()
    if arguments.get("comm"):
        set_fsdp_comm(model)
    optimizer = _optimizer(model, variant, arguments)
    report({"what": f"{param_count / 1e9:.2f} G parameters"})

    def step() -> torch.Tensor:
        with sdpa_kernel(_ATTENTION, set_priority=True):
            with _autocast(variant):
                loss = model.loss(batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        after_step(model)
        return loss.detach()

    # The peak includes the first steps, which allocate optimizer states.
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    for _ in range(arguments["warm_up"]):
        step()
    losses = _losses_of_ranks(step(), ranks)
    loss = statistics.fmean(losses)
    if len(set(losses)) == 1:
        agreement = "equal on all ranks"
    else:
        agreement = f"from {min(losses)} to {max(losses)}, although all ranks have one batch"
    report({"what": f"loss after {arguments['warm_up']} steps: {loss:.4f}, {agreement}"})

    step_seconds = _timed(step, arguments["steps"], device)
    peak = peak_memory(device.type)

    if arguments["profile"]:
        trace = None
        if arguments["trace"] is not None and dist.get_rank() == 0:
            trace = Path(arguments["trace"], f"{arguments['variant']}.json.gz")
        report({"what": profiled(step, trace)})

    # Counting slows a step down, so a step that is not timed is counted.
    with counted(model, layout.shards) as traffic:
        step()
    model.reshard()  # type: ignore[operator]
    at_rest = meter.at_rest(model, optimizer, converted_names)
    weight_bytes: int | None
    if variant.has_gather_hooks:
        weight_bytes = traffic.handed_over
    elif layout.tensor is None:
        weight_bytes = converted_share(traffic, model, converted_names, layout.shards, itemsize=2)
    else:
        # Gathers of activations cannot be told from those of weights.
        weight_bytes = None

    tokens_per_rank = arguments["sequence"] * layout.batches / ranks
    tokens_per_second = tokens_per_rank / statistics.median(step_seconds)
    flops_per_token = model_flops_per_token(model.config, param_count, arguments["sequence"])
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "params": param_count,
        "loss": loss,
        "losses": losses,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens_per_second,
        "model_flops_per_token": flops_per_token,
        "mfu": mfu(tokens_per_second, flops_per_token, gpu),
        "peak_memory": peak,
        "at_rest": dataclasses.asdict(at_rest),
        "reduce_scatter_bytes": sum(traffic.scatters),
        "all_reduces": len(traffic.all_reduces),
        "allgather_bytes": traffic.total,
        "weight_bytes": weight_bytes,
    }


def _losses_of_ranks(loss: torch.Tensor, ranks: int) -> list[float]:
    losses = [torch.empty_like(loss) for _ in range(ranks)]
    dist.all_gather(losses, loss)
    return [loss_of_rank.item() for loss_of_rank in losses]


def model_flops_per_token(config: LlamaConfig, params: int, length: int) -> int:
    """Return the FLOPs of a token in the forward and the backward, without recomputation.

    Args:
        config: the sizes of the model.
        params: the number of its parameters.
        length: tokens of a sequence.
    """
    params_of_matmuls = params - config.vocabulary * config.dim
    return 6 * params_of_matmuls + 12 * config.layers * config.dim * length


def mfu(tokens_per_second: float, flops_per_token: int, gpu: str | None) -> float | None:
    """Return the utilization of a GPU, or None if its peak is not in `BF16_PEAKS`."""
    if gpu not in BF16_PEAKS:
        return None
    return tokens_per_second * flops_per_token / BF16_PEAKS[gpu]


#: Attention's kernels, best first.
_ATTENTION = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def _matrices_of_blocks(model: Llama) -> set[str]:
    """Return the names of the matrices in blocks, which TransformerEngine computes in FP8."""
    names = set()
    for name, parameter in model.named_parameters():
        if name.startswith("blocks.") and parameter.ndim == 2:
            names.add(name)
    return names


# TransformerEngine may be missing, so its types are `Any`.
def _recipe_of_peer(variant: Variant) -> Any:
    """Return TransformerEngine's recipe of a variant."""
    from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

    if variant.recipe == "delayed":
        return DelayedScaling()
    return Float8CurrentScaling()


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
    recipe_options: dict[str, Any],
    tensor_mesh: DeviceMesh | None,
) -> Callable[[Llama], None]:
    """Convert, parallelize and compile the model.

    Args:
        model: the model, before it is sharded.
        variant: what to convert it to.
        arguments: the workload and the settings of the variant.
        device: "cpu" or "cuda".
        recipe_options: fields of fp8rs's recipe that differ from its defaults.
        tensor_mesh: the mesh of tensor parallelism, if there is any.

    Returns:
        A function to call after each optimizer step.
    """

    def nothing(model: Llama) -> None:
        pass

    after_step: Callable[[Llama], None] = nothing
    if variant.library == "fp8rs":
        assert variant.recipe is not None
        has_masters = variant.fp8_weights and arguments["masters"]
        convert_to_float8_training(
            model,
            recipe=dataclasses.replace(resolve_recipe(variant.recipe), **recipe_options),
            filter_fqns=HIGH_PRECISION,
            gemms=arguments.get("gemms", "fp8"),
            fp8_weights=variant.fp8_weights,
            preserve_high_precision_init_val=has_masters,
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

    if tensor_mesh is not None:
        parallelize(model, tensor_mesh, fp8=variant.library == "fp8rs")

    if variant.compiled:
        if arguments["recompute"]:
            torch._functorch.config.ban_recompute_materialized_backward = False
        for block in model.blocks:
            block.compile()
    return after_step


def _timed(step: Callable[[], object], steps: int, device: torch.device) -> list[float]:
    """Return the seconds of each step, from CUDA events or from the clock on a CPU."""
    seconds = []
    if device.type != "cuda":
        for _ in range(steps):
            start = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - start)
        return seconds

    # Events between the steps do not make the host wait for the device.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    dist.barrier()
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()

    for before, after in itertools.pairwise(events):
        seconds.append(before.elapsed_time(after) / 1e3)
    return seconds


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


def communication(kernels: Sequence[FunctionEventAvg], steps: int) -> str:
    """Return a line with the time per step of communication kernels in a profile."""
    us_by_kind = dict.fromkeys(COMMUNICATION.values(), 0.0)
    for kernel in kernels:
        kernel_name = str(kernel.key)
        for name_part, kind in COMMUNICATION.items():
            if name_part in kernel_name:
                us_by_kind[kind] += kernel.self_device_time_total
                break
    columns = [f"{kind} {us / steps / 1e3:.2f}" for kind, us in us_by_kind.items()]
    return f"communication, ms of a step: {', '.join(columns)}"


def profiled(step: Callable[[], object], trace: Path | None) -> str:
    """Profile two steps and return their kernels, sorted by time.

    Args:
        step: the step to run.
        trace: a file to write a trace to, or None.
    """
    from torch.profiler import ProfilerActivity, profile

    steps = 2
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))

    # Annotations span the kernels of a region, whose times are in the kernels' own rows.
    kernels = []
    for kernel in profiler.key_averages():
        is_on_device = kernel.device_type != DeviceType.CPU
        if is_on_device and kernel.self_device_time_total and not kernel.is_user_annotation:
            kernels.append(kernel)
    kernels.sort(key=lambda kernel: -kernel.self_device_time_total)
    events = [event for event in profiler.events() if event.device_type != DeviceType.CPU]

    lines = [communication(kernels, steps), busy(events, steps), "a step:"]
    for kernel in kernels[:40]:
        ms = kernel.self_device_time_total / steps / 1e3
        lines.append(f"{ms:9.2f} ms {kernel.count // steps:5d} x {kernel.key[:200]}")
    return "\n".join(lines)


def busy(events: Sequence[FunctionEvent], steps: int) -> str:
    """Return a line with the time per step in which the device computes.

    The rest of the time, it waits for the host or for communication.
    """
    spans = []
    for event in events:
        is_communication = any(name_part in event.key for name_part in COMMUNICATION)
        if not is_communication and not event.is_user_annotation:
            spans.append((event.time_range.start, event.time_range.end))
    spans.sort()

    # Kernels of several streams overlap: count the time after the end of the earlier ones.
    computing_us = 0.0
    last_end = float("-inf")
    for start, end in spans:
        computing_us += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)

    total_us = 0.0
    if spans:
        first_start, _ = spans[0]
        total_us = last_end - first_start
    computing_ms = computing_us / steps / 1e3
    total_ms = total_us / steps / 1e3
    return (
        f"computing, ms of a step: {computing_ms:.2f} of {total_ms:.2f} "
        "from the first to the last kernel, while profiled"
    )


def _batch(arguments: dict[str, Any], device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    vocabulary = arguments["model"]["vocabulary"]
    shape = (1, arguments["sequence"] + 1)
    return torch.randint(vocabulary, shape, generator=generator).to(device)


def table(report: dict[str, Any]) -> str:
    """Return a Markdown table of all variants."""
    variants = report["variants"]
    lines = [
        "| variant | tokens/s/GPU | vs bf16 | MFU | peak GB "
        "| stored B per parameter: weights + optimizer | gathered GB per step "
        "| of which converted weights | reduced GB | all-reduces | loss |",
        "|---" * 11 + "|",
    ]
    for name, result in variants.items():
        if "error" in result:
            error_lines = result["error"].strip().splitlines()
            lines.append(f"| {name} | {error_lines[-1]} |{' |' * 9}")
            continue

        baseline = variants.get(_baseline(name, variants), {})
        ratio = ""
        if "tokens_per_second" in baseline:
            ratio = f"{result['tokens_per_second'] / baseline['tokens_per_second']:.3f}"

        utilization = ""
        if result["mfu"] is not None:
            utilization = f"{result['mfu']:.1%}"
        weight_gigabytes = ""
        if result["weight_bytes"] is not None:
            weight_gigabytes = f"{result['weight_bytes'] / 1e9:.2f}"

        at_rest = result["at_rest"]
        lines.append(
            f"| {name} | {result['tokens_per_second']:,.0f} | {ratio} | {utilization} "
            f"| {result['peak_memory'] / 1e9:.1f} "
            f"| {at_rest['weights']:.2f} + {at_rest['optimizer']:.2f} "
            f"| {result['allgather_bytes'] / 1e9:.2f} | {weight_gigabytes} "
            f"| {result['reduce_scatter_bytes'] / 1e9:.2f} | {result['all_reduces']} "
            f"| {result['loss']:.4f} |"
        )
    return "\n".join(lines)


def _baseline(name: str, variants: dict[str, Any]) -> str:
    """Return the name of bf16 in the same layout, compiled if the variant is.

    TransformerEngine's kernels need no compilation. If eager bf16 was not measured, they compare
    with compiled bf16.
    """
    variant, overrides = parsed(name)
    setting = f"+{overrides['layout']}" if "layout" in overrides else ""
    eager = f"bf16{setting}"
    compiled = f"bf16-compiled{setting}"
    has_own_kernels = variant.library == "transformer_engine"
    if variant.compiled or (has_own_kernels and eager not in variants):
        return compiled
    return eager


def plot(report: dict[str, Any], path: Path) -> None:
    """Plot throughput, peak memory and gathered bytes as bars."""
    from matplotlib.figure import Figure

    names = []
    speeds = []
    peak_gigabytes = []
    gathered_gigabytes = []
    for name, result in report["variants"].items():
        if "error" in result:
            continue
        names.append(name)
        speeds.append(result["tokens_per_second"])
        peak_gigabytes.append(result["peak_memory"] / 1e9)
        gathered_gigabytes.append(result["allgather_bytes"] / 1e9)

    panels = {
        "tokens/s/GPU": speeds,
        "peak memory, GB": peak_gigabytes,
        "gathered per step, GB": gathered_gigabytes,
    }
    figure = Figure(figsize=(12, 1.5 + 0.4 * len(names)), layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharey=True)
    for axes, (title, values) in zip(all_axes, panels.items(), strict=True):
        bars = axes.barh(names, values)
        axes.bar_label(bars, fmt="{:,.4g}", padding=3)
        axes.set_title(title)
        axes.margins(x=0.2)
        axes.invert_yaxis()
    figure.savefig(path, dpi=120)


def _workload(options: argparse.Namespace) -> dict[str, Any]:
    heads = max(1, options.dim // 128)
    # Tensor parallelism splits them over two ranks.
    least_kv_heads = min(2, heads)
    return {
        "device": options.device,
        "ranks": options.ranks,
        "model": {
            "vocabulary": options.vocabulary,
            "dim": options.dim,
            "layers": options.layers,
            "heads": heads,
            "kv_heads": max(least_kv_heads, heads // 4),
            "hidden": options.hidden or options.dim * 7 // 2,
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
        "layout": "fsdp",
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
    parser.add_argument(
        "--hidden", type=int, help="width of the feed-forward layers, 3.5 * dim by default"
    )
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
    parser.add_argument(
        "--state-dtype",
        choices=STATE_DTYPES,
        default="fp32",
        help="dtype of the moments of fp8rs.optim.AdamW",
    )
    parser.add_argument(
        "--reduce-dtype", choices=DTYPES, default="fp32", help="dtype of the reduce-scatter"
    )
    parser.add_argument(
        "--param-dtype",
        choices=DTYPES,
        default="fp32",
        help="dtype of stored parameters and of their sharded gradients",
    )
    parser.add_argument(
        "--limit", type=float, default=240, help="time limit of a variant in seconds"
    )
    parser.add_argument("--out", type=Path, default=Path("end_to_end.json"))
    parser.add_argument("--plot", type=Path, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
