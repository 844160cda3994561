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
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from cuda_kernels import copy_us, time_us
from torch import Tensor

import fp8rs
from fp8rs.optim import AdamW
from fp8rs.optim.moments import BYTES_PER_ELEMENT
from fp8rs.tensor.quantizer import Quantizer

E4M3 = torch.float8_e4m3fn
SHAPES = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)]
SHAPES += [(14336, 4096), (14336, 4096), (4096, 14336)]
LAYERS = 32
ops = torch.ops.fp8rs


def quantizers(device: str) -> dict[str, Callable[[], Quantizer]]:
    """Return functions that create a quantizer with one plane, by format."""

    def delayed() -> Quantizer:
        scale = torch.tensor(1e-3, device=device)
        amax = torch.zeros((), device=device)
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
    gradient = 2
    if masters:
        nbytes = gradient + 2 * moments + 2 * 4 + 1
        if name == "current":
            nbytes += 4
    else:
        nbytes = gradient + 2 * moments + 2 * 1
        if name == "current":
            nbytes += gradient + moments + 1
    return nbytes


class Rows:
    """Measures the rows of the table."""

    def __init__(self, rehearse: bool, only: Sequence[str] = ()) -> None:
        self.rehearse = rehearse
        self.only = only
        self.device = "cpu" if rehearse else "cuda"
        #: Times of copies by bytes per element.
        self.copies_us: dict[float, float] = {}
        self.results: list[dict[str, Any]] = []

        self.shapes = []
        if rehearse:
            for rows, cols in SHAPES:
                # Rows of whole blocks, so that moments are stored in 8 bits.
                self.shapes.append((rows // 140, cols // 16 // 128 * 128))
        else:
            for rows, cols in SHAPES * LAYERS:
                self.shapes.append((rows // 14, cols))
        self.numel = sum(rows * cols for rows, cols in self.shapes)

    def tensors(self, dtype: torch.dtype = torch.float32, scale: float = 0.02) -> list[Tensor]:
        """Return random tensors of all shapes."""
        tensors = []
        for shape in self.shapes:
            x = torch.empty(shape, dtype=dtype, device=self.device)
            tensors.append(x.normal_(0, scale))
        return tensors

    def selects(self, name: str) -> bool:
        """Return whether ``--only`` selects a row."""
        return not self.only or any(text in name for text in self.only)

    def measure(self, name: str, bytes_per_element: float, step: Callable[[], object]) -> None:
        """Measure the device time of a graph of ``step``, and its host time."""
        if not self.selects(name):
            return
        if self.rehearse:
            step()
            print(f"{name:44} {bytes_per_element:5g} B  ran", flush=True)
            return

        # The first step initializes the state.
        step()
        torch.cuda.synchronize()
        host_seconds = []
        for _ in range(5):
            start = time.perf_counter()
            step()
            host_seconds.append(time.perf_counter() - start)
            torch.cuda.synchronize()

        step_us = time_us([step], 9)
        nbytes = self.numel * bytes_per_element
        if bytes_per_element not in self.copies_us:
            self.copies_us[bytes_per_element] = copy_us(round(nbytes), 1)
        row = {
            "name": name,
            "bytes": bytes_per_element,
            "us": step_us,
            "GB/s": nbytes / step_us / 1e3,
            "fraction": self.copies_us[bytes_per_element] / step_us,
            "host_ms": statistics.median(host_seconds) * 1e3,
        }
        self.results.append(row)
        print(
            f"{name:44} {bytes_per_element:5g} B {step_us:9.1f} us {row['GB/s']:6.0f} GB/s"
            f"  fraction {row['fraction']:.2f}  host {row['host_ms']:.2f} ms",
            flush=True,
        )

    def ours(self, name: str, masters: bool, state: torch.dtype | str = torch.float32) -> None:
        """Measure a step of fp8rs.optim.AdamW."""
        row_name = f"fp8rs AdamW: {name}, {'masters' if masters else 'stochastic'}"
        if state == torch.bfloat16:
            row_name += ", bf16 moments"
        elif state == "fp8":
            row_name += ", FP8 moments"
        # The parameters take long to create.
        if not self.selects(row_name):
            return

        new_quantizer = quantizers(self.device)[name]
        params = []
        for x, grad in zip(self.tensors(), self.tensors(torch.bfloat16), strict=True):
            quantizer = new_quantizer()
            param = torch.nn.Parameter(quantizer(x))
            param.grad_dtype = torch.bfloat16
            param.grad = grad
            params.append(param)
        optimizer = AdamW(
            params,
            capturable=True,
            master_weights=masters,
            state_dtype=state,
            state_filter=lambda param: True,
        )
        if state == "fp8":
            optimizer.step()
            for param in params:
                assert "exp_avg_codes" in optimizer.state[param], "float32 moments"
        self.measure(row_name, bytes_moved(name, masters, state), optimizer.step)

    def plain(self, state: torch.dtype | str = torch.float32) -> None:
        """Measure fp8rs.optim.AdamW with plain fp32 parameters and fp32 gradients."""
        params = [torch.nn.Parameter(x) for x in self.tensors()]
        for param, grad in zip(params, self.tensors(), strict=True):
            param.grad = grad
        optimizer = AdamW(
            params, capturable=True, state_dtype=state, state_filter=lambda param: True
        )
        row_name = "fp8rs AdamW: plain fp32"
        if state == "fp8":
            row_name += ", FP8 moments"
        # The gradient, and the parameter twice.
        self.measure(row_name, 3 * 4 + 2 * MOMENT_BYTES[state], optimizer.step)

    def theirs(self) -> None:
        """Measure torch's fused AdamW on fp32 masters, followed by quantization."""
        masters = [torch.nn.Parameter(x) for x in self.tensors()]
        bf16_grads = self.tensors(torch.bfloat16)
        fp32_grads = []
        for master in masters:
            grad = torch.empty_like(master)
            master.grad = grad
            fp32_grads.append(grad)
        optimizer = torch.optim.AdamW(masters, fused=True, capturable=not self.rehearse)

        plain = [master.detach() for master in masters]
        codes = [torch.empty(shape, dtype=E4M3, device=self.device) for shape in self.shapes]
        scales = torch.full((len(plain),), 1e-3, device=self.device)
        amaxes = torch.zeros_like(scales)

        def fused() -> None:
            # It requires gradients of the masters' dtype.
            torch._foreach_copy_(fp32_grads, bf16_grads)
            optimizer.step()

        def then_delayed() -> None:
            fused()
            ops.multi_quantize_delayed(plain, scales, amaxes, codes)

        def then_current() -> None:
            fused()
            current_amaxes = ops.multi_amax(plain)
            current_scales = ops.scale_from_amax(current_amaxes, E4M3)
            ops.multi_quantize(plain, current_scales, codes)

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
    print(f"{len(rows.shapes)} tensors, {rows.numel / 1e6:.1f} M parameters", flush=True)

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
