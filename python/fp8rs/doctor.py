"""``python -m fp8rs doctor``: what this machine can run, by which path, and the reason for each no.

Nothing here needs a GPU or libcuda: what is missing is a finding. Also where the command line's
``report`` has its models from.
"""

from __future__ import annotations

import ctypes
import importlib.util
import inspect
import itertools
import json
import os
import platform
import sys
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path as File
from types import ModuleType

import torch
from torch import nn

from fp8rs import _core
from fp8rs.gemm.devices import RECIPE_NAMES, Capability, gpu_path


@dataclass(frozen=True)
class Path:
    """How a recipe runs on a device: ``native``, ``rebased``, ``dequantized`` or ``no``."""

    recipe: str
    device: str
    path: str
    reason: str


@dataclass(frozen=True)
class Device:
    """A GPU as torch sees it."""

    name: str
    index: int
    capability: Capability
    memory: int


@dataclass(frozen=True)
class Findings:
    """Everything that the doctor reports."""

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
    no_symmetric_memory_because: str | None
    recipes: list[Path]


def examine() -> Findings:
    """Looks at this machine."""
    from fp8rs import __version__

    driver = _driver_cuda()
    devices = _devices()
    paths = [
        path
        for name in RECIPE_NAMES
        for path in (_on_cpu(name), *(_on_gpu(name, device) for device in devices))
    ]
    return Findings(
        fp8rs=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=_cores(),
        cpu_simd=_core.cpu_features(),
        driver_cuda=driver,
        torch_cuda=torch.version.cuda,
        no_gpu_because=None if devices else _why_no_gpu(driver),
        devices=devices,
        no_symmetric_memory_because=_why_no_symmetric_memory(devices),
        recipes=paths,
    )


def as_json(findings: Findings) -> str:
    """The findings as a JSON object."""
    return json.dumps(asdict(findings), indent=2)


def as_text(findings: Findings) -> str:
    """The findings for a person."""
    f = findings
    lines = [
        f"fp8rs {f.fp8rs}, torch {f.torch}, Python {f.python}, {f.system}",
        f"CPU: {f.cores} cores, kernels use {f.cpu_simd}",
        f"NVIDIA driver: {'none' if f.driver_cuda is None else f'CUDA {f.driver_cuda}'}; "
        f"torch built for {'no CUDA' if f.torch_cuda is None else f'CUDA {f.torch_cuda}'}",
    ]
    for d in f.devices:
        major, minor = d.capability
        lines.append(
            f"cuda:{d.index}: {d.name}, compute capability {major}.{minor}, "
            f"{d.memory / 2**30:.0f} GiB"
        )
    if f.no_gpu_because:
        lines.append(f"GPU: none ({f.no_gpu_because})")
    why = f.no_symmetric_memory_because
    lines.append(
        "fp8rs.comm.set_fsdp_comm: "
        + (f"no symmetric memory ({why}); reduce-scatters in bf16" if why else "symmetric memory")
        + ". Call fp8rs.report(model) after it for the choice for each module"
    )
    lines += ["", f"{'recipe':<10}{'device':<9}{'path':<13}why"]
    lines += [f"{p.recipe:<10}{p.device:<9}{p.path:<13}{p.reason}" for p in f.recipes]
    return "\n".join(lines)


def _on_cpu(recipe: str) -> Path:
    reason = "quantized as on a GPU, byte for byte; GEMMs on dequantized operands in fp32"
    return Path(recipe, "cpu", "dequantized", reason)


def _on_gpu(recipe: str, device: Device) -> Path:
    return Path(recipe, f"cuda:{device.index}", *gpu_path(recipe, device.capability))


def _devices() -> list[Device]:
    if not torch.cuda.is_available():
        return []
    devices = []
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        capability = (found.major, found.minor)
        devices.append(Device(found.name, index, capability, found.total_memory))
    return devices


def _driver_cuda() -> str | None:
    """The newest CUDA that the installed driver serves, or None where there is no driver."""
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


def _why_no_symmetric_memory(devices: list[Device]) -> str | None:
    """Return why ranks on all GPUs of this machine cannot share memory.

    ``set_fsdp_comm`` checks the ranks that exist.
    """
    if len(devices) < 2:
        return "one GPU" if devices else "no GPU"
    for one, other in itertools.permutations((device.index for device in devices), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"cuda:{one} has no peer access to cuda:{other}"
    return None


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- a model -------------------------------------------------------------------------------------


class ScriptError(Exception):
    """A model or a model's script that cannot be used, and why."""


#: The end of an error on what a script has.
WHAT_WORKS = "What works is a torch.nn.Module, or a function without arguments that returns one"


def load_model(model: str) -> nn.Module:
    """A model on the meta device: without memory for it.

    Args:
        model: ``FILE.py:name``, where ``name`` is an nn.Module or a function that returns one,
            and is called without arguments; "model" if it is not given. The file runs as a module,
            so what is under ``if __name__ == "__main__"`` does not. Or what transformers'
            ``AutoConfig.from_pretrained`` takes: a folder with a config.json, or a name.

    Raises:
        ScriptError: there is no such file or name, the name gives no nn.Module, the script raises
            an error, or transformers knows no such causal language model.
    """
    path, _, name = model.rpartition(":") if model.rpartition(":")[0] else (model, "", "")
    name = name or "model"
    file = File(path)
    if not file.is_file():
        if path == model and file.suffix != ".py":
            return _of_transformers(model)
        raise ScriptError(f"there is no file {path}")
    found = importlib.util.spec_from_file_location(file.stem, file)
    if found is None or found.loader is None:
        raise ScriptError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(found)
    sys.modules[file.stem] = module
    sys.path.insert(0, str(file.parent.resolve()))  # what a script imports from beside itself
    with torch.device("meta"):
        try:
            found.loader.exec_module(module)
        except (Exception, SystemExit) as error:
            raise ScriptError(
                f"{path}, run as a module on the meta device, raises {_shown(error, path)}. "
                'Put under if __name__ == "__main__" what the model does not need'
            ) from error
        made = getattr(module, name, None)
        if not isinstance(made, nn.Module):
            made = _made(made, path, name, module)
    if not isinstance(made, nn.Module):
        raise ScriptError(
            f"{path}:{name}: {name}() gives {type(made).__name__}, not a "
            f"torch.nn.Module. {WHAT_WORKS}"
        )
    return made


def _of_transformers(name: str) -> nn.Module:
    """A causal language model of transformers, by its name or its folder."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise ScriptError(
            f"there is no file {name}, and no transformers here that would know a model of this "
            "name: pip install transformers"
        ) from None
    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name))
    except (OSError, ValueError) as error:
        raise ScriptError(
            f"there is no file {name}, and of transformers' models: {_shown(error, name)}"
        ) from error
    return model


def _made(make: object, path: str, name: str, module: ModuleType) -> object:
    """What the function gives that a script has under ``name``."""
    if not callable(make):
        stem = module.__name__
        known = [
            n
            for n, v in vars(module).items()
            if getattr(v, "__module__", "") == stem or isinstance(v, nn.Module)
        ]
        raise ScriptError(
            f"{path} has no module {name!r}, and no function {name!r} that makes the model. Name "
            f"one of its own after a colon: {', '.join(known) or 'it has none'}"
        )
    try:
        inspect.signature(make).bind()
    except ValueError:  # it has no signature
        pass
    except TypeError as error:
        raise ScriptError(
            f"{path}:{name}: {name} needs arguments ({error}). {WHAT_WORKS}"
        ) from None
    try:
        return make()
    except (Exception, SystemExit) as error:
        raise ScriptError(
            f"{path}:{name}: {name}(), called on the meta device, raises {_shown(error, path)}. "
            f"{WHAT_WORKS}"
        ) from error


def _shown(error: BaseException, path: str) -> str:
    """An error in a line: its type, its first line, and the script's line that it came from."""
    text = next(iter(str(error).splitlines()), "")
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f.lineno for f in frames if File(f.filename).resolve() == File(path).resolve()]
    return f"{what} (line {lines[-1]})" if lines else what
