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

ROOT = Path(__file__).resolve().parent.parent
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
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
    scale, amax = torch.ones((), device=device), torch.zeros((), device=device)
    codes = integers(0, 127, rows, cols).view(E4M3)
    down, across = -(-rows // 32), -(-cols // 32)
    square = integers(110, 130, down, across).view(E8M0)
    lines = integers(110, 130, rows, across).view(E8M0)
    pair = [x[: rows // 2].clone(), x[rows // 2 :].clone()]
    outs = [torch.empty(p.shape, dtype=E4M3, device=device) for p in pair]
    scales, amaxes = torch.ones(2, device=device), torch.zeros(2, device=device)
    column_scale = torch.rand(cols).to(device)
    gate, dy = normal(rows, cols), normal(rows, cols)
    gain, bias = normal(cols), normal(cols)
    serving = {"amax_epsilon": 1 / 512, "divide": True}

    def delayed(columnwise: bool) -> Call:
        return lambda: (ops.quantize_delayed(x, scale, amax, E4M3, True, columnwise), amax)

    def quantize_list() -> list[Tensor]:
        ops.multi_quantize(pair, scales, outs)
        return outs

    def quantize_list_delayed() -> list[Tensor]:
        ops.multi_quantize_delayed(pair, scales, amaxes, outs)
        return [*outs, amaxes]

    def norm(centered: bool, *directions: bool) -> Call:
        shift = bias if centered else None
        return lambda: ops._quantize_norm(x, gain, shift, centered, 1e-5, E4M3, *directions)

    def blocks(block: tuple[int, int], kind: torch.dtype, *directions: bool, **more: Any) -> Call:
        return lambda: ops.quantize_blocks(x, E4M3, block, kind, *directions, **more)

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
        "per row, divided": blocks((1, -1), F32, True, False, **serving),
        "RMSNorm": norm(False, True, False),
        "RMSNorm + transpose": norm(False, True, True),
        "LayerNorm + transpose": norm(True, True, True),
        "SwiGLU + transpose": lambda: ops._quantize_glu(x, gate, "silu", E4M3, True, True),
        "GeGLU's gradients": lambda: ops._quantize_glu_backward(x, gate, dy, "gelu_tanh", E4M3),
        "rebase 32x32, rows": lambda: ops.rebase(codes, square, (32, 32), 0),
        "rebase 32x32, columns": lambda: ops.rebase(codes, square, (32, 32), 1),
        "rebase 1x32, columns": lambda: ops.rebase(codes, lines, (1, 32), 1),
        "transpose": lambda: ops.transpose(codes),
        "dequantize": lambda: ops.dequantize(codes, scale, [-1, -1], BF16),
    }


def wait(device: str) -> None:
    """Wait for the device to finish its work."""
    if device == "cuda":
        torch.cuda.synchronize()


def one_first_use(name: str, force_ptx: bool, device: str) -> float:
    """Return the seconds of a first call minus the second, in a process without a CUDA context."""
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    call = formats(512, 1024, BF16, device)[name]
    # Allocate memory for the outputs, so that the first call does not.
    held = [torch.empty(1 << 20, dtype=torch.uint8, device=device) for _ in range(8)]
    del held
    wait(device)
    # Set this after torch has loaded its kernels, because it disables their machine code too.
    os.environ["CUDA_FORCE_PTX_JIT"] = str(int(force_ptx))
    took = []
    for _ in range(2):
        begun = time.perf_counter()
        call()
        wait(device)
        took.append(time.perf_counter() - begun)
    return took[0] - took[1]


def first_use(device: str) -> dict[str, Any]:
    """Measure the first use of each operation, in seconds, with machine code and with PTX."""
    # Fork, so that torch is imported once. CUDA is not initialized yet.
    result: dict[str, Any] = {}
    for name in formats(64, 64, BF16, "cpu"):
        result[name] = {}
        for mode, force_ptx in (("machine code", False), ("PTX", True)):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    os.write(write, str(one_first_use(name, force_ptx, device)).encode())
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            os.close(write)
            with os.fdopen(read) as pipe:
                text = pipe.read()
            os.waitpid(child, 0)
            result[name][mode] = float(text) if text else None
        one = {mode: "failed" if s is None else f"{s:.4f} s" for mode, s in result[name].items()}
        print(f"{name:26} {one}", flush=True)
    for mode, most in (("machine code", 0.1), ("PTX", 0.4)):
        worst = max((r[mode] for r in result.values() if r[mode] is not None), default=None)
        print(f"largest, {mode}: {worst} s, target: {most}")
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
        copies: dict[float, float] = {}
        found = result[f"{rows}x{cols}"] = {}
        for name, (each, calls) in (cuda_kernels.kernels(xs) | cuda_blocks.kernels(xs)).items():
            if not any(part in name for part in TIMED):
                continue
            key = round(each, 2)
            if key not in copies:
                copies[key] = cuda_kernels.copy_us(rows * cols * key, len(xs))
            took = cuda_kernels.time_us(calls)
            found[name] = {"us": round(took, 1), "of copy": round(copies[key] / took, 3)}
            print(f"{rows}x{cols} {name:28} {took:8.1f} us  {copies[key] / took:.2f}", flush=True)
        del xs
    return result


def same_bytes(a: Any, b: Any) -> bool:
    """Return whether tensors, or sequences of them, have equal layouts and bytes."""
    if not isinstance(a, torch.Tensor):
        return len(a) == len(b) and all(map(same_bytes, a, b))
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    if a.numel() == 0:
        return True
    parts = [t.cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*parts)


def bytes_agree(device: str) -> dict[str, Any]:
    """Compare the bytes of operations and the optimizer on the CPU and the device."""
    compared: dict[str, bool] = {}
    shapes = ((2048, 3072), (4096, 14336), (8192, 8192)) if device == "cuda" else ((200, 300),)
    for rows, cols in shapes:
        for dtype in (BF16,) if rows > 2048 else (F32, BF16, F16):
            x = torch.randn(rows, cols).to(dtype)
            x[::7] *= 50
            x[3, 5], x[rows - 1, 4], x[:, 7] = float("nan"), float("inf"), 0
            codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
            codes[:, ::5] = 0
            there = x.to(device)
            finite = x.nan_to_num(1.0, 2.0, 3.0)  # otherwise all codes of current scaling are NaN
            finite_there = finite.to(device)
            column_scale = torch.rand(cols)
            for fp8 in (E4M3, E5M2):
                for options in ({}, {"column_scale": column_scale}, {"power_2_scale": True}):
                    moved = {
                        k: v.to(device) if isinstance(v, torch.Tensor) else v
                        for k, v in options.items()
                    }
                    arguments = (fp8, (1, -1), F32, True, True)
                    name = f"per row both {rows}x{cols} {dtype} {fp8} {list(options)}"
                    compared[name] = same_bytes(
                        ops.quantize_blocks(x, *arguments, **options),
                        ops.quantize_blocks(there, *arguments, **moved),
                    )
                for block_rows in (1, 32):
                    grid = (-(-rows // block_rows), -(-cols // 32))
                    scale = torch.randint(90, 140, grid, dtype=torch.uint8)
                    scale[:, 1], scale[0, 2] = 255, 255
                    plane = (codes.view(fp8), scale.view(E8M0))
                    for axis in (0, 1):
                        pair = [
                            ops.rebase(*(t.to(d) for t in plane), (block_rows, 32), axis)
                            for d in ("cpu", device)
                        ]
                        name = f"rebase {rows}x{cols} {dtype} {fp8} {block_rows} axis {axis}"
                        compared[name] = same_bytes(*pair)
                for columnwise in (False, True):
                    name = f"current {rows}x{cols} {dtype} {fp8} both: {columnwise}"
                    compared[name] = same_bytes(
                        *(
                            ops.quantize_current(t, fp8, True, columnwise)
                            for t in (finite, finite_there)
                        )
                    )
            torch.manual_seed(0)
            expected = formats(rows, cols, dtype, "cpu")
            torch.manual_seed(0)
            for name, call in formats(rows, cols, dtype, device).items():
                compared[f"{name} {rows}x{cols} {dtype}"] = same_bytes(expected[name](), call())
    for name, pair in optimized(device).items():
        compared[name] = same_bytes(*pair)
    wrong = [name for name, same in compared.items() if not same]
    print(f"{len(compared)} comparisons, {len(wrong)} differ", *wrong, sep="\n")
    return {"comparisons": len(compared), "differ": wrong}


def quantizers() -> dict[str, Any]:
    """Return quantizers of the formats that the optimizer has kernels for."""
    return {
        "current": fp8rs.Quantizer("current", columnwise=False),
        "rows": fp8rs.Quantizer(fp8rs.QuantSpec(ROW, E5M2), columnwise=False),
        "128x128": fp8rs.Quantizer("block", columnwise=False),
        "32x32": fp8rs.Quantizer("mxfp8", columnwise=False),
    }


def optimized(device: str) -> dict[str, tuple[Any, Any]]:
    """Return random numbers, and weights and moments after two steps, on the CPU and the device."""
    found: dict[str, tuple[Any, Any]] = {}
    for dtype in (F32, BF16, F16):
        pair = [torch.empty(301, 1003, dtype=dtype, device=d) for d in ("cpu", device)]
        for x in pair:
            ops.random_uniform_(x, 1, 3)
        found[f"random {dtype}"] = (pair[0], pair[1])
    shapes = ((300, 1024), (67, 75), (5, 14336), (2, 16388))
    # 8-bit moments need rows of blocks of 128 elements.
    shapes_of_codes = ((300, 1024), (33, 128), (5, 14336), (2, 16384))
    for name, quantizer in quantizers().items():
        for state_dtype in (F32, BF16, "fp8"):
            for masters in (True, False):
                for shape in shapes_of_codes if state_dtype == "fp8" else shapes:
                    weight = quantizer(torch.randn(shape))
                    key = f"AdamW {name} {state_dtype} {masters} {shape}"
                    found[key] = stepped(weight, device, state_dtype, masters)
    for dtype in (F32, BF16, F16):
        for shape in shapes_of_codes:
            key = f"AdamW {dtype} fp8 {shape}"
            found[key] = stepped(torch.randn(shape).to(dtype), device, "fp8", True)
    return found


def stepped(
    weight: Tensor, device: str, state_dtype: torch.dtype | str, masters: bool
) -> tuple[Any, Any]:
    """Return a weight and its state after two steps, on the CPU and the device."""
    grads = torch.randn(2, *weight.shape)
    ends = []
    for d in ("cpu", device):
        param = torch.nn.Parameter(weight.clone().to(d))
        optimizer = AdamW(
            [param],
            master_weights=masters,
            state_dtype=state_dtype,
            state_filter=lambda param: True,
        )
        for grad in grads:
            param.grad = grad.to(d, param.dtype)
            optimizer.step()

        planes = [param]
        if isinstance(param, fp8rs.QuantizedTensor):
            planes = [param.rowwise.data, param.rowwise.scale]
        state = sorted(optimizer.state[param].items())
        ends.append([*planes, *(value for _, value in state)])
    return ends[0], ends[1]


def drive(device: str) -> None:
    """Run each kernel on small tensors, with whole and partial tiles, for the sanitizer."""
    for dtype in (F32, BF16, F16):
        for shape in ((128, 256), (131, 272), (67, 75)):
            for call in formats(*shape, dtype, device).values():
                call()
    # More tiles than the blocks of one launch can hold.
    x = torch.randn(4352, 4352 if device == "cuda" else 32, device=device).to(BF16)
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
            params = [
                torch.nn.Parameter(quantizer(torch.randn(shape, device=device)))
                for quantizer in quantizers().values()
                for shape in ((130, 256), (67, 75), (2, 8192), (2, 16388))
            ]
            plain = torch.randn(9, 67, device=device)
            params += [torch.nn.Parameter(plain.to(dtype)) for dtype in (F32, BF16, F16)]
            for p in params:
                p.grad = torch.randn(p.shape, device=device, dtype=p.dtype)
            AdamW(params, master_weights=masters, state_dtype=state_dtype).step()
    for dtype in (F32, BF16, F16):
        ops.random_uniform_(torch.empty(67, 75, dtype=dtype, device=device), 1, 3)


def run(command: list[str], seconds: float, **environment: str) -> tuple[int, str]:
    """Run a command for at most ``seconds``. Return its exit status and its output."""
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as late:
        text = late.stdout or b""
        text = text.decode(errors="replace") if isinstance(text, bytes) else text
        return 124, text + f"\nstopped after {seconds} s"
    return done.returncode, done.stdout


def tests(device: str) -> dict[str, Any]:
    """Run the tests of CUDA kernels, and return each exit status and last line of output."""
    # pytest on a GPU machine may lack plugins that the project's settings require.
    base = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-o", "filterwarnings=default"]
    base += ["-p", "no:cacheprovider", "--tb=short"]
    files = ["tests/ops/test_cuda_launches.py", "tests/ops/test_blocks_cuda.py"]
    spread = ["-n", "6"] if importlib.util.find_spec("xdist") else []
    alone = "than_32_bits_count or workspaces_back"
    result = {}
    for name, more, seconds in (
        ("in parallel", [*spread, "-k", f"not ({alone})"], 130),
        ("one at a time, for memory", ["-k", alone, "--durations=5"], 70),
    ):
        begun = time.perf_counter()
        code, text = run([*base, *files, *more], seconds)
        print(f"== {name}: exit {code}, {time.perf_counter() - begun:.0f} s\n{text}", flush=True)
        result[name] = {"exit": code, "last": text.strip().splitlines()[-1:]}
    return result


def sanitizer(device: str) -> dict[str, Any]:
    """Run `drive` under the tools of compute-sanitizer, and return their summaries."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        print("compute-sanitizer is not installed")
        return {"missing": True}
    script = [sys.executable, str(Path(__file__).resolve()), "-", "--drive"]
    running = {}
    for check in ("memcheck", "racecheck", "initcheck"):
        command = [tool, "--tool", check, "--error-exitcode", "9", *script]
        running[check] = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    result = {}
    deadline = time.monotonic() + 110
    for check, process in running.items():
        try:
            text, _ = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            text = process.communicate()[0] + "\nstopped: out of time"
        print(f"== {check}: exit {process.returncode}\n{text[-4000:]}", flush=True)
        summary = [line for line in text.splitlines() if "SUMMARY" in line]
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
        if arguments.part.endswith("_ptx"):
            torch.zeros(1, device=device)  # loads torch's kernels as machine code
            os.environ["CUDA_FORCE_PTX_JIT"] = "1"
        result = PARTS[arguments.part](device)
        (folder / f"{arguments.part}.json").write_text(json.dumps(result, indent=1))
        return
    # Run each part in a separate process, so that a failure does not affect the others.
    results: dict[str, Any] = {"torch": torch.__version__, "python": sys.version.split()[0]}
    summary = []
    for part in arguments.only.split(",") if arguments.only else PARTS:
        begun = time.perf_counter()
        command = [sys.executable, str(Path(__file__).resolve()), str(folder), "--part", part]
        code, text = run(command + ["--rehearse"] * arguments.rehearse, 210)
        took = time.perf_counter() - begun
        (folder / f"{part}.txt").write_text(text)
        saved = folder / f"{part}.json"
        results[part] = json.loads(saved.read_text()) if saved.exists() else None
        summary.append(f"#### {part}: exit {code}, {took:.0f} s\n{text[-6000:]}")
        print(summary[-1], flush=True)
        (folder / "results.json").write_text(json.dumps(results, indent=1))
        (folder / "summary.txt").write_text("\n".join(summary))


if __name__ == "__main__":
    main()
