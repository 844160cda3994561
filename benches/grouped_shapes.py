"""Time the grouped GEMMs of experts, an expert MLP, and the kernels around them.

    python benches/grouped_shapes.py [--json FILE] [--only gemms,mlp,kernels]
    python benches/grouped_shapes.py --models qwen3,mixtral --rows 16384
    python benches/grouped_shapes.py --tiny --device cpu       # a smoke run with small sizes

It runs on one GPU. Experts have a gate_up weight (E, 2 * I, H) and a down weight (E, H, I). Rows
are divided among them evenly or skewed (routing.py). All FP8 operands are E4M3.

**gemms** times each GEMM in bf16 (``torch._grouped_mm``) and on FP8 operands, and separately the
quantization that its operands need if nothing is shared:

- forward: y = x @ W.T. Rows of x are quantized.
- dgrad: dx = dy @ W. Rows of dy are quantized, and the codes of W are transposed.
- wgrad: dW = dy.T @ x. Columns of dy and of x are quantized.

Quantizing weights is not timed, because FSDP2 gathers codes. GEMMs that would take longer than
about 25 ms in bf16 are left out.

**mlp** times the forward and backward of gate_up, SwiGLU and down, with the gradients of the input
and of both weights. bf16 is transformers' computation, without its permutation of tokens. FP8 is
``fp8rs.nn.grouped_function.gated_mlp`` on gathered codes, whose backward sums rows into tokens.
"permuting" is the time of that sum, which bf16 does not have here. ``experts`` is the whole forward
and backward of a transformers module, permutation included.

**kernels** times the kernels that quantize, and the kernels that sum each token's rows. "fraction"
is the time of a device copy that reads and writes as many bytes as the kernel's inputs and outputs
have, divided by the kernel's time. A kernel that finds maxima reads its input twice, but the input
counts once.

Times are medians of CUDA events in microseconds. The device first sleeps for longer than the host
needs to submit the calls, so that host time does not count.

The JSON file has the keys "torch", "device" and these lists:

- "gemms": objects with model (a key of `MODELS`), weight ("gate_up" or "down"), gemm ("forward",
  "dgrad" or "wgrad"), experts, rows (in total), largest (rows of the largest expert), routing
  ("balanced" or "skewed"), n and k (out_features and in_features of the weight, for each gemm), and
  the times bf16, fp8 (the GEMM alone) and quantize (what this GEMM's operands need)
- "quantize": objects with model, weight, experts, rows, largest, routing, operand ("x" or "dy"),
  cols, and the times rowwise, columnwise and both. If two GEMMs of a weight run in FP8 and share an
  operand, it is quantized once, in both directions.
- "mlp": objects with model, experts, rows, largest, routing, kind ("mlp" or "experts"), and the
  times bf16, fp8 and permuting
- "kernels": objects with name, rows, cols, experts, routing, bytes, time, copy and fraction
- "skipped": messages about measurements that were left out
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from routing import ROUTINGS, rows_per_expert, top_k_index
from torch import Tensor
from torch.nn import functional

from fp8rs.nn.functional import key_of
from fp8rs.nn.grouped_function import gated_mlp
from fp8rs.quantize.recipes import quant_spec, resolve_recipe
from fp8rs.tensor.quantizer import Quantizer

ops = torch.ops.fp8rs
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Size(NamedTuple):
    """The sizes of a model's experts."""

    experts: int
    hidden: int
    width: int
    top_k: int


MODELS = {
    "qwen3": Size(128, 2048, 768, 8),
    "mixtral": Size(8, 4096, 14336, 2),
    "deepseek-v3": Size(32, 7168, 2048, 8),  # the experts of one rank of 8
    "gpt-oss": Size(32, 2880, 2880, 4),
}
TINY = {"qwen3": Size(4, 64, 32, 2), "mixtral": Size(2, 64, 96, 1)}
ROWS = (16384, 65536, 131072)

#: Rows of each model for "mlp", and the goals: speedups over bf16.
MLP = {"mixtral": (16384, 1.45), "deepseek-v3": (65536, 1.45), "qwen3": (131072, 1.10)}

#: Goals for kernels, as fractions of a copy's speed: kernels that compute maxima, kernels that do
#: not, and kernels that sum rows.
WITH_MAXIMA, WITHOUT, SUMS = 0.60, 0.80, 0.85

#: GEMMs with more floating-point operations than this are left out.
LIMIT = 16e12

#: Microseconds for all calls of a measurement of a GEMM or kernel, and of an MLP.
BUDGET, MLP_BUDGET = 15_000, 150_000

#: Clock cycles of a GPU in a microsecond, as an upper bound.
CYCLES = 2000


class Timer:
    """Measures calls on a device."""

    def __init__(self, device: str) -> None:
        self.device = device

    def us(self, call: Callable[[], object], budget: float = BUDGET) -> float:
        """Return the median time of a call in microseconds."""
        if self.device == "cpu":
            call()
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        call()  # loads kernels
        first, host = self._round(call, 1, 1000.0)
        count = max(1, min(10, int(budget / first)))
        took, _ = self._round(call, count, host)
        return took

    def _round(self, call: Callable[[], object], count: int, host: float) -> tuple[float, float]:
        """Time consecutive calls. Return the median, and the host time of a call."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        torch.cuda._sleep(int(1.5 * CYCLES * min((host + 20) * count, 10_000)))
        start = time.perf_counter()
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        host = (time.perf_counter() - start) * 1e6 / count
        torch.cuda.synchronize()
        times = [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        return statistics.median(times), host


class Case(NamedTuple):
    """Rows that are divided among the experts of a model."""

    model: str
    size: Size
    rows: int
    routing: str
    counts: list[int]
    ends: Tensor
    padded_ends: Tensor

    @property
    def what(self) -> dict[str, Any]:
        """The fields that identify the case in the JSON file."""
        return {
            "model": self.model,
            "experts": self.size.experts,
            "rows": self.rows,
            "largest": max(self.counts),
            "routing": self.routing,
        }


def case_of(model: str, size: Size, rows: int, routing: str, device: str) -> Case:
    """Divide rows among the experts of a model by a routing."""
    counts = rows_per_expert(rows, size.experts, routing)
    offs = torch.tensor(counts, device=device).cumsum(0).to(torch.int32)
    ends, padded_ends = ops.group_bounds(offs, torch.empty(rows, device=device))
    return Case(model, size, rows, routing, counts, ends, padded_ends)


def random(*shape: int, device: str) -> Tensor:
    """Return normally distributed bf16 values."""
    return torch.randn(*shape, dtype=BF16, device=device)


def codes(*shape: int, device: str) -> Tensor:
    """Return random codes without NaN. Their values are distributed like quantized values."""
    return (torch.randn(*shape, dtype=BF16, device=device) * 50).to(E4M3)


# --- GEMMs ---------------------------------------------------------------------------------------


def measure_gemms(case: Case, timer: Timer, report: dict[str, Any]) -> None:
    """Time the GEMMs of a case in bf16 and FP8, and add the times to the report."""
    size, device = case.size, timer.device
    for weight, n, k in (
        ("gate_up", 2 * size.width, size.hidden),
        ("down", size.hidden, size.width),
    ):
        where = {**case.what, "weight": weight}
        name = f"{case.model}, {case.rows} rows, {case.routing}, {weight}"
        if 2 * case.rows * n * k > LIMIT:
            report["skipped"].append(f"{name}: a GEMM has {2e-12 * case.rows * n * k:.0f} TFLOP")
            continue
        quantized = {}
        for operand, cols in (("x", k), ("dy", n)):
            quantized[operand] = _quantization(case, cols, timer)
            report["quantize"].append(
                {**where, "operand": operand, "cols": cols, **quantized[operand]}
            )
        weight_codes = codes(size.experts, n, k, device=device)
        transposed = timer.us(lambda c=weight_codes: ops.transpose(c, None, True))
        weights = random(size.experts, n, k, device=device)
        x, dy = random(case.rows, k, device=device), random(case.rows, n, device=device)
        bf16 = {
            "forward": lambda x=x, w=weights: torch._grouped_mm(
                x, w.transpose(-2, -1), offs=case.ends
            ),
            "dgrad": lambda dy=dy, w=weights: torch._grouped_mm(dy, w, offs=case.ends),
            "wgrad": lambda x=x, dy=dy: torch._grouped_mm(dy.t(), x, offs=case.ends),
        }
        times = {gemm: timer.us(call) for gemm, call in bf16.items()}
        del weights, bf16
        x_row, x_scale, x_col, x_col_scale = _quantize(case, x)
        dy_row, dy_scale, dy_col, dy_col_scale = _quantize(case, dy)
        del x, dy
        transposed_codes = ops.transpose(weight_codes, None, True)
        scale = torch.full((size.experts, 1), 0.01, device=device)
        fp8 = {
            "forward": lambda a=x_row, s=x_scale, w=weight_codes, t=scale: ops.grouped_mm(
                a, s, w, t, case.ends, BF16, False
            ),
            "dgrad": lambda a=dy_row, s=dy_scale, w=transposed_codes, t=scale: ops.grouped_mm(
                a, s, w, t, case.ends, BF16, False
            ),
            "wgrad": lambda a=dy_col, s=dy_col_scale, b=x_col, t=x_col_scale: ops.grouped_wgrad(
                a, s, b, t, case.padded_ends, BF16
            ),
        }
        needs = {
            "forward": quantized["x"]["rowwise"],
            "dgrad": quantized["dy"]["rowwise"] + transposed,
            "wgrad": quantized["x"]["columnwise"] + quantized["dy"]["columnwise"],
        }
        for gemm, call in fp8.items():
            took = timer.us(call)
            row = {"bf16": times[gemm], "fp8": took, "quantize": needs[gemm]}
            report["gemms"].append({**where, "gemm": gemm, "n": n, "k": k, **row})
            tflops = 2e-6 * case.rows * n * k / took
            alone, whole = times[gemm] / took, times[gemm] / (took + needs[gemm])
            print(
                f"| {name} | {gemm} | {times[gemm]:.0f} | {took:.0f} ({tflops:.0f} TFLOP/s) "
                f"| {needs[gemm]:.0f} | {alone:.2f} | {whole:.2f} |",
                flush=True,
            )


def _quantize(case: Case, x: Tensor, rowwise: bool = True, columnwise: bool = True) -> Any:
    return ops.quantize_groups(x, case.ends, case.padded_ends, E4M3, rowwise, columnwise)


def _quantization(case: Case, cols: int, timer: Timer) -> dict[str, float]:
    x = random(case.rows, cols, device=timer.device)
    directions = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}
    return {
        name: timer.us(lambda d=wanted: _quantize(case, x, *d))
        for name, wanted in directions.items()
    }


# --- the MLP of experts --------------------------------------------------------------------------


def measure_mlp(case: Case, timer: Timer, report: dict[str, Any]) -> None:
    """Time the expert MLP of a case in bf16 and FP8, and add the times to the report."""
    size, device = case.size, timer.device
    gate_up = random(size.experts, 2 * size.width, size.hidden, device=device) * 0.02
    down = random(size.experts, size.hidden, size.width, device=device) * 0.02
    quantizer = Quantizer(quant_spec(resolve_recipe("current"), "weight"), columnwise=False)
    plain = [w.requires_grad_() for w in (gate_up, down)]
    gathered = [quantizer(w.detach()).requires_grad_() for w in plain]
    calls = _mlp(case, device, plain, gathered)
    _add_mlp(case, "mlp", {n: timer.us(c, MLP_BUDGET) for n, c in calls.items()}, report)
    del calls
    if case.rows % size.top_k or max(case.counts) > case.rows // size.top_k:
        return  # An expert has more rows than there are tokens.
    found = {
        name: timer.us(_experts(case, device, weights), MLP_BUDGET)
        for name, weights in (("bf16", plain), ("fp8", gathered))
    }
    _add_mlp(case, "experts", found, report)


def _mlp(
    case: Case, device: str, plain: list[Tensor], gathered: list[Any]
) -> dict[str, Callable[[], object]]:
    """Return the forward and backward on rows that are sorted by expert."""
    x = random(case.rows, case.size.hidden, device=device).requires_grad_()
    dy = random(case.rows, case.size.hidden, device=device)
    index = torch.arange(case.rows, dtype=torch.int32, device=device)
    places = index.long().unsqueeze(1)
    key = key_of("current")

    def bf16() -> object:
        h = torch._grouped_mm(x, plain[0].transpose(-2, -1), offs=case.ends)
        gate, up = h.chunk(2, -1)
        g = functional.silu(gate) * up
        y = torch._grouped_mm(g, plain[1].transpose(-2, -1), offs=case.ends)
        return torch.autograd.grad(y, (x, *plain), dy)

    def fp8() -> object:
        y = gated_mlp(x, *gathered, index, places, case.ends, "silu", key, False)
        return torch.autograd.grad(y, (x, *gathered), dy)

    return {"bf16": bf16, "fp8": fp8, "permuting": lambda: ops.combine_rows(dy, places)}


def _experts(case: Case, device: str, weights: list[Any]) -> Callable[[], object]:
    """Return the forward and backward of a transformers module with FP8 or bf16 weights."""
    from experts import unmasked_experts
    from transformers import Qwen3MoeConfig
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from fp8rs import convert_to_float8_training

    size, tokens = case.size, case.rows // case.size.top_k
    config = Qwen3MoeConfig(
        hidden_size=size.hidden, moe_intermediate_size=size.width, num_experts=size.experts
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config).to(BF16)
    # transformers before 5.18 always masks the rows that only expert parallelism has.
    older = not hasattr(experts, "_is_expert_parallel")
    experts._is_expert_parallel = False
    if type(weights[0]) is not Tensor:
        convert_to_float8_training(experts, recipe="current", experts="fp8")
    elif older:
        ALL_EXPERTS_FUNCTIONS.register("unmasked", unmasked_experts)
        config._experts_implementation = "unmasked"
    x = random(tokens, size.hidden, device=device).requires_grad_()
    dy = random(tokens, size.hidden, device=device)
    index = top_k_index(tokens, size.top_k, case.counts).to(device)
    scores = torch.full(index.shape, 1 / size.top_k, dtype=BF16, device=device).requires_grad_()
    names = ("gate_up_proj", "down_proj")

    def run() -> object:
        y = torch.func.functional_call(
            experts, dict(zip(names, weights, strict=True)), (x, index, scores)
        )
        return torch.autograd.grad(y, (x, scores, *weights), dy)

    return run


def _add_mlp(case: Case, kind: str, found: dict[str, float], report: dict[str, Any]) -> None:
    report["mlp"].append({**case.what, "kind": kind, **found})
    ratio = found["bf16"] / found["fp8"]
    line = f"| {case.model}, {case.rows} rows, {case.routing} | {kind} | {found['bf16']:.0f} "
    line += f"| {found['fp8']:.0f} | {ratio:.3f} |"
    if kind == "mlp":
        without = found["bf16"] / (found["fp8"] - found["permuting"])
        line += f" {without:.3f} | {MLP[case.model][1] if case.model in MLP else ''} |"
    else:
        line += "  |  |"
    print(line, flush=True)


# --- kernels -------------------------------------------------------------------------------------


def measure_kernels(case: Case, timer: Timer, report: dict[str, Any]) -> None:
    """Time the kernels around the GEMMs of a case, and add the times to the report."""
    size, device, rows = case.size, timer.device, case.rows
    tokens = rows // size.top_k
    hidden, width = size.hidden, size.width
    x = random(rows, hidden, device=device)
    fits = max(case.counts) <= tokens
    h, dy = random(rows, 2 * width, device=device), random(rows, width, device=device)
    scales = 4 * rows

    def both(cols: int) -> int:
        return 2 * rows * cols + scales + 4 * size.experts * cols

    def gated(rowwise: bool, columnwise: bool, dy: Tensor | None = None) -> object:
        bounds = case.ends, case.padded_ends
        return ops.quantize_gated(h, *bounds, "silu", E4M3, rowwise, columnwise, dy=dy)

    # The name, the columns of the values, the bytes of inputs and outputs, the goal, the call.
    found: list[tuple[str, int, int, float, Callable[[], object]]] = [
        (
            "rows and columns",
            hidden,
            2 * rows * hidden + both(hidden),
            WITH_MAXIMA,
            lambda: _quantize(case, x),
        ),
        (
            "rows",
            hidden,
            3 * rows * hidden + scales,
            WITH_MAXIMA,
            lambda: _quantize(case, x, True, False),
        ),
        (
            "columns",
            hidden,
            3 * rows * hidden,
            WITH_MAXIMA,
            lambda: _quantize(case, x, False, True),
        ),
        (
            "SwiGLU, rows and columns",
            width,
            4 * rows * width + both(width),
            WITH_MAXIMA,
            lambda: gated(True, True),
        ),
        (
            "SwiGLU backward, rows and columns",
            2 * width,
            6 * rows * width + both(2 * width),
            WITH_MAXIMA,
            lambda: gated(True, True, dy),
        ),
    ]
    if fits:
        order = top_k_index(tokens, size.top_k, case.counts).view(-1).sort().indices
        index = (order // size.top_k).to(torch.int32).to(device)
        few = random(tokens, hidden, device=device)
        found.append(
            (
                "rows and columns, from tokens by index",
                hidden,
                2 * tokens * hidden + scales + both(hidden),
                WITH_MAXIMA,
                lambda: ops.quantize_groups(few, case.ends, case.padded_ends, E4M3, index=index),
            )
        )
        found += _sums(order, size, x, few)
    weight = codes(size.experts, 2 * width, hidden, device=device)
    found.append(
        (
            "transposition of gate_up codes",
            hidden,
            2 * weight.numel(),
            WITHOUT,
            lambda: ops.transpose(weight, None, True),
        )
    )
    for name, cols, nbytes, goal, call in found:
        took, copy = timer.us(call), _copy_us(nbytes, timer)
        row = {"bytes": nbytes, "time": took, "copy": copy, "fraction": copy / took}
        report["kernels"].append({**case.what, "name": name, "cols": cols, **row})
        print(
            f"| {case.model}, {rows} rows, {case.routing} | {name} | {took:.0f} | {copy:.0f} "
            f"| {copy / took:.2f} | {goal:.2f} |",
            flush=True,
        )


def _sums(
    order: Tensor, size: Size, x: Tensor, grad: Tensor
) -> list[tuple[str, int, int, float, Callable[[], object]]]:
    """Return the kernels that sum each token's rows ``x``, which ``order`` sorts by expert."""
    rows, tokens, hidden = len(order), len(grad), size.hidden
    places = torch.empty_like(order).scatter_(0, order, torch.arange(rows))
    places = places.view(tokens, size.top_k).to(x.device)
    weights = torch.rand(tokens, size.top_k, device=x.device)
    # The bytes of a sum's rows and results, of the places, and of as many fp32 weights.
    values, indices, factors = 2 * (rows + tokens) * hidden, 8 * rows, 4 * rows
    written = 2 * rows * hidden
    return [
        (
            "sum of each token's rows",
            hidden,
            values + indices,
            SUMS,
            lambda: ops.combine_rows(x, places),
        ),
        (
            "weighted sum of each token's rows",
            hidden,
            values + indices + factors,
            SUMS,
            lambda: ops.combine_rows(x, places, weights),
        ),
        (
            "weighted sum's backward",
            hidden,
            values + written + indices + 2 * factors,
            SUMS,
            lambda: ops.combine_rows_backward(grad, x, places, weights),
        ),
        (
            "weighted sum's backward, rows only",
            hidden,
            2 * tokens * hidden + written + indices + factors,
            SUMS,
            lambda: ops.combine_rows_backward(grad, None, places, weights, True, False),
        ),
    ]


def _copy_us(nbytes: int, timer: Timer) -> float:
    """Return the time to read and write ``nbytes`` in total: the driver's copy or a kernel's."""
    source = torch.randint(1 << 30, (nbytes // 8,), dtype=torch.int32, device=timer.device)
    target = torch.empty_like(source)
    copies = (lambda: target.copy_(source), lambda: torch.neg(source, out=target))
    return min(timer.us(copy) for copy in copies)


# --- the command line ----------------------------------------------------------------------------

PARTS = {
    "gemms": (
        "| rows and weight | GEMM | bf16, us | FP8, us | quantization, us | FP8 alone, x bf16 "
        "| with quantization |",
        7,
    ),
    "mlp": ("| experts | part | bf16, us | FP8, us | x bf16 | without permuting | goal |", 7),
    "kernels": ("| values | kernel | us | copy, us | fraction | goal |", 6),
}


def main(argv: list[str] | None = None) -> int:
    """Measure all parts."""
    options = _options(argv)
    if options.device == "cpu" and not options.tiny:
        print(
            "these shapes require a GPU, and torch finds none. For a smoke run on the CPU:\n"
            "    python benches/grouped_shapes.py --tiny --device cpu",
            file=sys.stderr,
        )
        return 2
    on_gpu = options.device == "cuda"
    report: dict[str, Any] = {
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        **{name: [] for name in ("gemms", "quantize", "mlp", "kernels", "skipped")},
    }
    print(report["device"], "torch", report["torch"])
    timer = Timer(options.device)
    sizes = TINY if options.tiny else MODELS
    begun = time.perf_counter()
    for part in options.only:
        title, columns = PARTS[part]
        print(f"\n{part}\n\n{title}\n{'|---' * columns}|", flush=True)
        for model, rows, routing in _cases(part, options, sizes):
            case = case_of(model, sizes[model], rows, routing, options.device)
            try:
                globals()[f"measure_{part}"](case, timer, report)
            except (RuntimeError, ValueError) as error:
                text = f"{part}, {model}, {rows} rows, {routing}: {error}"
                report["skipped"].append(text)
                print(text, flush=True)
                if on_gpu and "CUDA error" in text:
                    break  # Later calls would fail too.
            if on_gpu:
                torch.cuda.empty_cache()
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=1))
    print("\n".join(["", *report["skipped"], f"{time.perf_counter() - begun:.0f} s"]))
    return 0


def _cases(
    part: str, options: argparse.Namespace, sizes: dict[str, Size]
) -> list[tuple[str, int, str]]:
    models = [model for model in options.models if model in sizes]
    if options.tiny:
        return [(model, 64, routing) for model in models for routing in ROUTINGS]
    if part == "gemms":
        return [(m, rows, r) for m in models for rows in options.rows for r in ROUTINGS]
    return [(m, MLP[m][0], r) for m in models if m in MLP for r in ROUTINGS]


def _options(argv: list[str] | None) -> argparse.Namespace:
    def names(known: Any) -> Callable[[str], list[str]]:
        def split(text: str) -> list[str]:
            for name in text.split(","):
                if name not in known:
                    raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(known)}")
            return text.split(",")

        return split

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if gpu else "cpu")
    parser.add_argument("--only", type=names(PARTS), default=list(PARTS), metavar="PART,...")
    parser.add_argument("--models", type=names(MODELS), default=list(MODELS), metavar="NAME,...")
    parser.add_argument(
        "--rows",
        type=lambda text: [int(n) for n in text.split(",")],
        default=list(ROWS),
        metavar="N,...",
        help="rows for gemms",
    )
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a smoke run")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
