"""Check a change of the CUDA backend on a GPU, in one call of some minutes. Installs nothing.

    python benches/device_check.py FOLDER [--only first_use,times,...]

Each part writes its output to FOLDER/PART.txt. FOLDER/results.json and FOLDER/summary.txt have all
results. The parts are:

first_use   seconds of a format's first call minus its second, in separate processes, with machine
            code and with CUDA_FORCE_PTX_JIT=1, without the driver's cache
times       kernels compared with a copy of as many bytes (cuda_blocks.py, cuda_kernels.py), with
            machine code and with PTX
bytes       equal bytes on CPU and CUDA at full size, for quantization, fused operators, the
            optimizer and random numbers, with machine code and with PTX
tests       GPU tests of launches and blocks, then tests that need the GPU's memory
sanitizer   memcheck, racecheck and initcheck on small calls of each kernel

``--rehearse`` runs on the CPU without timing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fp8rs
from fp8rs.optim import AdamW
from fp8rs.quantize.formats import ROW
from fp8rs.tensor.quantizer import Quantizer

ROOT = Path(__file__).resolve().parent.parent
E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
E8M0 = torch.float8_e8m0fnu
F32 = torch.float32
BF16 = torch.bfloat16
F16 = torch.float16
SIZES = ((8192, 8192), (4096, 14336))
#: Parts of the names of the kernels to time.
TIMED = ("rebase", "per row", "MX both", "MX rowwise", "128x128 both", "current", "cast", "amax")

ops = torch.ops.fp8rs
Call = Callable[[], Any]


def formats(rows: int, cols: int, dtype: torch.dtype, device: str) -> dict[str, Call]:
    """Return a call of each operation and format, by name.

    The inputs are random numbers of the CPU's generator, so they depend on its state only. A call
    returns all tensors that it writes.
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape).to(device).to(dtype)

    def integers(least: int, bound: int, *shape: int) -> Tensor:
        return torch.randint(least, bound, shape, dtype=torch.uint8).to(device)

    x = normal(rows, cols)
    scale = torch.ones((), device=device)
    amax = torch.zeros((), device=device)
    up_scale = torch.ones((), device=device)
    up_amax = torch.zeros((), device=device)

    # Codes without NaN, and their scales: one for each 32x32 or 1x32 block.
    codes = integers(0, 127, rows, cols).view(E4M3)
    row_blocks = -(-rows // 32)
    column_blocks = -(-cols // 32)
    scales_32x32 = integers(110, 130, row_blocks, column_blocks).view(E8M0)
    scales_1x32 = integers(110, 130, rows, column_blocks).view(E8M0)

    # A list of two tensors.
    halves = [x[: rows // 2].clone(), x[rows // 2 :].clone()]
    half_codes = [torch.empty(half.shape, dtype=E4M3, device=device) for half in halves]
    half_scales = torch.ones(2, device=device)
    half_amaxes = torch.zeros(2, device=device)

    column_scale = torch.rand(cols).to(device)
    gate = normal(rows, cols)
    dy = normal(rows, cols)
    norm_weight = normal(cols)
    norm_bias = normal(cols)

    # Each token has two of six experts, and the sixth one is on another rank. The CPU sorts them,
    # because devices order equal elements differently.
    experts = 5
    sorted_experts, sorted_pairs = torch.randint(experts + 1, (2 * rows,)).sort()
    row_experts = sorted_experts.to(device)
    row_pairs = sorted_pairs.to(device)
    ends, padded_ends, row_tokens, _ = ops.route_rows(row_experts, row_pairs, experts, 2)
    gated = normal(2 * rows, 64)

    # Halves of heads of whole vectors, and of two elements.
    angles_of_32 = torch.rand(2, rows, 32).to(device)
    angles_of_4 = torch.rand(2, rows, 4).to(device)

    def delayed(columnwise: bool) -> Call:
        return lambda: (ops.quantize_delayed(x, scale, amax, E4M3, True, columnwise), amax)

    def quantize_list() -> list[Tensor]:
        ops.multi_quantize(halves, half_scales, half_codes)
        return half_codes

    def quantize_list_delayed() -> list[Tensor]:
        ops.multi_quantize_delayed(halves, half_scales, half_amaxes, half_codes)
        return [*half_codes, half_amaxes]

    def norm(centered: bool, rowwise: bool, columnwise: bool) -> Call:
        bias = norm_bias if centered else None
        return lambda: ops._quantize_norm(
            x, norm_weight, bias, centered, 1e-5, E4M3, rowwise, columnwise
        )

    def blocks(
        block: tuple[int, int],
        scale_dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        **options: object,
    ) -> Call:
        return lambda: ops.quantize_blocks(
            x, E4M3, block, scale_dtype, rowwise, columnwise, **options
        )

    return {
        "amax": lambda: ops.amax(x),
        "cast": lambda: ops.quantize(x, scale, E4M3, True, False),
        "cast + transpose": lambda: ops.quantize(x, scale, E4M3, True, True),
        "current": lambda: ops.quantize_current(x, E4M3, True, False),
        "current + transpose": lambda: ops.quantize_current(x, E4M3, True, True),
        "delayed": delayed(False),
        "delayed + transpose": delayed(True),
        "list": quantize_list,
        "list, delayed": quantize_list_delayed,
        "MX": blocks((1, 32), E8M0, True, False),
        "MX both": blocks((1, 32), E8M0, True, True),
        "MX both, packed": blocks((1, 32), E8M0, True, True, packed=True),
        "MX 32x32 both": blocks((32, 32), E8M0, True, True),
        "1x128 both": blocks((1, 128), F32, True, True),
        "128x128 both": blocks((128, 128), F32, True, True),
        "per row": blocks((1, -1), F32, True, False),
        "per row, column scale": blocks((1, -1), F32, True, False, column_scale=column_scale),
        "per row both": blocks((1, -1), F32, True, True),
        "per row both, column scale": blocks((1, -1), F32, True, True, column_scale=column_scale),
        # As engines that serve models quantize.
        "per row, divided": blocks((1, -1), F32, True, False, amax_epsilon=1 / 512, divide=True),
        "RMSNorm": norm(False, True, False),
        "RMSNorm + transpose": norm(False, True, True),
        "LayerNorm + transpose": norm(True, True, True),
        "SwiGLU + transpose": lambda: ops._quantize_glu(x, gate, "silu", E4M3, True, True),
        "GeGLU's gradients": lambda: ops._quantize_glu_backward(x, gate, dy, "gelu_tanh", E4M3),
        "SwiGLU, delayed": lambda: ops._quantize_glu(
            x, gate, "silu", E4M3, True, True, scale=scale, amax=amax
        ),
        "SwiGLU's gradients, delayed": lambda: ops._quantize_glu_backward(
            x,
            gate,
            dy,
            "silu",
            E4M3,
            gate_scale=scale,
            gate_amax=amax,
            up_scale=up_scale,
            up_amax=up_amax,
        ),
        "rotation": lambda: ops._rotate(gated, *angles_of_32, False),
        "rotation back": lambda: ops._rotate(gated, *angles_of_4, True),
        "routes of rows": lambda: ops.route_rows(row_experts, row_pairs, experts, 2),
        "groups of tokens": lambda: ops.quantize_groups(
            x, ends, padded_ends, E4M3, index=row_tokens
        ),
        "groups of SwiGLU": lambda: ops.quantize_gated(gated, ends, padded_ends, "silu", E4M3),
        "rebase 32x32, rows": lambda: ops.rebase(codes, scales_32x32, (32, 32), 0),
        "rebase 32x32, columns": lambda: ops.rebase(codes, scales_32x32, (32, 32), 1),
        "rebase 1x32, columns": lambda: ops.rebase(codes, scales_1x32, (1, 32), 1),
        "transpose": lambda: ops.transpose(codes),
        "dequantize": lambda: ops.dequantize(codes, scale, [-1, -1], BF16),
    }


def wait(device: str) -> None:
    """Wait for the device to finish its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def first_use_seconds(name: str, force_ptx: bool, device: str) -> float:
    """Return the seconds of a first call minus the second, in a process without a CUDA context."""
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    call = formats(512, 1024, BF16, device)[name]

    # Allocate memory for the outputs, so that the first call does not.
    output_memory = [torch.empty(1 << 20, dtype=torch.uint8, device=device) for _ in range(8)]
    del output_memory
    wait(device)

    # Set this after torch has loaded its kernels, because it disables their machine code too.
    os.environ["CUDA_FORCE_PTX_JIT"] = str(int(force_ptx))
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        call()
        wait(device)
        seconds.append(time.perf_counter() - start)
    return seconds[0] - seconds[1]


def first_use_in_child(name: str, force_ptx: bool, device: str) -> float | None:
    """Return `first_use_seconds` of a forked process, or None if it failed.

    Forking imports torch once. CUDA must not be initialized in this process.
    """
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        exit_code = 1
        try:
            seconds = first_use_seconds(name, force_ptx, device)
            os.write(write_end, str(seconds).encode())
            exit_code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(exit_code)

    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    return float(text) if text else None


def first_use(device: str) -> dict[str, dict[str, float | None]]:
    """Measure the first use of each operation, in seconds, with machine code and with PTX."""
    result = {}
    for name in formats(64, 64, BF16, "cpu"):
        seconds_by_mode = {
            "machine code": first_use_in_child(name, False, device),
            "PTX": first_use_in_child(name, True, device),
        }
        result[name] = seconds_by_mode

        cells = {}
        for mode, seconds in seconds_by_mode.items():
            cells[mode] = "failed" if seconds is None else f"{seconds:.4f} s"
        print(f"{name:26} {cells}", flush=True)

    for mode, target in (("machine code", 0.1), ("PTX", 0.4)):
        measured = []
        for seconds_by_mode in result.values():
            seconds = seconds_by_mode[mode]
            if seconds is not None:
                measured.append(seconds)
        print(f"largest, {mode}: {max(measured, default=None)} s, target: {target}")
    return result


def times(device: str) -> dict[str, Any]:
    """Time the kernels named in `TIMED`, in microseconds. On the CPU, measure nothing."""
    if device != "cuda":
        return {}
    import cuda_blocks
    import cuda_kernels

    result: dict[str, Any] = {}
    for rows, cols in SIZES:
        xs = [torch.randn(rows, cols, dtype=BF16, device="cuda") for _ in range(6)]
        kernels = cuda_kernels.kernels(xs) | cuda_blocks.kernels(xs)
        #: Copies by bytes per element.
        copies_us: dict[float, float] = {}
        times_of_size: dict[str, dict[str, float]] = {}
        for name, kernel in kernels.items():
            if not any(name_part in name for name_part in TIMED):
                continue

            nbytes = round(kernel.bytes_per_element, 2)
            if nbytes not in copies_us:
                copies_us[nbytes] = cuda_kernels.copy_us(rows * cols * nbytes, len(xs))
            kernel_us = cuda_kernels.time_us(kernel.calls)
            fraction = copies_us[nbytes] / kernel_us
            times_of_size[name] = {"us": round(kernel_us, 1), "of copy": round(fraction, 3)}
            print(f"{rows}x{cols} {name:28} {kernel_us:8.1f} us  {fraction:.2f}", flush=True)
        result[f"{rows}x{cols}"] = times_of_size

        # Free the inputs of all calls before those of the next size are allocated.
        del xs, kernels, kernel
    return result


def same_bytes(a: Any, b: Any) -> bool:
    """Return whether tensors, or sequences of them, have equal layouts and bytes."""
    if not isinstance(a, torch.Tensor):
        return len(a) == len(b) and all(map(same_bytes, a, b))
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if a.numel() == 0:
        return True
    bytes_a = a.cpu().contiguous().view(-1).view(torch.uint8)
    bytes_b = b.cpu().contiguous().view(-1).view(torch.uint8)
    return torch.equal(bytes_a, bytes_b)


def bytes_agree(device: str) -> dict[str, Any]:
    """Compare the bytes of operations and the optimizer on the CPU and the device."""
    shapes: list[tuple[int, int]]
    if device == "cuda":
        shapes = [(2048, 3072), (4096, 14336), (8192, 8192)]
    else:
        shapes = [(200, 300)]

    is_same: dict[str, bool] = {}
    for rows, cols in shapes:
        # The CPU takes long for large shapes.
        dtypes = [BF16] if rows > 2048 else [F32, BF16, F16]
        for dtype in dtypes:
            is_same |= special_values_agree(rows, cols, dtype, device)

            # Equal seeds create equal inputs.
            torch.manual_seed(0)
            cpu_calls = formats(rows, cols, dtype, "cpu")
            torch.manual_seed(0)
            device_calls = formats(rows, cols, dtype, device)
            for name, device_call in device_calls.items():
                cpu_call = cpu_calls[name]
                is_same[f"{name} {rows}x{cols} {dtype}"] = same_bytes(cpu_call(), device_call())

    for name, (cpu_result, device_result) in optimized(device).items():
        is_same[name] = same_bytes(cpu_result, device_result)

    different = [name for name, same in is_same.items() if not same]
    print(f"{len(is_same)} comparisons, {len(different)} differ", *different, sep="\n")
    return {"comparisons": len(is_same), "differ": different}


def special_values_agree(rows: int, cols: int, dtype: torch.dtype, device: str) -> dict[str, bool]:
    """Compare casts of zeros, infinities, NaN and large values on the CPU and the device."""
    x = torch.randn(rows, cols).to(dtype)
    x[::7] *= 50
    x[3, 5] = float("nan")
    x[rows - 1, 4] = float("inf")
    x[:, 7] = 0
    codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
    codes[:, ::5] = 0
    # With NaN, all codes of current scaling are NaN.
    finite_x = x.nan_to_num(1.0, 2.0, 3.0)
    column_scale = torch.rand(cols)

    device_x = x.to(device)
    device_finite_x = finite_x.to(device)
    device_column_scale = column_scale.to(device)

    is_same: dict[str, bool] = {}
    for fp8 in (E4M3, E5M2):
        case = f"{rows}x{cols} {dtype} {fp8}"
        by_rows_and_columns = (fp8, (1, -1), F32, True, True)
        is_same[f"per row both {case} []"] = same_bytes(
            ops.quantize_blocks(x, *by_rows_and_columns),
            ops.quantize_blocks(device_x, *by_rows_and_columns),
        )
        is_same[f"per row both {case} ['column_scale']"] = same_bytes(
            ops.quantize_blocks(x, *by_rows_and_columns, column_scale=column_scale),
            ops.quantize_blocks(device_x, *by_rows_and_columns, column_scale=device_column_scale),
        )
        is_same[f"per row both {case} ['power_2_scale']"] = same_bytes(
            ops.quantize_blocks(x, *by_rows_and_columns, power_2_scale=True),
            ops.quantize_blocks(device_x, *by_rows_and_columns, power_2_scale=True),
        )

        for block_rows in (1, 32):
            grid = (-(-rows // block_rows), -(-cols // 32))
            scales = torch.randint(90, 140, grid, dtype=torch.uint8)
            # NaN in E8M0.
            scales[:, 1] = 255
            scales[0, 2] = 255
            cpu_plane = (codes.view(fp8), scales.view(E8M0))
            device_plane = (codes.to(device).view(fp8), scales.to(device).view(E8M0))
            for axis in (0, 1):
                is_same[f"rebase {case} {block_rows} axis {axis}"] = same_bytes(
                    ops.rebase(*cpu_plane, (block_rows, 32), axis),
                    ops.rebase(*device_plane, (block_rows, 32), axis),
                )

        for columnwise in (False, True):
            is_same[f"current {case} both: {columnwise}"] = same_bytes(
                ops.quantize_current(finite_x, fp8, True, columnwise),
                ops.quantize_current(device_finite_x, fp8, True, columnwise),
            )
    return is_same


def quantizers() -> dict[str, Quantizer]:
    """Return quantizers of the formats that the optimizer has kernels for."""
    return {
        "current": fp8rs.Quantizer("current", columnwise=False),
        "rows": fp8rs.Quantizer(fp8rs.QuantSpec(ROW, E5M2), columnwise=False),
        "128x128": fp8rs.Quantizer("block", columnwise=False),
        "32x32": fp8rs.Quantizer("mxfp8", columnwise=False),
    }


def optimized(device: str) -> dict[str, tuple[Any, Any]]:
    """Return random numbers, and weights and moments after two steps, on the CPU and the device."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for dtype in (F32, BF16, F16):
        cpu_numbers = torch.empty(301, 1003, dtype=dtype)
        device_numbers = torch.empty(301, 1003, dtype=dtype, device=device)
        ops.random_uniform_(cpu_numbers, 1, 3)
        ops.random_uniform_(device_numbers, 1, 3)
        pairs[f"random {dtype}"] = (cpu_numbers, device_numbers)

    any_shapes = ((300, 1024), (67, 75), (5, 14336), (2, 16388))
    # 8-bit moments need rows of blocks of 128 elements.
    fp8_shapes = ((300, 1024), (33, 128), (5, 14336), (2, 16384))
    for name, quantizer in quantizers().items():
        for state_dtype in (F32, BF16, "fp8"):
            shapes = fp8_shapes if state_dtype == "fp8" else any_shapes
            for masters in (True, False):
                for shape in shapes:
                    weight = quantizer(torch.randn(shape))
                    key = f"AdamW {name} {state_dtype} {masters} {shape}"
                    pairs[key] = stepped(weight, device, state_dtype, masters)

    for dtype in (F32, BF16, F16):
        for shape in fp8_shapes:
            plain = torch.randn(shape).to(dtype)
            pairs[f"AdamW {dtype} fp8 {shape}"] = stepped(plain, device, "fp8", True)
    return pairs


def stepped(
    weight: Tensor, device: str, state_dtype: torch.dtype | str, masters: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return a weight and its state after two steps, on the CPU and the device."""
    grads = torch.randn(2, *weight.shape)
    cpu_tensors = stepped_on("cpu", weight, grads, state_dtype, masters)
    device_tensors = stepped_on(device, weight, grads, state_dtype, masters)
    return cpu_tensors, device_tensors


def stepped_on(
    device: str, weight: Tensor, grads: Tensor, state_dtype: torch.dtype | str, masters: bool
) -> list[Tensor]:
    """Return a weight and its state after a step with each gradient."""
    param = torch.nn.Parameter(weight.clone().to(device))
    optimizer = AdamW(
        [param],
        master_weights=masters,
        state_dtype=state_dtype,
        state_filter=lambda param: True,
    )
    for grad in grads:
        param.grad = grad.to(device, param.dtype)
        optimizer.step()

    tensors: list[Tensor] = [param]
    if isinstance(param, fp8rs.QuantizedTensor):
        tensors = [param.rowwise.data, param.rowwise.scale]
    state = optimizer.state[param]
    for key in sorted(state):
        tensors.append(state[key])
    return tensors


def drive(device: str) -> None:
    """Run each kernel on small tensors, with whole and partial tiles, for the sanitizer."""
    for dtype in (F32, BF16, F16):
        for shape in ((128, 256), (131, 272), (67, 75)):
            for call in formats(*shape, dtype, device).values():
                call()

    # More tiles than the blocks of one launch can hold.
    cols = 4352 if device == "cuda" else 32
    x = torch.randn(4352, cols, device=device).to(BF16)
    for columnwise in (False, True):
        ops.quantize_current(x, E4M3, True, columnwise)

    optimize(device)

    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        call = formats(131, 272, BF16, device)["delayed"]
        with torch.cuda.graph(graph):
            call()
        graph.replay()
    wait(device)
    print("driven")


def optimize(device: str) -> None:
    """Run each kernel of the optimizer, and random numbers."""
    for masters in (True, False):
        for state_dtype in (F32, BF16, "fp8"):
            params = []
            for quantizer in quantizers().values():
                for shape in ((130, 256), (67, 75), (2, 8192), (2, 16388)):
                    weight = quantizer(torch.randn(shape, device=device))
                    params.append(torch.nn.Parameter(weight))
            plain = torch.randn(9, 67, device=device)
            for dtype in (F32, BF16, F16):
                params.append(torch.nn.Parameter(plain.to(dtype)))

            for param in params:
                param.grad = torch.randn(param.shape, device=device, dtype=param.dtype)
            AdamW(params, master_weights=masters, state_dtype=state_dtype).step()

    for dtype in (F32, BF16, F16):
        ops.random_uniform_(torch.empty(67, 75, dtype=dtype, device=device), 1, 3)


def run(command: list[str], seconds: float, **environment: str) -> tuple[int, str]:
    """Run a command for at most ``seconds``. Return its exit status and its output."""
    try:
        completed = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as timeout:
        # Python returns bytes, in spite of text=True.
        output = timeout.stdout or b""
        text = output.decode(errors="replace") if isinstance(output, bytes) else output
        return 124, f"{text}\nstopped after {seconds} s"
    return completed.returncode, completed.stdout


def tests(device: str) -> dict[str, Any]:
    """Run the tests of CUDA kernels, and return each exit status and last line of output."""
    # pytest on a GPU machine may lack plugins that the project's settings require.
    pytest = [sys.executable, "-m", "pytest", "-q", "-o", "addopts="]
    pytest += ["-o", "filterwarnings=default", "-p", "no:cacheprovider", "--tb=short"]
    pytest += ["tests/ops/test_cuda_launches.py", "tests/ops/test_blocks_cuda.py"]

    # These allocate most of the GPU's memory.
    large_tests = "than_32_bits_count or workspaces_back"
    workers = ["-n", "6"] if importlib.util.find_spec("xdist") else []

    result = {}
    for name, selection, limit_seconds in (
        ("in parallel", [*workers, "-k", f"not ({large_tests})"], 130),
        ("one at a time, for memory", ["-k", large_tests, "--durations=5"], 70),
    ):
        start = time.perf_counter()
        exit_code, output = run([*pytest, *selection], limit_seconds)
        seconds = time.perf_counter() - start
        print(f"== {name}: exit {exit_code}, {seconds:.0f} s\n{output}", flush=True)
        result[name] = {"exit": exit_code, "last": output.strip().splitlines()[-1:]}
    return result


def sanitizer(device: str) -> dict[str, Any]:
    """Run `drive` under the tools of compute-sanitizer, and return their summaries."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        print("compute-sanitizer is not installed")
        return {"missing": True}

    # The checks run side by side.
    script = [sys.executable, str(Path(__file__).resolve()), "-", "--drive"]
    processes = {}
    for check in ("memcheck", "racecheck", "initcheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", *script]
        processes[check] = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    result = {}
    deadline = time.monotonic() + 110
    for check, process in processes.items():
        try:
            remaining_seconds = max(1.0, deadline - time.monotonic())
            output, _ = process.communicate(timeout=remaining_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += "\nstopped: out of time"
        print(f"== {check}: exit {process.returncode}\n{output[-4000:]}", flush=True)
        summary = [line for line in output.splitlines() if "SUMMARY" in line]
        result[check] = {"exit": process.returncode, "summary": summary}
    return result


PARTS: dict[str, Callable[[str], Any]] = {
    "first_use": first_use,
    "times": times,
    "times_ptx": times,
    "bytes": bytes_agree,
    "bytes_ptx": bytes_agree,
    "tests": tests,
    "sanitizer": sanitizer,
}


def main() -> None:
    """Run the chosen parts, each in a process of its own, and write their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="comma-separated parts")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = "cpu" if arguments.rehearse else "cuda"
    if arguments.drive:
        drive(device)
        return

    folder = arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        run_part(arguments.part, device, folder)
        return

    # Run each part in a separate process, so that a failure does not affect the others.
    results: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    summary = []
    parts = arguments.only.split(",") if arguments.only else list(PARTS)
    for part in parts:
        command = [sys.executable, str(Path(__file__).resolve()), str(folder), "--part", part]
        if arguments.rehearse:
            command.append("--rehearse")
        start = time.perf_counter()
        exit_code, output = run(command, 210)
        seconds = time.perf_counter() - start

        (folder / f"{part}.txt").write_text(output)
        part_result = folder / f"{part}.json"
        results[part] = json.loads(part_result.read_text()) if part_result.exists() else None
        part_summary = f"#### {part}: exit {exit_code}, {seconds:.0f} s\n{output[-6000:]}"
        summary.append(part_summary)
        print(part_summary, flush=True)
        (folder / "results.json").write_text(json.dumps(results, indent=1))
        (folder / "summary.txt").write_text("\n".join(summary))


def run_part(part: str, device: str, folder: Path) -> None:
    """Run a part in this process, and write its result."""
    if part.endswith("_ptx"):
        torch.zeros(1, device=device)  # loads torch's kernels as machine code
        os.environ["CUDA_FORCE_PTX_JIT"] = "1"
    result = PARTS[part](device)
    (folder / f"{part}.json").write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
