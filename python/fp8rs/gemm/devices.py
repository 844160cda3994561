"""Maps recipes to the GPUs that support them and to the GEMMs that they use there."""

from __future__ import annotations

import functools

import torch

from fp8rs._core import UnsupportedError

Capability = tuple[int, int]

#: The first GPUs with FP8 conversion instructions, which the quantization kernels use.
OLDEST_FOR_KERNELS: Capability = (8, 9)

_PER_TENSOR = [((8, 9), "native", "torch._scaled_mm with per-tensor scales")]

_NOT_HOPPER = "only Hopper's GEMMs take 1x128 scales; recipe mxfp8 runs here, or emulate=True"

#: Rows (least compute capability, path, reason) by recipe name, newest first. A GPU uses the first
#: row whose capability it reaches.
_GPU_PATHS: dict[str, list[tuple[Capability, str, str]]] = {
    "current": _PER_TENSOR,
    "delayed": _PER_TENSOR,
    "rowwise": [((8, 9), "native", "torch._scaled_mm with per-row scales")],
    "block": [
        ((10, 0), "no", _NOT_HOPPER),
        ((9, 0), "native", "torch._scaled_mm with 1x128 and 128x128 scales"),
        ((8, 9), "no", _NOT_HOPPER),
    ],
    "mxfp8": [
        ((10, 0), "native", "torch._scaled_mm with packed E8M0 scales; untested on hardware"),
        ((8, 9), "rebased", "power-of-two scales per row; weights and gathers are MXFP8"),
    ],
}


def gpu_path(recipe: str, capability: Capability) -> tuple[str, str]:
    """Return how a recipe runs on an NVIDIA GPU (``native``, ``rebased`` or ``no``), and why.

    Args:
        recipe: a recipe's ``name``.
        capability: the GPU's compute capability.
    """
    for least, path, why in _GPU_PATHS[recipe]:
        if capability >= least:
            return path, why
    oldest_major, oldest_minor = OLDEST_FOR_KERNELS
    major, minor = capability
    return "no", (
        f"FP8 conversion on CUDA needs compute capability {oldest_major}.{oldest_minor}, this is "
        f"{major}.{minor}; the recipe runs on the CPU"
    )


@functools.cache
def capability(index: int) -> Capability:
    """Return the compute capability of a GPU. Cached, because torch takes microseconds for it."""
    return torch.cuda.get_device_capability(index)


@functools.cache
def check_cuda(index: int, recipe: str) -> None:
    """Raise UnsupportedError with the reason if a GPU does not have a recipe's GEMMs."""
    if torch.version.hip is not None:
        raise UnsupportedError("FP8 kernels run on NVIDIA GPUs; on the CPU every recipe runs")
    path, why = gpu_path(recipe, capability(index))
    if path == "no":
        device = f"cuda:{index} ({torch.cuda.get_device_name(index)})"
        raise UnsupportedError(f"recipe {recipe!r} does not run on {device}: {why}")
