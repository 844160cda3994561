"""``python -m fp8rs doctor``: which recipes this machine supports, how they run, and why not.

A missing GPU or libcuda is reported and is not an error. This module also loads models for
``python -m fp8rs report``.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import sys
import traceback
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path as File
from types import ModuleType

import torch
from torch import nn

import fp8rs._core as _core
from fp8rs.gemm.devices import Capability, gpu_path
from fp8rs.quantize.recipes import RECIPES

#: How every recipe runs on the CPU.
ON_CPU = "quantized to the same bytes as on a GPU; GEMMs on dequantized operands in fp32"


@dataclass(frozen=True)
class Path:
    """How a recipe runs on a device: ``native``, ``rebased``, ``dequantized`` or ``no``."""

    recipe: str
    device: str
    path: str
    reason: str


@dataclass(frozen=True)
class Device:
    """A GPU, with torch's device index."""

    name: str
    index: int
    capability: Capability
    memory: int


@dataclass(frozen=True)
class Findings:
    """All findings of the doctor."""

    fp8rs: str
    torch: str
    python: str
    system: str
    cores: int
    cpu_simd: str
    driver_cuda: str | None
    torch_cuda: str | None
    no_gpu_because: str | None
    devices: list[Device]
    recipes: list[Path]


def examine() -> Findings:
    """Examine this machine."""
    driver = _driver_cuda()
    devices = _devices()
    paths = []
    for short_name, make_recipe in RECIPES.items():
        paths.append(Path(short_name, "cpu", "dequantized", ON_CPU))
        recipe_name = make_recipe().name
        for device in devices:
            path = gpu_path(recipe_name, device.capability)
            paths.append(Path(short_name, f"cuda:{device.index}", *path))
    return Findings(
        fp8rs=_core.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)),
        cpu_simd=_core.cpu_features(),
        driver_cuda=driver,
        torch_cuda=torch.version.cuda,
        no_gpu_because=None if devices else _why_no_gpu(driver),
        devices=devices,
        recipes=paths,
    )


def as_text(findings: Findings) -> str:
    """Return the findings as text."""
    driver = "none" if findings.driver_cuda is None else f"CUDA {findings.driver_cuda}"
    torch_build = "no CUDA" if findings.torch_cuda is None else f"CUDA {findings.torch_cuda}"
    lines = [
        f"fp8rs {findings.fp8rs}, torch {findings.torch}, Python {findings.python}, "
        f"{findings.system}",
        f"CPU: {findings.cores} cores, kernels use {findings.cpu_simd}",
        f"NVIDIA driver: {driver}; torch built for {torch_build}",
    ]
    for device in findings.devices:
        major, minor = device.capability
        gibibytes = device.memory / 2**30
        lines.append(
            f"cuda:{device.index}: {device.name}, compute capability {major}.{minor}, "
            f"{gibibytes:.0f} GiB"
        )
    if findings.no_gpu_because:
        lines.append(f"GPU: none ({findings.no_gpu_because})")

    lines.append("")
    lines.append(f"{'recipe':<20}{'device':<9}{'path':<13}why")
    for path in findings.recipes:
        lines.append(f"{path.recipe:<20}{path.device:<9}{path.path:<13}{path.reason}")
    return "\n".join(lines)


def _devices() -> list[Device]:
    if not torch.cuda.is_available():
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = (properties.major, properties.minor)
        devices.append(Device(properties.name, index, capability, properties.total_memory))
    return devices


def _driver_cuda() -> str | None:
    """Return the newest CUDA version that the driver supports, or None without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _why_no_gpu(driver: str | None) -> str:
    if driver is None:
        return "no NVIDIA driver: libcuda.so.1 was not found"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).splitlines()[0]
    return "the driver lists no device"


# --- a model -------------------------------------------------------------------------------------


def load_model(model: str) -> nn.Module:
    """Build a model on the meta device.

    Args:
        model: ``FILE.py:name``, where ``name`` is an nn.Module or a function that returns one
            without arguments. The default name is "model". The file runs as a module, so code under
            ``if __name__ == "__main__"`` does not run. Otherwise an argument of transformers'
            ``AutoConfig.from_pretrained``: a folder with a config.json, or a name.

    Raises:
        ValueError: the file or the name does not exist, the name is not a model, the script raises
            an error, or transformers has no such causal language model.
    """
    path, _, name = model.rpartition(":") if ":" in model else (model, "", "model")
    file = File(path)
    if not file.is_file():
        if path == model and file.suffix != ".py":
            return _from_transformers(model)
        raise ValueError(f"file {path} does not exist")
    try:
        with torch.device("meta"):
            built = getattr(_run(file), name)
            built = built if isinstance(built, nn.Module) else built()
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{path} has no model or function {name!r} that can be built on the meta device: "
            f"{_shown(error, path)}. Name a torch.nn.Module, or a function without arguments that "
            "returns one. Move code that the model does not need under "
            'if __name__ == "__main__"'
        ) from error
    if not isinstance(built, nn.Module):
        raise ValueError(
            f"{path}:{name}: {name}() returns {type(built).__name__}, not a torch.nn.Module"
        )
    return built


def _run(file: File) -> ModuleType:
    """Run a script as a module, which can import from the script's directory."""
    sys.path.insert(0, str(file.parent.resolve()))
    loader = SourceFileLoader(file.stem, str(file))
    spec = importlib.util.spec_from_loader(file.stem, loader)
    assert spec is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def _from_transformers(name: str) -> nn.Module:
    """Build a causal language model of transformers from its name or folder."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ValueError(
            f"file {name} does not exist. To load the transformers model of that name, install "
            "transformers: pip install transformers"
        ) from None
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"file {name} does not exist, and transformers raises {_shown(error, name)}"
        ) from error
    return model


def _shown(error: BaseException, path: str) -> str:
    """Return an error in one line: its type, its first line, and the line of the script."""
    text = next(iter(str(error).splitlines()), "")
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if File(f.filename).resolve() == File(path).resolve()]
    return f"{what} (line {lines[-1]})" if lines else what
