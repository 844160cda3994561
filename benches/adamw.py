"""Time fp8rs.optim.AdamW on a GPU, compared with a copy of as many bytes and with torch's AdamW.

    python benches/adamw.py [--json FILE] [--rehearse] [--only TEXT ...]

The parameters are 0.5 B elements in 224 tensors: the matrices of 32 layers of Llama-3-8B with a
fourteenth of the rows. Gradients are bf16. Device time is the median of replays of a CUDA graph of
``step()``. Host time is the duration of an eager ``step()`` call. *Bytes* are the bytes per element
that a step must read and write. *Fraction* is the time of a device copy of as many bytes divided by
the step's time. All rows are measured in one run.

``--only`` runs the rows whose names contain one of the texts: ``--only masters 128x128``.
``--rehearse`` runs every row once on the CPU with small tensors, without timing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp8rs
from fp8rs.optim import AdamW
from fp8rs.optim.moments import BYTES_PER_ELEMENT

E4M3 = torch.float8_e4m3fn
SHAPES = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
SHAPES += [(14336, 4096), (14336, 4096), (4096, 14336)]
LAYERS = 32
ops = torch.ops.fp8rs

Quantizer = Callable[[], Any]


def load_benchmark(name: str) -> Any:
    """Import another benchmark from its file."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def quantizers(device: str) -> dict[str, Quantizer]:
    """Return functions that create a quantizer with one plane, by format."""

    def delayed() -> Any:
        scale, amax = torch.tensor(1e-3, device=device), torch.zeros((), device=device)
        return fp8rs.Quantizer(fp8rs.DelayedScaling(), columnwise=False, delayed=(scale, amax))

    return {
        "delayed": delayed,
        "current": lambda: fp8rs.Quantizer("current", columnwise=False),
        "rows": lambda: fp8rs.Quantizer("rowwise", columnwise=False),
        "128x128": lambda: fp8rs.Quantizer("block", columnwise=False),
        "32x32": lambda: fp8rs.Quantizer("mxfp8", columnwise=False),
    }


#: The bytes per element of both moments, by state_dtype.
MOMENT_BYTES = {torch.float32: 8, torch.bfloat16: 4, "fp8": BYTES_PER_ELEMENT}


def bytes_moved(name: str, masters: bool, state: torch.dtype | str) -> float:
    """Return the bytes per element that a step reads and writes.

    It reads the gradient, the moments and masters or codes, and writes all except the gradient.
    With current scaling, it reads the masters twice, or everything twice without masters.
    """
    moments = MOMENT_BYTES[state]
    if masters:
        return 2 + 2 * moments + 8 + 1 + (4 if name == "current" else 0)
    return 2 + 2 * moments + 2 + (2 + moments + 1 if name == "current" else 0)


class Rows:
    """Measures the rows of the table."""

    def __init__(self, rehearse: bool, only: Sequence[str] = ()) -> None:
        self.rehearse, self.only = rehearse, only
        self.device = "cpu" if rehearse else "cuda"
        self.kernels = load_benchmark("cuda_kernels")
        self.copies: dict[float, float] = {}
        self.results: list[dict[str, Any]] = []
        shapes = SHAPES * (1 if rehearse else LAYERS)
        self.shapes = [
            (rows // (140 if rehearse else 14), cols // (16 if rehearse else 1))
            for rows, cols in shapes
        ]
        if rehearse:
            # Rows of whole blocks, so that moments are stored in 8 bits.
            self.shapes = [(rows, cols // 128 * 128) for rows, cols in self.shapes]
        self.n = sum(rows * cols for rows, cols in self.shapes)

    def tensors(self, dtype: torch.dtype = torch.float32, scale: float = 0.02) -> list[Tensor]:
        """Return random tensors of all shapes."""
        new = [torch.empty(shape, dtype=dtype, device=self.device) for shape in self.shapes]
        return [x.normal_(0, scale) for x in new]

    def wanted(self, name: str) -> bool:
        """Return whether ``--only`` selects a row."""
        return not self.only or any(text in name for text in self.only)

    def measure(self, name: str, per_parameter: float, step: Callable[[], Any]) -> None:
        """Measure the device time of a graph of ``step``, and its host time."""
        if not self.wanted(name):
            return
        if self.rehearse:
            step()
            print(f"{name:44} {per_parameter:5g} B  ran", flush=True)
            return
        step()
        torch.cuda.synchronize()
        host = []
        for _ in range(5):
            begun = time.perf_counter()
            step()
            host.append(time.perf_counter() - begun)
            torch.cuda.synchronize()
        took = self.kernels.time_us([step], 9)
        if per_parameter not in self.copies:
            self.copies[per_parameter] = self.kernels.copy_us(round(self.n * per_parameter), 1)
        copy = self.copies[per_parameter]
        row = {
            "name": name,
            "bytes": per_parameter,
            "us": took,
            "GB/s": self.n * per_parameter / took / 1e3,
            "fraction": copy / took,
            "host_ms": statistics.median(host) * 1e3,
        }
        self.results.append(row)
        print(
            f"{name:44} {per_parameter:5g} B {took:9.1f} us {row['GB/s']:6.0f} GB/s"
            f"  fraction {row['fraction']:.2f}  host {row['host_ms']:.2f} ms",
            flush=True,
        )

    def ours(self, name: str, masters: bool, state: torch.dtype | str = torch.float32) -> None:
        """Measure a step of fp8rs.optim.AdamW."""
        words = f"fp8rs AdamW: {name}, {'masters' if masters else 'stochastic'}"
        if state == torch.bfloat16:
            words += ", bf16 moments"
        elif state == "fp8":
            words += ", FP8 moments"
        if not self.wanted(words):
            return
        make = quantizers(self.device)[name]
        params = []
        for x, grad in zip(self.tensors(), self.tensors(torch.bfloat16), strict=True):
            p = torch.nn.Parameter(make()(x))
            p.grad_dtype = torch.bfloat16
            p.grad = grad
            params.append(p)
        optimizer = AdamW(
            params,
            capturable=True,
            master_weights=masters,
            state_dtype=state,
            state_filter=lambda param: True,
        )
        if state == "fp8":
            optimizer.step()
            assert all("exp_avg_codes" in optimizer.state[p] for p in params), "float32 moments"
        self.measure(words, bytes_moved(name, masters, state), optimizer.step)

    def plain(self, state: torch.dtype | str = torch.float32) -> None:
        """Measure fp8rs.optim.AdamW with plain fp32 parameters and fp32 gradients."""
        params = [torch.nn.Parameter(x) for x in self.tensors()]
        for p, grad in zip(params, self.tensors(), strict=True):
            p.grad = grad
        optimizer = AdamW(
            params, capturable=True, state_dtype=state, state_filter=lambda param: True
        )
        words = "fp8rs AdamW: plain fp32" + (", FP8 moments" if state == "fp8" else "")
        self.measure(words, 12 + 2 * MOMENT_BYTES[state], optimizer.step)

    def theirs(self) -> None:
        """Measure torch's fused AdamW on fp32 masters, followed by quantization."""
        masters = [torch.nn.Parameter(x) for x in self.tensors()]
        low = self.tensors(torch.bfloat16)
        for p in masters:
            p.grad = torch.empty_like(p)
        optimizer = torch.optim.AdamW(masters, fused=True, capturable=not self.rehearse)
        grads = [p.grad for p in masters]
        plain = [p.detach() for p in masters]
        codes = [torch.empty(shape, dtype=E4M3, device=self.device) for shape in self.shapes]
        scales = torch.full((len(plain),), 1e-3, device=self.device)
        amaxes = torch.zeros_like(scales)

        def fused() -> None:
            # It requires gradients of the masters' dtype.
            torch._foreach_copy_(grads, low)
            optimizer.step()

        def then_delayed() -> None:
            fused()
            ops.multi_quantize_delayed(plain, scales, amaxes, codes)

        def then_current() -> None:
            fused()
            found = ops.multi_amax(plain)
            ops.multi_quantize(plain, ops.scale_from_amax(found, E4M3), codes)

        def then_a_loop() -> None:
            fused()
            for x, out in zip(plain, codes, strict=True):
                scale = x.abs().amax().clamp(min=1e-12) / 448
                out.copy_((x / scale).clamp(-448, 448))

        self.measure("torch fused AdamW alone, fp32 gradients", 28, optimizer.step)
        self.measure("torch fused + our multi_quantize_delayed", 27, then_delayed)
        self.measure("torch fused + our amax and multi_quantize", 31, then_current)
        self.measure("torch fused + a loop that requantizes", 31, then_a_loop)


def main() -> None:
    """Time the optimizers, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--only", nargs="+", default=(), metavar="TEXT")
    arguments = parser.parse_args()
    rows = Rows(arguments.rehearse, arguments.only)
    if not arguments.rehearse:
        print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(f"{len(rows.shapes)} tensors, {rows.n / 1e6:.1f} M parameters", flush=True)
    for name in quantizers(rows.device):
        for masters in (True, False):
            rows.ours(name, masters)
    rows.ours("delayed", True, torch.bfloat16)
    for name in quantizers(rows.device):
        for masters in (True, False):
            rows.ours(name, masters, "fp8")
    rows.plain()
    rows.plain("fp8")
    rows.theirs()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows.results, indent=1))


if __name__ == "__main__":
    main()
