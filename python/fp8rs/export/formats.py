"""The table of serving formats: what each calls its tensors, and what config.json says of them.

Sources: ``fp8-block`` is DeepSeek-V3's convention, as transformers 5.23 (``FineGrainedFP8Config``)
and vLLM 0.33 read it; with powers of two, DeepSeek-V3.1's (``scale_fmt`` "ue8m0"; scales are stored
as float32 there too). ``fp8-row``, ``fp8-tensor`` and ``mxfp8`` are compressed-tensors 0.20's
schemes FP8_DYNAMIC, FP8_DYNAMIC with one scale a weight, and MXFP8.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fp8rs.tensor import formats
from fp8rs.tensor.formats import BlockFormat
from fp8rs.tensor.planes import Plane
from fp8rs.tensor.spec import QuantSpec

#: Names of layers that stay in high precision -> the config's ``quantization_config``.
Config = Callable[[Sequence[str]], dict[str, Any]]


@dataclass(frozen=True)
class ServingFormat:
    """How one layer's weight is stored.

    Attributes:
        name: what users call it.
        spec: how weights are quantized that training does not have in this format; None of a format
            whose weights stay in high precision.
        accepts: formats of planes that are stored as they are.
        scale_name: of the tensor of scales; it stands where "weight" does.
        scale: that tensor, of a rowwise plane.
        config: what stands under ``quantization_config``; None for nothing.
    """

    name: str
    spec: QuantSpec | None = None
    accepts: tuple[BlockFormat, ...] = ()
    scale_name: str = ""
    scale: Callable[[Plane], Tensor] = lambda plane: plane.scale
    config: Config | None = None

    def takes(self, spec: QuantSpec) -> bool:
        """Whether codes that are quantized so are stored as they are."""
        if self.spec is None or spec.fp8_dtype != self.spec.fp8_dtype:
            return False
        powers = spec.power_2_scale or spec.format.microscaled
        return spec.format in self.accepts and (powers or not self.spec.power_2_scale)


def _block_config(kept: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(kept),
    }


def _ue8m0_config(kept: Sequence[str]) -> dict[str, Any]:
    return {**_block_config(kept), "scale_fmt": "ue8m0"}


def _compressed(stored_as: str, weights: dict[str, Any], inputs: dict[str, Any]) -> Config:
    """The config of compressed-tensors: one group of all linear layers but those kept."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}

    def config(kept: Sequence[str]) -> dict[str, Any]:
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
            "ignore": list(kept),
        }

    return config


def _each_row(plane: Plane) -> Tensor:
    """The bytes of E8M0 scales, one for each 32 elements of each row."""
    scale = plane.scale.view(torch.uint8)
    height = plane.format.block[0]
    if height == 1:
        return scale
    return scale.repeat_interleave(height, 0)[: plane.matrix.shape[0]]


_MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}

#: Every format, by name.
FORMATS: dict[str, ServingFormat] = {
    f.name: f
    for f in (
        ServingFormat("bf16"),
        ServingFormat(
            "fp8-block",
            QuantSpec(formats.BLOCK_128X128, formats.E4M3),
            (formats.BLOCK_128X128,),
            "weight_scale_inv",
            config=_block_config,
        ),
        ServingFormat(
            "fp8-row",
            QuantSpec(formats.ROW, formats.E4M3),
            (formats.ROW,),
            "weight_scale",
            config=_compressed("float-quantized", {"strategy": "channel"}, {"strategy": "token"}),
        ),
        ServingFormat(
            "fp8-tensor",
            QuantSpec(formats.TENSOR, formats.E4M3),
            (formats.TENSOR,),
            "weight_scale",
            lambda plane: plane.scale.view(1),
            config=_compressed("float-quantized", {"strategy": "tensor"}, {"strategy": "token"}),
        ),
        ServingFormat(
            "mxfp8",
            QuantSpec(formats.MX_1X32, formats.E4M3),
            (formats.MX_1X32, formats.MX_32X32),
            "weight_scale",
            _each_row,
            _compressed("mxfp8-quantized", _MX, _MX),
        ),
    )
}


def serving_format(name: str, scale_fmt: str | None = None) -> ServingFormat:
    """The format of that name.

    Args:
        name: one of `FORMATS`.
        scale_fmt: "ue8m0" for powers of two as scales, of "fp8-block"; None for any.

    Raises:
        ValueError: there is none; the message has those that there are.
    """
    found = FORMATS.get(name)
    if found is None:
        known = ", ".join(map(repr, FORMATS))
        raise ValueError(f"format is {name!r}; it must be one of {known}")
    if scale_fmt is None:
        return found
    if scale_fmt != "ue8m0" or name != "fp8-block":
        raise ValueError(
            f"scale_fmt is {scale_fmt!r} with format {name!r}; it must be None, or 'ue8m0' with "
            "format 'fp8-block'"
        )
    assert found.spec is not None
    return replace(found, spec=replace(found.spec, power_2_scale=True), config=_ue8m0_config)
