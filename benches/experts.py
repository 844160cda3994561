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

All variants run one after the other in one group of processes. If a variant fails or
exceeds ``--limit`` seconds, a new group runs the variants after it. The JSON file is written after
each measurement. "ms" are the times of steps between CUDA events, "host ms" the times in which the
host submits a step. Peak memory is the peak of torch's allocator.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from end_to_end import profiled
from launch import RankFailed, launch
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
    "mixtral": Size(2, 8, 2, 4096, 14336, 32, 8, 128),
    "qwen3": Size(6, 128, 8, 2048, 768, 32, 4, 128),
}
TINY = {
    "mixtral": Size(2, 4, 2, 64, 96, 4, 2, 16, 256),
    "qwen3": Size(2, 16, 4, 64, 32, 4, 2, 16, 256),
}

#: Goals on two H100s with 8,192 balanced tokens, in ms per step, and the times of bf16 and of bf16
#: with comm when the goals were set.
GOALS = {"mixtral": (130, 165, 152), "qwen3": (165, 190, 179)}

#: Values of ``experts`` in `convert_to_float8_training`.
FP8RS = ("auto", "fp8", "gather")
BASES = ("bf16", "torchao", *FP8RS)
SETTINGS = ("comm", "bf16-linear")
VARIANTS = ("bf16", "bf16+comm", "torchao")
VARIANTS += tuple(name + comm for name in FP8RS for comm in ("", "+comm"))

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
    gpu = torch.cuda.get_device_name() if options.device == "cuda" else None
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "gpu": gpu,
        "options": {k: v for k, v in vars(options).items() if not isinstance(v, Path)},
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
    left: list[tuple[str, str]] = []
    begun: list[tuple[str, str]] = []

    def show(text: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {text}", flush=True)

    def failed(job: tuple[str, str], error: str) -> None:
        model, variant = job
        report["errors"].append({"model": model, "variant": variant, "error": error})
        save()
        show(f"{model}, {variant} failed: {error}")

    for job in itertools.product(options.model, options.variants):
        if parsed(job[1])[0] == "torchao" and not has_torchao():
            failed(job, NO_TORCHAO)
        else:
            left.append(job)

    def on_event(event: dict[str, Any]) -> None:
        if "begins" in event:
            begun.append(event["begins"])
        if "result" in event:
            report["results"].append(event["result"])
            save()
        show(event["what"])

    while left:
        begun.clear()
        arguments = {**report["options"], "jobs": left}
        try:
            launch(
                rank,
                arguments,
                ranks=options.ranks,
                device=options.device,
                on_event=on_event,
                limit_seconds=(len(left) + 1) * options.limit,
            )
            return
        except (RankFailed, TimeoutError) as error:
            job = begun[-1] if begun else left[0]
            failed(job, str(error))
            if not begun:
                return  # The processes do not start.
            left = left[left.index(job) + 1 :]


# --- on a rank -----------------------------------------------------------------------------------


def rank(arguments: dict[str, Any], report: Callable[[dict[str, Any]], None]) -> None:
    """Train and measure the variants of a model."""
    index = dist.get_rank()
    device = torch.device("cuda", index) if arguments["device"] == "cuda" else torch.device("cpu")
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
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def _train(
    family: str,
    variant: str,
    arguments: dict[str, Any],
    device: torch.device,
    ranks: int,
    report: Callable[[dict[str, Any]], None],
) -> None:
    """Build a model, and measure its steps with each number of tokens and routing."""
    base, settings = parsed(variant)
    size = (TINY if arguments["tiny"] else MODELS)[family]
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    torch.manual_seed(0)  # All ranks initialize equal weights, because they shard one model.
    with device:
        model = build(family, size)
    parameters = sum(p.numel() for p in model.parameters())
    _prepare_experts(model, base)
    _convert(model, base, settings)
    forced = _Routing(model)
    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    if "comm" in settings:
        set_fsdp_comm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    what = f"{family}, {variant}: {parameters / 1e9:.2f} G parameters"
    report({"what": what + (f", {before / 1e9:.1f} GB allocated before" if before else "")})
    cases = itertools.product(arguments["tokens"], arguments["routing"])
    for number, (tokens, routing) in enumerate(cases):
        counts = rows_per_expert(tokens * size.top_k, size.experts, routing)
        forced.index = top_k_index(tokens, size.top_k, counts).to(device)
        sequence = min(tokens, arguments["sequence"])
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        shape = (tokens // sequence, sequence)
        batch = torch.randint(size.vocabulary, shape, generator=generator).to(device)

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
        for _ in range(arguments["warm_up"] if number == 0 else 2):
            loss = step()
        seconds, host = timed(step, arguments["steps"], device)
        peak = torch.tensor(float(peak_memory(device.type)), device=device)
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        if variant in arguments["profile"] and number == 0:
            trace = None
            if arguments["trace"] is not None and dist.get_rank() == 0:
                trace = Path(arguments["trace"], f"{family}-{variant}.json.gz")
            report({"what": profiled(step, trace)})
        with counted(model, ranks) as traffic:
            step()
        result = {
            "model": family,
            "variant": variant,
            "tokens": tokens,
            "routing": routing,
            "largest_expert": max(counts),
            "ms": [1e3 * s for s in seconds],
            "host_ms": 1e3 * statistics.median(host),
            "peak_memory": peak.item(),
            "memory_before": before,
            "gathered_bytes": traffic.total,
            "reduced_bytes": sum(traffic.scatters),
            "loss": loss.item(),
        }
        median = statistics.median(result["ms"])
        what = f"{family}, {variant}, {tokens} tokens, {routing}: {median:.1f} ms"
        report({"result": result, "what": f"{what}, loss {result['loss']:.4f}"})


def build(name: str, size: Size) -> Any:
    """Return an untrained model of transformers."""
    from transformers import (
        MixtralConfig,
        MixtralForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    common = {
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
    kind: Any
    if name == "mixtral":
        config = MixtralConfig(
            num_local_experts=size.experts, intermediate_size=size.width, **common
        )
        kind = MixtralForCausalLM
    else:
        config = Qwen3MoeConfig(
            num_experts=size.experts,
            moe_intermediate_size=size.width,
            norm_topk_prob=True,
            **common,
        )
        kind = Qwen3MoeForCausalLM
    how = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    return kind._from_config(config, dtype=torch.float32, **how).train()


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
    top_k = top_k_index.size(-1)
    ids, order = torch.sort(top_k_index.reshape(-1))
    rows = x[order // top_k]
    counted = ids.float() if x.device.type == "cpu" else ids.int()
    counts = torch.histc(counted, bins=self.num_experts, min=0, max=self.num_experts - 1)
    offs = torch.cumsum(counts, dim=0, dtype=torch.int32)
    h = functional.grouped_mm(rows, self.gate_up_proj.transpose(-2, -1), offs=offs)
    y = functional.grouped_mm(self._apply_gate(h), self.down_proj.transpose(-2, -1), offs=offs)
    weighted = y * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=x.device)
    out = weighted[inverse].view(x.size(0), top_k, x.size(1)).sum(dim=1)
    return out.to(x.dtype)


def _convert(model: nn.Module, base: str, settings: set[str]) -> None:
    if base in FP8RS:

        def chosen(layer: nn.Module, name: str) -> bool:
            return "bf16-linear" not in settings

        convert_to_float8_training(
            model,
            recipe="current",
            gemms="auto" if base == "auto" else "fp8",
            experts=base,  # type: ignore[arg-type]
            filter_fqns=["lm_head"],
            module_filter_fn=chosen,
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
        routers = [m for m in model.modules() if type(m).__name__.endswith("TopKRouter")]
        if not routers:
            raise RuntimeError("the model has no module whose class is named ...TopKRouter")
        for router in routers:
            router.register_forward_hook(self._replace)

    def _replace(self, module: nn.Module, args: Any, outputs: tuple[Tensor, ...]) -> Any:
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
    host = []
    if device.type != "cuda":
        for _ in range(steps):
            start = time.perf_counter()
            step()
            host.append(time.perf_counter() - start)
        return host, host
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    torch.cuda.synchronize()
    dist.barrier()
    marks[0].record()
    for mark in marks[1:]:
        start = time.perf_counter()
        step()
        host.append(time.perf_counter() - start)
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in itertools.pairwise(marks)], host


@contextmanager
def _as_rank_0_of(ranks: int) -> Iterator[None]:
    """Replace the process group by one whose other ranks do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    reduced, exchanged = dist.reduce_scatter_tensor, dist.all_to_all_single

    # The fake group does not write the outputs of these collectives. The functions are called for
    # their checks, and so that the bytes are counted.
    def reduce(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = reduced(output, input, *args, **kwargs)
        output.copy_(input.view(ranks, -1)[0].view_as(output))
        return work

    def exchange(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = exchanged(output, input, *args, **kwargs)
        output.copy_(input)
        return work

    with (
        mock.patch.object(dist, "reduce_scatter_tensor", reduce),
        mock.patch.object(dist, "all_to_all_single", exchange),
    ):
        yield


# --- tables --------------------------------------------------------------------------------------


def baseline(variant: str) -> str:
    """Return the bf16 variant with the same collectives."""
    return "bf16+comm" if "comm" in parsed(variant)[1] else "bf16"


def tables(report: dict[str, Any]) -> str:
    """Return Markdown tables of all results, and the goals."""
    lines = []
    results = report["results"]
    for model, tokens, routing in dict.fromkeys(
        (r["model"], r["tokens"], r["routing"]) for r in results
    ):
        found = {
            r["variant"]: r
            for r in results
            if (r["model"], r["tokens"], r["routing"]) == (model, tokens, routing)
        }
        ms = {name: statistics.median(r["ms"]) for name, r in found.items()}
        failed = [e for e in report["errors"] if e["model"] == model]
        lines += ["", f"{model}, {tokens:,} tokens per GPU, {routing}:", ""]
        lines += [
            "| variant | ms | lowest to highest | tokens/s/GPU | vs bf16 | vs bf16, same comm "
            "| peak GB | gathered GB | reduced GB | host ms | loss |",
            "|---" * 11 + "|",
        ]
        for name, r in found.items():
            same = ms.get(baseline(name))
            lines.append(
                f"| {name} | {ms[name]:.1f} | {min(r['ms']):.1f} to {max(r['ms']):.1f} "
                f"| {tokens / ms[name] * 1e3:,.0f} | {_ratio(ms.get('bf16'), ms[name])} "
                f"| {_ratio(same, ms[name])} | {r['peak_memory'] / 1e9:.1f} "
                f"| {r['gathered_bytes'] / 1e9:.2f} | {r['reduced_bytes'] / 1e9:.2f} "
                f"| {r['host_ms']:.1f} | {r['loss']:.4f} |"
            )
        for error in failed:
            if error["variant"] not in found:
                *_, last = trace = error["error"].strip().splitlines()
                # After a time-out, the stacks of threads follow the error.
                reason = next((line for line in trace if line.startswith("Timeout")), last)
                lines.append(f"| {error['variant']} | {reason[:200]} |{' |' * 9}")
        lines += ["", *_goals(model, tokens, routing, found, ms, report["options"])]
    return "\n".join(lines)


def _ratio(base: float | None, ms: float) -> str:
    return "" if base is None else f"{base / ms:.3f}"


def _goals(
    model: str,
    tokens: int,
    routing: str,
    found: dict[str, Any],
    ms: dict[str, float],
    options: dict[str, Any],
) -> Iterator[str]:
    own = [name for name in found if parsed(name)[0] in FP8RS]
    if not own:
        return
    goal, *earlier = GOALS[model]
    if (options["ranks"], tokens, routing, options["tiny"]) == (2, 8192, "balanced", False):
        best = min(own, key=ms.__getitem__)
        yield (
            f"- goal {goal} ms: {'reached' if ms[best] <= goal else 'missed'}, {best} takes "
            f"{ms[best]:.1f} ms (when it was set: bf16 {earlier[0]}, bf16+comm {earlier[1]})"
        )
    slower = {
        f"{name} ({_ratio(ms[baseline(name)], ms[name])})"
        for name in own
        if baseline(name) in ms and ms[name] > ms[baseline(name)]
    }
    yield f"- slower than bf16 with the same comm: {', '.join(sorted(slower)) or 'none'}"
    larger = [
        name
        for name in own
        if baseline(name) in found
        and found[name]["peak_memory"] >= found[baseline(name)]["peak_memory"]
    ]
    yield f"- peak memory not below bf16's with the same comm: {', '.join(larger) or 'none'}"


def _options(argv: list[str] | None) -> argparse.Namespace:
    def names(known: Any) -> Callable[[str], list[str]]:
        def split(text: str) -> list[str]:
            for name in text.split(","):
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(known)}")
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
