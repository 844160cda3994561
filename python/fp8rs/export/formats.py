"""Serving formats: the tensors of each, and its entry in config.json.

``fp8-block`` is DeepSeek-V3's convention, as transformers 5.23 (``FineGrainedFP8Config``) and vLLM
0.33 read it. With power-of-two scales, it is DeepSeek-V3.1's (``scale_fmt`` "ue8m0", whose scales
are also stored as float32). ``fp8-row``, ``fp8-tensor`` and ``mxfp8`` are schemes of
compressed-tensors 0.20: FP8_DYNAMIC, FP8_DYNAMIC with one scale per weight, and MXFP8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8rs.quantize import formats
from fp8rs.quantize.formats import BlockFormat
from fp8rs.quantize.planes import Plane
from fp8rs.quantize.spec import QuantSpec

#: Returns ``quantization_config`` for the names of modules that are not quantized, and of those
#: with experts among them.
Config = Callable[[Sequence[str], Sequence[str]], dict[str, Any]]


@dataclass(frozen=True)
class ServingFormat:
    """How one layer's weight is stored.

    Attributes:
        name: the name that users pass.
        spec: how to quantize weights whose recipe has another format. None for formats in high
            precision.
        accepts: formats of planes that are stored unchanged.
        scale_name: name of the tensor of scales, which replaces "weight".
        scale: returns the tensor of scales of a rowwise plane.
        config: returns ``quantization_config``. None for formats in high precision.
    """

    name: str
    spec: QuantSpec | None = None
    accepts: tuple[BlockFormat, ...] = ()
    scale_name: str = ""
    scale: Callable[[Plane], Tensor] = lambda plane: plane.scale
    config: Config | None = None

    def takes(self, spec: QuantSpec) -> bool:
        """Return whether codes that were quantized by ``spec`` are stored unchanged."""
        if self.spec is None or spec.fp8_dtype != self.spec.fp8_dtype:
            return False
        if self.spec.power_2_scale and not (spec.power_2_scale or spec.format.microscaled):
            return False
        return spec.format in self.accepts


def _block_config(
    unquantized: Sequence[str], experts: Sequence[str], **options: str
) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(unquantized),
        **options,
    }


def _compressed(stored_as: str, weights: dict[str, Any], inputs: dict[str, Any]) -> Config:
    """Return a config of compressed-tensors, with one group for all quantized linear layers."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}

    def config(unquantized: Sequence[str], experts: Sequence[str]) -> dict[str, Any]:
        group = {
            "targets": ["Linear"],
            "weights": {**common, "dynamic": False, **weights},
            "input_activations": {**common, "dynamic": True, **inputs},
            "format": stored_as,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": stored_as,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            # Files and servers have a layer for each matrix of an expert.
            "ignore": [*unquantized, *(f"re:{re.escape(name)}[.].*" for name in experts)],
        }

    return config


def _each_row(plane: Plane) -> Tensor:
    """Return E8M0 scales as bytes, one per 32 elements of each row."""
    scale = plane.scale.view(torch.uint8)
    height = plane.format.block[0]
    if height == 1:
        return scale
    return scale.repeat_interleave(height, -2)[..., : plane.matrix.shape[-2], :]


def _each_matrix(plane: Plane) -> Tensor:
    """Return one scale for each matrix, which multiplies its codes."""
    return plane.scale.view(-1, 1, 1) if plane.batched else plane.scale.view(1)


_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}

#: All formats, by name.
FORMATS: dict[str, ServingFormat] = {
    f.name: f
    for f in (
        ServingFormat("bf16"),
        ServingFormat(
            "fp8-block",
            QuantSpec(formats.BLOCK_128X128, formats.E4M3, batched=True),
            (formats.BLOCK_128X128,),
            "weight_scale_inv",
            config=_block_config,
        ),
        ServingFormat(
            "fp8-row",
            QuantSpec(formats.ROW, formats.E4M3, batched=True),
            (formats.ROW,),
            "weight_scale",
            config=_compressed("float-quantized", {"strategy": "channel"}, {"strategy": "token"}),
        ),
        ServingFormat(
            "fp8-tensor",
            QuantSpec(formats.TENSOR, formats.E4M3, batched=True),
            (formats.TENSOR,),
            "weight_scale",
            _each_matrix,
            config=_compressed("float-quantized", {"strategy": "tensor"}, {"strategy": "token"}),
        ),
        ServingFormat(
            "mxfp8",
            QuantSpec(formats.MX_1X32, formats.E4M3, batched=True),
            (formats.MX_1X32, formats.MX_32X32),
            "weight_scale",
            _each_row,
            _compressed("mxfp8-quantized", _MX, _MX),
        ),
    )
}


def serving_format(name: str, scale_fmt: str | None = None) -> ServingFormat:
    """Return a format by name.

    Args:
        name: a name in `FORMATS`.
        scale_fmt: "ue8m0" for power-of-two scales with "fp8-block", else None.

    Raises:
        ValueError: an argument is not one of these. The message lists the names.
    """
    if name not in FORMATS:
        names = ", ".join(map(repr, FORMATS))
        raise ValueError(f"format is {name!r}; it must be one of {names}")
    serving = FORMATS[name]
    if scale_fmt is None:
        return serving
    if scale_fmt != "ue8m0" or name != "fp8-block":
        raise ValueError(
            f"scale_fmt is {scale_fmt!r} with format {name!r}; it must be None, or 'ue8m0' with "
            "format 'fp8-block'"
        )
    assert serving.spec is not None
    return replace(
        serving,
        spec=replace(serving.spec, power_2_scale=True),
        config=partial(_block_config, scale_fmt=scale_fmt),
    )
