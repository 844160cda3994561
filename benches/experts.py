"""Time training steps of mixture-of-experts models under FSDP2 with fp8rs, bf16 and torchao.

The models are from transformers, with random weights, a vocabulary of 32000 and sdpa attention:

- mixtral: 2 layers of Mixtral 8x7B, 3.16 B parameters
- qwen3: 6 layers of Qwen3-30B-A3B, 3.87 B parameters

They train eagerly with SGD, fp32 parameters that FSDP2 gathers in bf16, reductions in fp32, and
without activation checkpointing. Sequences have 8,192 tokens (``--sequence``). A hook on the
routers replaces their choice of experts (routing.py), so that all variants have the same rows per
expert. "balanced" gives each expert the same number of rows. "skewed" gives the largest of 128
experts 14 times the mean.

Variants:

- bf16: transformers' "grouped_mm". Before 5.18, it masks rows that only expert parallelism has. The
  benchmark then runs the implementation of 5.18 instead, which is faster.
- torchao: bf16 with the experts' weights converted by torchao.prototype.moe_training (0.18). It
  gathers bf16. Numbers of rows per expert are multiples of 16, which it requires.
- auto, fp8, gather: ``fp8rs.convert_to_float8_training(model, experts=...)``. Linear layers of the
  attention are converted too. With auto, they run in FP8 where it is faster, which is the default
  of a conversion. Otherwise they always do.

Settings can follow a variant's name, each after a +:

- comm: fp8rs.comm.set_fsdp_comm
- bf16-linear: linear layers are not converted

    python benches/experts.py                                  # on every GPU
    python benches/experts.py --model qwen3 --tokens 8192,16384 --routing balanced,skewed
    python benches/experts.py --rank-of 8                      # rank 0 of 8, on one GPU
    python benches/experts.py --tiny --device cpu --ranks 2    # a smoke run without a GPU

With ``--rank-of``, collectives are local copies of the same sizes: a gather copies the rank's shard
for each rank, and a reduction takes the rank's part. This measures computation and memory, without
communication between GPUs. comm then only changes the dtype of the reductions.

All variants run one after the other in one group of processes. Variants can be named several times,
as in ``--variants bf16,auto,bf16,auto``, so that changes of the host's speed affect all of them
alike. The times in the table are then of the steps of all runs of a variant, and its other columns
of the last run.

If a variant fails or exceeds ``--limit`` seconds, a new group runs the variants after it. The JSON
file is written after each measurement. "ms" are the times of steps between CUDA events, "host ms"
the times in which the host submits a step. Peak memory is the peak of torch's allocator.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib.util
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from end_to_end import profiled
from launch import RankFailed, Report, launch
from meter import peak_memory
from routing import ROUTINGS, rows_per_expert, top_k_index
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional
from traffic import counted

from fp8rs import convert_to_float8_training
from fp8rs.comm import set_fsdp_comm


@dataclass(frozen=True)
class Size:
    """The sizes of a model."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = 32000


MODELS = {
    # layers, experts, top_k, hidden, width, heads, kv_heads, head_dim
    "mixtral": Size(2, 8, 2, 4096, 14336, 32, 8, 128),
    "qwen3": Size(6, 128, 8, 2048, 768, 32, 4, 128),
}
TINY = {
    "mixtral": Size(2, 4, 2, 64, 96, 4, 2, 16, 256),
    "qwen3": Size(2, 16, 4, 64, 32, 4, 2, 16, 256),
}


@dataclass(frozen=True)
class Goal:
    """A goal in ms per step, and the times of bf16 when it was set."""

    ms: int
    bf16_ms: int
    bf16_comm_ms: int


#: Goals on two H100s with 8,192 balanced tokens.
GOALS = {
    "mixtral": Goal(130, bf16_ms=165, bf16_comm_ms=152),
    "qwen3": Goal(165, bf16_ms=190, bf16_comm_ms=179),
}

#: A model and a variant to measure.
Job = tuple[str, str]

#: Values of ``experts`` in `convert_to_float8_training`.
FP8RS = ("auto", "fp8", "gather")
BASES = ("bf16", "torchao", *FP8RS)
SETTINGS = ("comm", "bf16-linear")
VARIANTS = ["bf16", "bf16+comm", "torchao"]
for _base in FP8RS:
    VARIANTS.append(_base)
    VARIANTS.append(f"{_base}+comm")

NO_TORCHAO = "torchao cannot be imported: install it, or add its folder to PYTHONPATH"


def has_torchao() -> bool:
    """Return whether torchao is installed."""
    return importlib.util.find_spec("torchao") is not None


def parsed(name: str) -> tuple[str, set[str]]:
    """Return a variant's base and settings.

    Raises:
        ValueError: the variant or a setting is unknown.
    """
    base, *settings = name.split("+")
    if base not in BASES:
        raise ValueError(f"variant {base} is not known; the names are {', '.join(BASES)}")
    for setting in settings:
        if setting not in SETTINGS:
            raise ValueError(f"{name}: setting {setting} is not one of {', '.join(SETTINGS)}")
    return base, set(settings)


def main(argv: list[str] | None = None) -> int:
    """Measure all variants of all models."""
    options = _options(argv)
    if options.device == "cpu" and not options.tiny:
        print(
            "these models require a GPU, and torch finds none. For a smoke run on the CPU:\n"
            "    python benches/experts.py --tiny --device cpu",
            file=sys.stderr,
        )
        return 2

    # The path of the JSON file is not part of the measurement.
    recorded_options = {}
    for name, value in vars(options).items():
        if not isinstance(value, Path):
            recorded_options[name] = value
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else None,
        "options": recorded_options,
        "results": [],
        "errors": [],
    }

    def save() -> None:
        if options.json is not None:
            options.json.write_text(json.dumps(report, indent=1) + "\n")

    _measure(options, report, save)
    save()
    print(tables(report))
    return 0 if report["results"] else 1


def _measure(options: argparse.Namespace, report: dict[str, Any], save: Callable[[], None]) -> None:
    """Run the variants of all models, and add their results and errors to ``report``."""
    start = time.perf_counter()
    #: Models and variants that are not measured yet.
    pending_jobs: list[Job] = []
    #: Those that the current group of processes began, in order.
    started_jobs: list[Job] = []

    def show(text: str) -> None:
        elapsed = time.perf_counter() - start
        print(f"{elapsed:6.1f} s  {text}", flush=True)

    def record_failure(job: Job, error: str) -> None:
        model, variant = job
        report["errors"].append({"model": model, "variant": variant, "error": error})
        save()
        show(f"{model}, {variant} failed: {error}")

    def on_event(event: dict[str, Any]) -> None:
        if "begins" in event:
            started_jobs.append(event["begins"])
        if "result" in event:
            report["results"].append(event["result"])
            save()
        show(event["what"])

    for model, variant in itertools.product(options.model, options.variants):
        base, _ = parsed(variant)
        if base == "torchao" and not has_torchao():
            record_failure((model, variant), NO_TORCHAO)
        else:
            pending_jobs.append((model, variant))

    while pending_jobs:
        started_jobs.clear()
        arguments = {**report["options"], "jobs": pending_jobs}
        try:
            launch(
                rank,
                arguments,
                ranks=options.ranks,
                device=options.device,
                on_event=on_event,
                limit_seconds=(len(pending_jobs) + 1) * options.limit,
            )
            return
        except (RankFailed, TimeoutError) as error:
            # If no job began, the processes do not start: others would fail in the same way.
            if not started_jobs:
                record_failure(pending_jobs[0], str(error))
                return

            # The last job that began is the one that failed. Go on after it.
            failed_job = started_jobs[-1]
            record_failure(failed_job, str(error))
            pending_jobs = pending_jobs[len(started_jobs) :]


# --- on a rank -----------------------------------------------------------------------------------


def rank(arguments: dict[str, Any], report: Report) -> None:
    """Train and measure the variants of a model."""
    if arguments["device"] == "cuda":
        device = torch.device("cuda", dist.get_rank())
    else:
        device = torch.device("cpu")

    ranks = dist.get_world_size()
    with ExitStack() as stack:
        if arguments["rank_of"]:
            ranks = arguments["rank_of"]
            stack.enter_context(_as_rank_0_of(ranks))
        for model, variant in arguments["jobs"]:
            report({"begins": (model, variant), "what": f"{model}, {variant}"})

            # After the limit, print the stack of each thread and end the process.
            limit = arguments["limit"]
            faulthandler.dump_traceback_later(limit, exit=True, file=sys.__stderr__)
            try:
                _train(model, variant, arguments, device, ranks, report)
            finally:
                faulthandler.cancel_dump_traceback_later()

            # Free the model before the next one is built.
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _train(
    family: str,
    variant: str,
    arguments: dict[str, Any],
    device: torch.device,
    ranks: int,
    report: Report,
) -> None:
    """Build a model, and measure its steps with each number of tokens and routing."""
    base, settings = parsed(variant)
    size = TINY[family] if arguments["tiny"] else MODELS[family]
    memory_before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    torch.manual_seed(0)  # All ranks initialize equal weights, because they shard one model.
    with device:
        model = build(family, size)
    param_count = sum(p.numel() for p in model.parameters())
    _prepare_experts(model, base)
    _convert(model, base, settings)
    forced_routing = _Routing(model)

    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if "comm" in settings:
        set_fsdp_comm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    what = f"{family}, {variant}: {param_count / 1e9:.2f} G parameters"
    if memory_before:
        what += f", {memory_before / 1e9:.1f} GB allocated before"
    report({"what": what})

    cases = itertools.product(arguments["tokens"], arguments["routing"])
    for case_number, (tokens, routing) in enumerate(cases):
        rows_E = rows_per_expert(tokens * size.top_k, size.experts, routing)
        forced_routing.index = top_k_index(tokens, size.top_k, rows_E).to(device)
        sequence = min(tokens, arguments["sequence"])
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        batch_shape = (tokens // sequence, sequence)
        batch = torch.randint(size.vocabulary, batch_shape, generator=generator).to(device)

        def step(batch: Tensor = batch) -> Tensor:
            loss: Tensor = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.detach()

        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        # Later cases only have to fill the allocator's cache.
        warm_up = arguments["warm_up"] if case_number == 0 else 2
        for _ in range(warm_up):
            loss = step()
        step_seconds, host_seconds = timed(step, arguments["steps"], device)
        peak = torch.tensor(float(peak_memory(device.type)), device=device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)

        if variant in arguments["profile"] and case_number == 0:
            trace = None
            if arguments["trace"] is not None and dist.get_rank() == 0:
                trace = Path(arguments["trace"], f"{family}-{variant}.json.gz")
            report({"what": profiled(step, trace)})

        # Counting slows a step down, so a step that is not timed is counted.
        with counted(model, ranks) as traffic:
            step()

        step_ms = [1e3 * seconds for seconds in step_seconds]
        result = {
            "model": family,
            "variant": variant,
            "tokens": tokens,
            "routing": routing,
            "largest_expert": max(rows_E),
            "ms": step_ms,
            "host_ms": 1e3 * statistics.median(host_seconds),
            "peak_memory": peak.item(),
            "memory_before": memory_before,
            "gathered_bytes": traffic.total,
            "reduced_bytes": sum(traffic.scatters),
            "loss": loss.item(),
        }
        what = (
            f"{family}, {variant}, {tokens} tokens, {routing}: "
            f"{statistics.median(step_ms):.1f} ms, loss {loss.item():.4f}"
        )
        report({"result": result, "what": what})


# transformers may be missing, so the types of its models are `Any`.
def build(name: str, size: Size) -> Any:
    """Return an untrained model of transformers."""
    from transformers import (
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    common_options = {
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "num_experts_per_tok": size.top_k,
        "max_position_embeddings": 32768,
        "use_cache": False,
    }
    model_class: Any
    if name == "mixtral":
        config = MixtralConfig(
            num_local_experts=size.experts, intermediate_size=size.width, **common_options
        )
        model_class = MixtralForCausalLM
    else:
        config = Qwen3MoeConfig(
            num_experts=size.experts,
            moe_intermediate_size=size.width,
            norm_topk_prob=True,
            **common_options,
        )
        model_class = Qwen3MoeForCausalLM

    model = model_class._from_config(
        config,
        dtype=torch.float32,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
    )
    return model.train()


def _prepare_experts(model: nn.Module, base: str) -> None:
    """Make transformers before 5.18 compute experts like later ones: without expert parallelism."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    for module in model.modules():
        if not hasattr(module, "_apply_gate") or hasattr(module, "_is_expert_parallel"):
            continue
        module._is_expert_parallel = False  # fp8rs reads it.
        if base not in FP8RS:
            ALL_EXPERTS_FUNCTIONS.register("unmasked", unmasked_experts)
            module.config._experts_implementation = "unmasked"  # type: ignore[union-attr]


def unmasked_experts(self: Any, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Compute experts as "grouped_mm" of transformers 5.18 to 5.24 does."""
    # Rows are sorted by expert. Each token has top_k rows.
    top_k = top_k_index.size(-1)
    expert_ids, order = torch.sort(top_k_index.reshape(-1))
    rows = x[order // top_k]

    # On the CPU, histc requires a floating-point dtype.
    histc_input = expert_ids.float() if x.device.type == "cpu" else expert_ids.int()
    rows_E = torch.histc(histc_input, bins=self.num_experts, min=0, max=self.num_experts - 1)
    offs = torch.cumsum(rows_E, dim=0, dtype=torch.int32)

    gate_up = functional.grouped_mm(rows, self.gate_up_proj.transpose(-2, -1), offs=offs)
    hidden = self._apply_gate(gate_up)
    y = functional.grouped_mm(hidden, self.down_proj.transpose(-2, -1), offs=offs)

    # Restore the order of tokens, and add the results of each token's experts.
    weighted = y * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    inverse_order = torch.empty_like(order)
    inverse_order[order] = torch.arange(order.size(0), device=x.device)
    out = weighted[inverse_order].view(x.size(0), top_k, x.size(1)).sum(dim=1)
    return out.to(x.dtype)


def _convert(model: nn.Module, base: str, settings: set[str]) -> None:
    if base in FP8RS:
        converts_linear = "bf16-linear" not in settings
        convert_to_float8_training(
            model,
            recipe="current",
            gemms="auto" if base == "auto" else "fp8",
            experts=base,  # type: ignore[arg-type]
            filter_fqns=["lm_head"],
            module_filter_fn=lambda layer, name: converts_linear,
        )
    elif base == "torchao":
        from torchao.prototype.moe_training.config import (
            Float8TrainingOpConfig,
            Float8TrainingRecipe,
        )
        from torchao.quantization import quantize_

        config = Float8TrainingOpConfig.from_recipe(Float8TrainingRecipe.FP8_ROWWISE)
        quantize_(model, config, filter_fn=lambda _, name: name.endswith(".experts"))


class _Routing:
    """Replaces the experts that the routers of a model choose.

    Attributes:
        index: the experts of each token (tokens, top_k).
    """

    index: Tensor

    def __init__(self, model: nn.Module) -> None:
        routers = []
        for module in model.modules():
            if type(module).__name__.endswith("TopKRouter"):
                routers.append(module)
        if not routers:
            raise RuntimeError("the model has no module whose class is named ...TopKRouter")
        for router in routers:
            router.register_forward_hook(self._replace)

    def _replace(
        self, module: nn.Module, args: tuple[Any, ...], outputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        logits, scores, index = outputs
        if index.shape != self.index.shape or scores.shape != self.index.shape:
            raise RuntimeError(
                f"the router's scores are {tuple(scores.shape)} and its experts "
                f"{tuple(index.shape)}; expected {tuple(self.index.shape)}"
            )
        return logits, scores, self.index


def timed(
    step: Callable[[], object], steps: int, device: torch.device
) -> tuple[list[float], list[float]]:
    """Return the duration of each step in seconds, and how long the host took to submit it."""
    host_seconds = []
    if device.type != "cuda":
        for _ in range(steps):
            start = time.perf_counter()
            step()
            host_seconds.append(time.perf_counter() - start)
        return host_seconds, host_seconds

    # Events between the steps do not make the host wait for the device.
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    dist.barrier()
    events[0].record()
    for event in events[1:]:
        start = time.perf_counter()
        step()
        host_seconds.append(time.perf_counter() - start)
        event.record()
    torch.cuda.synchronize()

    step_seconds = []
    for before, after in itertools.pairwise(events):
        step_seconds.append(before.elapsed_time(after) / 1e3)
    return step_seconds, host_seconds


@contextmanager
def _as_rank_0_of(ranks: int) -> Iterator[None]:
    """Replace the process group by one whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)

    # The fake group does not write the outputs of these collectives. The functions are called for
    # their checks, and so that the bytes are counted.
    fake_reduce_scatter = dist.reduce_scatter_tensor
    fake_all_to_all = dist.all_to_all_single

    def reduce_scatter_tensor(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = fake_reduce_scatter(output, input, *args, **kwargs)
        output.copy_(input.view(ranks, -1)[0].view_as(output))
        return work

    def all_to_all_single(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = fake_all_to_all(output, input, *args, **kwargs)
        output.copy_(input)
        return work

    with (
        mock.patch.object(dist, "reduce_scatter_tensor", reduce_scatter_tensor),
        mock.patch.object(dist, "all_to_all_single", all_to_all_single),
    ):
        yield


# --- tables --------------------------------------------------------------------------------------


def baseline(variant: str) -> str:
    """Return the bf16 variant with the same collectives."""
    _, settings = parsed(variant)
    return "bf16+comm" if "comm" in settings else "bf16"


def tables(report: dict[str, Any]) -> str:
    """Return Markdown tables of all results, and the goals."""
    # Each model, number of tokens and routing has a table of variants.
    results_by_case: dict[tuple[str, int, str], dict[str, Any]] = {}
    for result in report["results"]:
        case = (result["model"], result["tokens"], result["routing"])
        results = results_by_case.setdefault(case, {})
        earlier = results.get(result["variant"])
        if earlier is not None:
            result = {**result, "ms": earlier["ms"] + result["ms"]}
        results[result["variant"]] = result

    lines = []
    for (model, tokens, routing), results in results_by_case.items():
        median_ms = {}
        for name, result in results.items():
            median_ms[name] = statistics.median(result["ms"])

        lines += ["", f"{model}, {tokens:,} tokens per GPU, {routing}:", ""]
        lines += [
            "| variant | ms | lowest to highest | tokens/s/GPU | vs bf16 | vs bf16, same comm "
            "| peak GB | gathered GB | reduced GB | host ms | loss |",
            "|---" * 11 + "|",
        ]
        for name, result in results.items():
            ms = median_ms[name]
            vs_bf16 = _ratio(median_ms.get("bf16"), ms)
            vs_bf16_same_comm = _ratio(median_ms.get(baseline(name)), ms)
            lines.append(
                f"| {name} | {ms:.1f} | {min(result['ms']):.1f} to {max(result['ms']):.1f} "
                f"| {tokens / ms * 1e3:,.0f} | {vs_bf16} "
                f"| {vs_bf16_same_comm} | {result['peak_memory'] / 1e9:.1f} "
                f"| {result['gathered_bytes'] / 1e9:.2f} | {result['reduced_bytes'] / 1e9:.2f} "
                f"| {result['host_ms']:.1f} | {result['loss']:.4f} |"
            )

        for error in report["errors"]:
            if error["model"] == model and error["variant"] not in results:
                reason = _reason(error["error"])
                lines.append(f"| {error['variant']} | {reason[:200]} |{' |' * 9}")

        lines.append("")
        goal_line = _goal_line(model, tokens, routing, median_ms, report["options"])
        if goal_line is not None:
            lines.append(goal_line)
        lines += _regression_lines(results, median_ms)
    return "\n".join(lines)


def _reason(error: str) -> str:
    """Return the line of an error that says what is wrong."""
    lines = error.strip().splitlines()
    for line in lines:
        # After a time-out, the stacks of threads follow the error.
        if line.startswith("Timeout"):
            return line
    return lines[-1]


def _ratio(base_ms: float | None, ms: float) -> str:
    return "" if base_ms is None else f"{base_ms / ms:.3f}"


def _fp8rs_variants(names: Iterable[str]) -> list[str]:
    variants = []
    for name in names:
        base, _ = parsed(name)
        if base in FP8RS:
            variants.append(name)
    return variants


def _goal_line(
    model: str, tokens: int, routing: str, median_ms: dict[str, float], options: dict[str, Any]
) -> str | None:
    """Return the goal and the fastest variant of fp8rs, for a workload that has a goal."""
    is_goals_workload = (
        options["ranks"] == 2 and tokens == 8192 and routing == "balanced" and not options["tiny"]
    )
    variants = _fp8rs_variants(median_ms)
    if not is_goals_workload or not variants:
        return None

    goal = GOALS[model]
    fastest = min(variants, key=lambda name: median_ms[name])
    verdict = "reached" if median_ms[fastest] <= goal.ms else "missed"
    return (
        f"- goal {goal.ms} ms: {verdict}, {fastest} takes {median_ms[fastest]:.1f} ms "
        f"(when it was set: bf16 {goal.bf16_ms}, bf16+comm {goal.bf16_comm_ms})"
    )


def _regression_lines(results: dict[str, Any], median_ms: dict[str, float]) -> list[str]:
    """Return which variants of fp8rs are slower than bf16, or need as much memory."""
    variants = _fp8rs_variants(results)
    if not variants:
        return []

    slower = []
    not_smaller = []
    for name in variants:
        bf16 = baseline(name)
        if bf16 not in results:
            continue
        if median_ms[name] > median_ms[bf16]:
            slower.append(f"{name} ({_ratio(median_ms[bf16], median_ms[name])})")
        if results[name]["peak_memory"] >= results[bf16]["peak_memory"]:
            not_smaller.append(name)
    return [
        f"- slower than bf16 with the same comm: {', '.join(sorted(slower)) or 'none'}",
        f"- peak memory not below bf16's with the same comm: {', '.join(not_smaller) or 'none'}",
    ]


def _options(argv: list[str] | None) -> argparse.Namespace:
    def names(choices: Collection[str]) -> Callable[[str], list[str]]:
        def split(text: str) -> list[str]:
            for name in text.split(","):
                if name not in choices:
                    raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(choices)}")
            return text.split(",")

        return split

    def variants(text: str) -> list[str]:
        try:
            for name in text.split(","):
                parsed(name)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text.split(",")

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=names(MODELS), default=list(MODELS), metavar="NAME,...")
    parser.add_argument("--variants", type=variants, default=list(VARIANTS), metavar="NAME,...")
    parser.add_argument(
        "--tokens",
        type=lambda text: [int(n) for n in text.split(",")],
        default=[8192],
        metavar="N,...",
        help="tokens per GPU",
    )
    parser.add_argument("--routing", type=names(ROUTINGS), default=["balanced"], metavar="NAME,...")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens per sequence")
    parser.add_argument("--ranks", type=int, default=gpus or 2)
    parser.add_argument(
        "--rank-of", type=int, default=0, metavar="N", help="rank 0 of N, without the others"
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpus else "cpu")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--limit", type=float, default=60, help="time limit of a variant, seconds")
    parser.add_argument(
        "--profile",
        type=variants,
        default=[],
        metavar="NAME,...",
        help="variants whose kernels are printed, for their first measurement",
    )
    parser.add_argument(
        "--trace", metavar="FOLDER", help="write traces of profiled variants to this folder"
    )
    parser.add_argument("--tiny", action="store_true", help="small models, for a smoke run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(argv)
    for tokens in options.tokens:
        if tokens % min(tokens, options.sequence):
            parser.error(f"--tokens {tokens} must be a multiple of --sequence {options.sequence}")
    if options.rank_of:
        options.ranks = 1
    return options


if __name__ == "__main__":
    sys.exit(main())
