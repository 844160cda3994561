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
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from routing import ROUTINGS, rows_per_expert, top_k_index
from torch import Tensor
from torch.nn import functional

from fp8rs.nn.functional import key_of
from fp8rs.nn.grouped_function import GroupBounds, gated_mlp
from fp8rs.quantize.recipes import quant_spec, resolve_recipe
from fp8rs.tensor.quantized import QuantizedTensor
from fp8rs.tensor.quantizer import Quantizer

ops = torch.ops.fp8rs
BF16 = torch.bfloat16
E4M3 = torch.float8_e4m3fn


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


@dataclass(frozen=True)
class MlpGoal:
    """The rows of a model for "mlp", and the goal: a speedup over bf16."""

    rows: int
    speedup: float


MLP = {
    "mixtral": MlpGoal(16384, 1.45),
    "deepseek-v3": MlpGoal(65536, 1.45),
    "qwen3": MlpGoal(131072, 1.10),
}

#: Goals for kernels, as fractions of a copy's speed: kernels that compute maxima, kernels that do
#: not, and kernels that sum rows.
WITH_MAXIMA = 0.60
WITHOUT = 0.80
SUMS = 0.85

#: GEMMs with more floating-point operations than this are left out.
LIMIT = 16e12

#: Microseconds for all calls of a measurement of a GEMM or kernel, and of an MLP.
BUDGET = 15_000
MLP_BUDGET = 150_000

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

        # The first call loads kernels. One more call says how many fit into the budget, and for how
        # long the device has to sleep.
        call()
        first_us, host_us = self._round(call, 1, 1000.0)
        count = max(1, min(10, int(budget / first_us)))
        median_us, _ = self._round(call, count, host_us)
        return median_us

    def _round(
        self, call: Callable[[], object], count: int, expected_host_us: float
    ) -> tuple[float, float]:
        """Time consecutive calls. Return the median, and the host time of a call."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        sleep_us = 1.5 * min((expected_host_us + 20) * count, 10_000)
        torch.cuda._sleep(int(CYCLES * sleep_us))

        start = time.perf_counter()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        host_us = (time.perf_counter() - start) * 1e6 / count
        torch.cuda.synchronize()

        times_us = []
        for before, after in itertools.pairwise(events):
            times_us.append(1e3 * before.elapsed_time(after))
        return statistics.median(times_us), host_us


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


@dataclass(frozen=True)
class Weight:
    """The name and shape of an expert's weight."""

    name: str
    n: int
    k: int


def measure_gemms(case: Case, timer: Timer, report: dict[str, Any]) -> None:
    """Time the GEMMs of a case in bf16 and FP8, and add the times to the report."""
    weights = [
        Weight("gate_up", n=2 * case.size.width, k=case.size.hidden),
        Weight("down", n=case.size.hidden, k=case.size.width),
    ]
    for weight in weights:
        name = f"{case.model}, {case.rows} rows, {case.routing}, {weight.name}"
        flop = 2 * case.rows * weight.n * weight.k
        if flop > LIMIT:
            report["skipped"].append(f"{name}: a GEMM has {1e-12 * flop:.0f} TFLOP")
            continue

        fields = {**case.what, "weight": weight.name}
        x_us = _quantization(case, weight.k, timer)
        report["quantize"].append({**fields, "operand": "x", "cols": weight.k, **x_us})
        dy_us = _quantization(case, weight.n, timer)
        report["quantize"].append({**fields, "operand": "dy", "cols": weight.n, **dy_us})
        quantize_us = {
            "forward": x_us["rowwise"],
            "dgrad": dy_us["rowwise"] + _transposition(case, weight, timer),
            "wgrad": x_us["columnwise"] + dy_us["columnwise"],
        }

        bf16_us = _bf16_gemms(case, weight, timer)
        fp8_us = _fp8_gemms(case, weight, timer)
        for gemm in ("forward", "dgrad", "wgrad"):
            bf16 = bf16_us[gemm]
            fp8 = fp8_us[gemm]
            quantize = quantize_us[gemm]
            times = {"bf16": bf16, "fp8": fp8, "quantize": quantize}
            report["gemms"].append({**fields, "gemm": gemm, "n": weight.n, "k": weight.k, **times})

            tflops = 1e-6 * flop / fp8
            print(
                f"| {name} | {gemm} | {bf16:.0f} | {fp8:.0f} ({tflops:.0f} TFLOP/s) "
                f"| {quantize:.0f} | {bf16 / fp8:.2f} | {bf16 / (fp8 + quantize):.2f} |",
                flush=True,
            )


# Each of these functions frees its operands, because those of all GEMMs together need too much
# memory.


def _bf16_gemms(case: Case, weight: Weight, timer: Timer) -> dict[str, float]:
    """Return the microseconds of each GEMM in bf16."""
    w_ENK = random(case.size.experts, weight.n, weight.k, device=timer.device)
    x = random(case.rows, weight.k, device=timer.device)
    dy = random(case.rows, weight.n, device=timer.device)
    return {
        "forward": timer.us(lambda: torch._grouped_mm(x, w_ENK.transpose(-2, -1), offs=case.ends)),
        "dgrad": timer.us(lambda: torch._grouped_mm(dy, w_ENK, offs=case.ends)),
        "wgrad": timer.us(lambda: torch._grouped_mm(dy.t(), x, offs=case.ends)),
    }


def _fp8_gemms(case: Case, weight: Weight, timer: Timer) -> dict[str, float]:
    """Return the microseconds of each GEMM on FP8 operands."""
    experts = case.size.experts
    x_row, x_row_scale, x_col, x_col_scale = _quantize(
        case, random(case.rows, weight.k, device=timer.device)
    )
    dy_row, dy_row_scale, dy_col, dy_col_scale = _quantize(
        case, random(case.rows, weight.n, device=timer.device)
    )
    w_ENK = codes(experts, weight.n, weight.k, device=timer.device)
    w_EKN = ops.transpose(w_ENK, None, True)
    w_scale = torch.full((experts, 1), 0.01, device=timer.device)

    def forward() -> object:
        return ops.grouped_mm(x_row, x_row_scale, w_ENK, w_scale, case.ends, BF16, False)

    def dgrad() -> object:
        return ops.grouped_mm(dy_row, dy_row_scale, w_EKN, w_scale, case.ends, BF16, False)

    def wgrad() -> object:
        return ops.grouped_wgrad(dy_col, dy_col_scale, x_col, x_col_scale, case.padded_ends, BF16)

    return {
        "forward": timer.us(forward),
        "dgrad": timer.us(dgrad),
        "wgrad": timer.us(wgrad),
    }


def _transposition(case: Case, weight: Weight, timer: Timer) -> float:
    """Return the microseconds to transpose the codes of a weight."""
    w_ENK = codes(case.size.experts, weight.n, weight.k, device=timer.device)
    return timer.us(lambda: ops.transpose(w_ENK, None, True))


def _quantization(case: Case, cols: int, timer: Timer) -> dict[str, float]:
    """Return the microseconds to quantize an operand, by directions."""
    x = random(case.rows, cols, device=timer.device)
    return {
        "rowwise": timer.us(lambda: _quantize(case, x, columnwise=False)),
        "columnwise": timer.us(lambda: _quantize(case, x, rowwise=False)),
        "both": timer.us(lambda: _quantize(case, x)),
    }


def _quantize(
    case: Case, x: Tensor, rowwise: bool = True, columnwise: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return codes and scales of rows, and codes and scales of columns."""
    planes: tuple[Tensor, Tensor, Tensor, Tensor]
    planes = ops.quantize_groups(x, case.ends, case.padded_ends, E4M3, rowwise, columnwise)
    return planes


# --- the MLP of experts --------------------------------------------------------------------------


def measure_mlp(case: Case, timer: Timer, report: dict[str, Any]) -> None:
    """Time the expert MLP of a case in bf16 and FP8, and add the times to the report."""
    size = case.size
    device = timer.device
    gate_up = random(size.experts, 2 * size.width, size.hidden, device=device) * 0.02
    down = random(size.experts, size.hidden, size.width, device=device) * 0.02
    quantizer = Quantizer(quant_spec(resolve_recipe("current"), "weight"), columnwise=False)
    bf16_weights = [gate_up.requires_grad_(), down.requires_grad_()]
    fp8_weights = [quantizer(weight.detach()).requires_grad_() for weight in bf16_weights]

    calls = _mlp(case, device, bf16_weights, fp8_weights)
    mlp_us = {name: timer.us(call, MLP_BUDGET) for name, call in calls.items()}
    _add_mlp(case, "mlp", mlp_us, report)
    # The calls own the rows.
    del calls

    # The module needs whole tokens, whose experts are distinct.
    if case.rows % size.top_k or max(case.counts) > case.rows // size.top_k:
        return
    experts_us = {
        "bf16": timer.us(_experts(case, device, bf16_weights), MLP_BUDGET),
        "fp8": timer.us(_experts(case, device, fp8_weights), MLP_BUDGET),
    }
    _add_mlp(case, "experts", experts_us, report)


def _mlp(
    case: Case, device: str, bf16_weights: Sequence[Tensor], fp8_weights: Sequence[Tensor]
) -> dict[str, Callable[[], object]]:
    """Return the forward and backward on rows that are sorted by expert."""
    x = random(case.rows, case.size.hidden, device=device).requires_grad_()
    dy = random(case.rows, case.size.hidden, device=device)
    # Each row is a token of its own.
    row_tokens = torch.arange(case.rows, device=device)
    token_rows = row_tokens.unsqueeze(1)
    bounds = GroupBounds(case.ends, case.padded_ends)
    key = key_of("current")

    def bf16() -> object:
        gate_up, down = bf16_weights
        h = torch._grouped_mm(x, gate_up.transpose(-2, -1), offs=case.ends)
        gate, up = h.chunk(2, -1)
        hidden = functional.silu(gate) * up
        y = torch._grouped_mm(hidden, down.transpose(-2, -1), offs=case.ends)
        return torch.autograd.grad(y, (x, gate_up, down), dy)

    def fp8() -> object:
        gate_up, down = fp8_weights
        y = gated_mlp(x, gate_up, down, row_tokens, token_rows, bounds, "silu", key, False)
        return torch.autograd.grad(y, (x, gate_up, down), dy)

    def permuting() -> object:
        return ops.combine_rows(dy, token_rows)

    return {"bf16": bf16, "fp8": fp8, "permuting": permuting}


def _experts(case: Case, device: str, weights: Sequence[Tensor]) -> Callable[[], object]:
    """Return the forward and backward of a transformers module with FP8 or bf16 weights."""
    from experts import unmasked_experts
    from transformers import Qwen3MoeConfig
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from fp8rs import convert_to_float8_training

    size = case.size
    tokens = case.rows // size.top_k
    config = Qwen3MoeConfig(
        hidden_size=size.hidden, moe_intermediate_size=size.width, num_experts=size.experts
    )
    config._experts_implementation = "grouped_mm"
    with torch.device("meta"):
        experts: Any = Qwen3MoeExperts(config).to(BF16)

    # transformers before 5.18 always masks the rows that only expert parallelism has.
    always_masks = not hasattr(experts, "_is_expert_parallel")
    experts._is_expert_parallel = False
    if isinstance(weights[0], QuantizedTensor):
        convert_to_float8_training(experts, recipe="current", experts="fp8")
    elif always_masks:
        ALL_EXPERTS_FUNCTIONS.register("unmasked", unmasked_experts)
        config._experts_implementation = "unmasked"

    gate_up, down = weights
    parameters = {"gate_up_proj": gate_up, "down_proj": down}
    x = random(tokens, size.hidden, device=device).requires_grad_()
    dy = random(tokens, size.hidden, device=device)
    index = top_k_index(tokens, size.top_k, case.counts).to(device)
    scores = torch.full(index.shape, 1 / size.top_k, dtype=BF16, device=device).requires_grad_()

    def run() -> object:
        y = torch.func.functional_call(experts, parameters, (x, index, scores))
        return torch.autograd.grad(y, (x, scores, gate_up, down), dy)

    return run


def _add_mlp(case: Case, kind: str, times: dict[str, float], report: dict[str, Any]) -> None:
    """Add microseconds of a kind of MLP to the report, and print them."""
    report["mlp"].append({**case.what, "kind": kind, **times})

    speedup = times["bf16"] / times["fp8"]
    line = f"| {case.model}, {case.rows} rows, {case.routing} | {kind} | {times['bf16']:.0f} "
    line += f"| {times['fp8']:.0f} | {speedup:.3f} |"
    if kind == "mlp":
        speedup_without_permuting = times["bf16"] / (times["fp8"] - times["permuting"])
        goal = MLP[case.model].speedup if case.model in MLP else ""
        line += f" {speedup_without_permuting:.3f} | {goal} |"
    else:
        line += "  |  |"
    print(line, flush=True)


# --- kernels -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A kernel to time.

    Attributes:
        name: its name in the table.
        cols: the columns of its values.
        nbytes: the bytes of its inputs and outputs.
        goal: the fraction of a copy's speed that it should reach.
        call: calls it.
    """

    name: str
    cols: int
    nbytes: int
    goal: float
    call: Callable[[], object]


def measure_kernels(case: Case, timer: Timer, report: dict[str, Any]) -> None:
    """Time the kernels around the GEMMs of a case, and add the times to the report."""
    size = case.size
    kernels = _quantizing(case, timer.device)

    # Rows come from tokens, unless an expert has more rows than there are tokens.
    tokens = case.rows // size.top_k
    if max(case.counts) <= tokens:
        kernels += _permuting(case, tokens, timer.device)

    gate_up = codes(size.experts, 2 * size.width, size.hidden, device=timer.device)
    kernels.append(
        Kernel(
            "transposition of gate_up codes",
            size.hidden,
            2 * gate_up.numel(),
            WITHOUT,
            lambda: ops.transpose(gate_up, None, True),
        )
    )

    for kernel in kernels:
        kernel_us = timer.us(kernel.call)
        copy_us = _copy_us(kernel.nbytes, timer)
        fraction = copy_us / kernel_us
        times = {"bytes": kernel.nbytes, "time": kernel_us, "copy": copy_us, "fraction": fraction}
        report["kernels"].append({**case.what, "name": kernel.name, "cols": kernel.cols, **times})
        print(
            f"| {case.model}, {case.rows} rows, {case.routing} | {kernel.name} | {kernel_us:.0f} "
            f"| {copy_us:.0f} | {fraction:.2f} | {kernel.goal:.2f} |",
            flush=True,
        )


def _quantizing(case: Case, device: str) -> list[Kernel]:
    """Return the kernels that quantize rows, and the gated activation of rows."""
    rows = case.rows
    hidden = case.size.hidden
    width = case.size.width
    x = random(rows, hidden, device=device)
    gate_up = random(rows, 2 * width, device=device)
    d_activation = random(rows, width, device=device)
    row_scales = 4 * rows

    def gated(dy: Tensor | None = None) -> object:
        return ops.quantize_gated(
            gate_up, case.ends, case.padded_ends, "silu", E4M3, True, True, dy=dy
        )

    return [
        Kernel(
            "rows and columns",
            hidden,
            2 * rows * hidden + _quantized_bytes(case, hidden),
            WITH_MAXIMA,
            lambda: _quantize(case, x),
        ),
        Kernel(
            "rows",
            hidden,
            3 * rows * hidden + row_scales,
            WITH_MAXIMA,
            lambda: _quantize(case, x, columnwise=False),
        ),
        Kernel(
            "columns",
            hidden,
            3 * rows * hidden,
            WITH_MAXIMA,
            lambda: _quantize(case, x, rowwise=False),
        ),
        Kernel(
            "SwiGLU, rows and columns",
            width,
            4 * rows * width + _quantized_bytes(case, width),
            WITH_MAXIMA,
            gated,
        ),
        Kernel(
            "SwiGLU backward, rows and columns",
            2 * width,
            6 * rows * width + _quantized_bytes(case, 2 * width),
            WITH_MAXIMA,
            lambda: gated(d_activation),
        ),
    ]


def _quantized_bytes(case: Case, cols: int) -> int:
    """Return the bytes of codes and scales of rows and of columns."""
    both_codes = 2 * case.rows * cols
    row_scales = 4 * case.rows
    column_scales = 4 * case.size.experts * cols
    return both_codes + row_scales + column_scales


def _permuting(case: Case, tokens: int, device: str) -> list[Kernel]:
    """Return the kernels that copy tokens to rows, and that sum each token's rows."""
    rows = case.rows
    hidden = case.size.hidden
    top_k = case.size.top_k

    # Rows are sorted by expert: `order` is the position of each row in (tokens, top_k).
    order = top_k_index(tokens, top_k, case.counts).view(-1).sort().indices
    row_tokens = (order // top_k).to(device)
    token_rows = torch.empty_like(order).scatter_(0, order, torch.arange(rows))
    token_rows = token_rows.view(tokens, top_k).to(device)

    token_values = random(tokens, hidden, device=device)
    row_values = random(rows, hidden, device=device)
    weights = torch.rand(tokens, top_k, device=device)

    values_bytes = 2 * (rows + tokens) * hidden
    d_rows_bytes = 2 * rows * hidden
    row_tokens_bytes = 8 * rows
    token_rows_bytes = 8 * rows
    weights_bytes = 4 * rows
    return [
        Kernel(
            "rows and columns, from tokens by index",
            hidden,
            2 * tokens * hidden + row_tokens_bytes + _quantized_bytes(case, hidden),
            WITH_MAXIMA,
            lambda: ops.quantize_groups(
                token_values, case.ends, case.padded_ends, E4M3, index=row_tokens
            ),
        ),
        Kernel(
            "sum of each token's rows",
            hidden,
            values_bytes + token_rows_bytes,
            SUMS,
            lambda: ops.combine_rows(row_values, token_rows),
        ),
        Kernel(
            "weighted sum of each token's rows",
            hidden,
            values_bytes + token_rows_bytes + weights_bytes,
            SUMS,
            lambda: ops.combine_rows(row_values, token_rows, weights),
        ),
        Kernel(
            "weighted sum's backward",
            hidden,
            values_bytes + d_rows_bytes + token_rows_bytes + 2 * weights_bytes,
            SUMS,
            lambda: ops.combine_rows_backward(token_values, row_values, token_rows, weights),
        ),
        Kernel(
            "weighted sum's backward, rows only",
            hidden,
            2 * tokens * hidden + d_rows_bytes + token_rows_bytes + weights_bytes,
            SUMS,
            lambda: ops.combine_rows_backward(token_values, None, token_rows, weights, True, False),
        ),
    ]


def _copy_us(nbytes: int, timer: Timer) -> float:
    """Return the time to read and write ``nbytes`` in total: the driver's copy or a kernel's."""
    source = torch.randint(1 << 30, (nbytes // 8,), dtype=torch.int32, device=timer.device)
    target = torch.empty_like(source)
    driver_us = timer.us(lambda: target.copy_(source))
    kernel_us = timer.us(lambda: torch.neg(source, out=target))
    return min(driver_us, kernel_us)


# --- the command line ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """A part of the benchmark: how a case is measured, and the columns of its table."""

    measure: Callable[[Case, Timer, dict[str, Any]], None]
    columns: list[str]


PARTS = {
    "gemms": Part(
        measure_gemms,
        [
            "rows and weight",
            "GEMM",
            "bf16, us",
            "FP8, us",
            "quantization, us",
            "FP8 alone, x bf16",
            "with quantization",
        ],
    ),
    "mlp": Part(
        measure_mlp,
        ["experts", "part", "bf16, us", "FP8, us", "x bf16", "without permuting", "goal"],
    ),
    "kernels": Part(measure_kernels, ["values", "kernel", "us", "copy, us", "fraction", "goal"]),
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
        "gemms": [],
        "quantize": [],
        "mlp": [],
        "kernels": [],
        "skipped": [],
    }
    print(report["device"], "torch", report["torch"])

    timer = Timer(options.device)
    sizes = TINY if options.tiny else MODELS
    start = time.perf_counter()
    for name in options.only:
        part = PARTS[name]
        print(f"\n{name}\n\n| {' | '.join(part.columns)} |")
        print("|---" * len(part.columns) + "|", flush=True)
        for model, rows, routing in _cases(name, options, sizes):
            case = case_of(model, sizes[model], rows, routing, options.device)
            try:
                part.measure(case, timer, report)
            except (RuntimeError, ValueError) as error:
                message = f"{name}, {model}, {rows} rows, {routing}: {error}"
                report["skipped"].append(message)
                print(message, flush=True)
                if on_gpu and "CUDA error" in message:
                    break  # Later calls would fail too.

            if on_gpu:
                torch.cuda.empty_cache()
            if options.json is not None:
                options.json.write_text(json.dumps(report, indent=1))

    print()
    for message in report["skipped"]:
        print(message)
    print(f"{time.perf_counter() - start:.0f} s")
    return 0


def _cases(
    part: str, options: argparse.Namespace, sizes: dict[str, Size]
) -> Iterator[tuple[str, int, str]]:
    """Yield the models, rows and routings of a part."""
    for model in options.models:
        if model not in sizes:
            continue

        if options.tiny:
            all_rows = [64]
        elif part == "gemms":
            all_rows = options.rows
        elif model in MLP:
            all_rows = [MLP[model].rows]
        else:
            all_rows = []
        for rows in all_rows:
            for routing in ROUTINGS:
                yield model, rows, routing


def _options(argv: list[str] | None) -> argparse.Namespace:
    def names(choices: Collection[str]) -> Callable[[str], list[str]]:
        def split(text: str) -> list[str]:
            for name in text.split(","):
                if name not in choices:
                    raise argparse.ArgumentTypeError(f"{name} is not one of {', '.join(choices)}")
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
