"""Read safetensors directories: shapes, slices, and the scales of FP8 weights.

The shapes of a weight and its scales determine the block of one scale. If they are ambiguous,
``quantization_config`` in config.json determines it. `read_parts` reads a batched weight whose
matrices are separate tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8rs.quantize.formats import E4M3, E5M2

from .files import CONFIG, INDEX, SINGLE, import_safetensors
from .formats import FORMATS
from .names import Part

#: Rows and columns of one scale. -1 is the whole extent.
Block = tuple[int, int]

#: The start and the size along one dimension.
Span = tuple[int, int]

#: Element types of FP8 codes, by their safetensors names.
CODES = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}

#: High-precision types.
HIGH_PRECISION = frozenset(("F64", "F32", "F16", "BF16"))

#: Types of power-of-two scales. compressed-tensors stores E8M0 exponents as bytes.
E8M0 = frozenset(("F8_E8M0", "U8"))

_QUANTIZED = [f for f in FORMATS.values() if f.spec is not None]
#: Block shapes that are recognized without a config.
KNOWN_BLOCKS: list[Block] = sorted(f.spec.format.block for f in _QUANTIZED if f.spec is not None)

#: Suffixes that DeepSeek and compressed-tensors add to a weight's name for its scales.
SCALE_SUFFIXES = list(dict.fromkeys(f.scale_name.removeprefix("weight") for f in _QUANTIZED))

#: Suffixes of scales of activations and KV caches, which training does not use.
ACTIVATION_SCALES = (".input_scale", ".activation_scale", ".output_scale", ".k_scale", ".v_scale")

READABLE = (
    "fp8rs.export.load reads high precision, quant_method 'fp8' (DeepSeek: weight_scale_inv) and "
    "quant_method 'compressed-tensors' with 8-bit float weights (formats 'float-quantized', "
    "'naive-quantized' and 'mxfp8-quantized'). Convert the files to one of these, or load the "
    "high-precision checkpoint that they were made from"
)


@dataclass(frozen=True)
class Scales:
    """The scales of one FP8 weight.

    Attributes:
        name: name of the tensor of scales.
        dtype: its safetensors type.
        shape: its shape.
        block: rows and columns of each matrix that share a scale.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    block: Block

    @property
    def e8m0(self) -> bool:
        """Whether the scales have the type E8M0."""
        return self.dtype in E8M0


class StoredTensors:
    """The tensors of a safetensors directory. A file is opened when one of its tensors is read.

    Args:
        directory: contains model.safetensors, or model.safetensors.index.json and its files.

    Raises:
        ImportError: safetensors is not installed.
        FileNotFoundError: the directory or a file is missing.
        ValueError: config.json names a quantization format that is not supported.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        safetensors = import_safetensors()
        self._open, self._error = safetensors.safe_open, safetensors.SafetensorError
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise FileNotFoundError(
                f"directory is {os.fspath(directory)!r}, which is not a directory on this machine: "
                "download the model first, for example with huggingface_hub.snapshot_download"
            )
        self._opened: dict[str, Any] = {}
        config = self.directory / CONFIG
        quantization = _json(config).get("quantization_config") if config.exists() else None
        self.blocks = () if quantization is None else tuple(_declared(quantization, self.directory))
        #: The file of each tensor.
        self.files = self._files()

    def _files(self) -> dict[str, str]:
        index = self.directory / INDEX
        if (self.directory / SINGLE).exists():
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        if not index.exists():
            raise FileNotFoundError(
                f"{self.directory} has neither {SINGLE} nor {INDEX}. Other file formats, such as "
                "pytorch_model.bin, are not supported: save the model as safetensors"
            )
        files: dict[str, str] = _json(index)["weight_map"]
        absent = sorted({f for f in files.values() if not (self.directory / f).exists()})
        if absent:
            raise FileNotFoundError(
                f"{index} names missing files: {', '.join(absent)}. Complete the download"
            )
        return files

    def _file(self, name: str) -> Any:
        if name not in self._opened:
            path = self.directory / name
            try:
                self._opened[name] = self._open(path, "pt")
            except self._error as error:
                raise OSError(f"{path} is damaged or incomplete: {error}") from error
        return self._opened[name]

    def _slice(self, name: str) -> Any:
        try:
            return self._file(self.files[name]).get_slice(name)
        except self._error as error:
            path = self.directory / self.files[name]
            raise OSError(f"{path} has no tensor {name}: {error}") from error

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Return the safetensors type of a tensor."""
        return str(self._slice(name).get_dtype())

    def read(self, name: str, part: Sequence[Span]) -> Tensor:
        """Read a part of a tensor to the CPU. The result may be a view of the mapped file."""
        slices = tuple(slice(start, start + size) for start, size in part)
        read: Tensor = self._slice(name)[slices or ...]
        return read

    # --- FP8 weights -----------------------------------------------------------------------------

    def is_fp8(self, name: str) -> bool:
        """Return whether a tensor holds FP8 codes."""
        return self.dtype(name) in CODES

    def scales(self, weight: str) -> Scales:
        """Find the scales of an FP8 weight.

        Raises:
            ValueError: there are none, or their type or shape is not supported.
        """
        *batch, rows, cols = shape = self.shape(weight)
        name = next((weight + s for s in SCALE_SUFFIXES if weight + s in self), None)
        if name is None:
            expected = " or ".join(weight + suffix for suffix in SCALE_SUFFIXES)
            raise ValueError(f"FP8 codes without scales: expected {expected} in the files")
        scale_shape, dtype = self.shape(name), self.dtype(name)
        if dtype not in HIGH_PRECISION | E8M0:
            raise ValueError(f"scales of type {dtype}: they must be floating point or E8M0")
        if batch:
            experts, rows = batch[0], rows * math.prod(batch[1:])
            own = scale_shape[1:] if scale_shape[:1] == (experts,) else ()
        else:
            own = scale_shape
        first = ((1, 32),) if dtype in E8M0 else ()
        for block in (*self.blocks, *first, *KNOWN_BLOCKS):
            if (own or not batch) and _fits(block, (rows, cols), own):
                return Scales(name, dtype, scale_shape, block)
        blocks = ", ".join(map(str, dict.fromkeys((*self.blocks, *KNOWN_BLOCKS))))
        raise ValueError(
            f"scales of shape {scale_shape} for a weight of shape {shape}: no block of {blocks} "
            "(-1: the whole extent) has that many"
        )

    def read_scales(self, weight: str, part: Sequence[Span]) -> Tensor:
        """Read the scales of all blocks that overlap a part of a weight.

        Returns:
            Scales (rows of blocks, columns of blocks), for each matrix of a batch, in float32, or
            float8_e8m0fnu if they are E8M0.
        """
        scales = self.scales(weight)
        *batch, rows, cols = _matrices(part, self.shape(weight))
        blocks = [_blocks(b, *span) for b, span in zip(scales.block, (rows, cols), strict=True)]
        spans = [*batch, *blocks]
        # Scales of rows may be stored as a vector.
        read = self.read(scales.name, spans[: len(scales.shape)])
        read = read.reshape([count for _, count in spans])
        if scales.dtype == "U8":
            return read.contiguous().view(torch.float8_e8m0fnu)
        return read if scales.e8m0 else read.to(torch.float32)

    def read_values(self, name: str, part: Sequence[Span], device: torch.device) -> Tensor:
        """Read a part of a tensor in high precision. FP8 codes are dequantized to float32."""
        if not self.is_fp8(name):
            return self.read(name, part).to(device)
        factors = self.read_scales(name, part).to(device).to(torch.float32)
        spans = _matrices(part, self.shape(name))
        for dim, block in zip((-2, -1), self.scales(name).block, strict=True):
            start, size = spans[dim]
            if block > 1:
                skip = start % block if size else 0
                factors = factors.repeat_interleave(block, dim).narrow(dim, skip, size)
        codes = self.read(name, part).to(device)
        values = codes.reshape([size for _, size in spans]).to(torch.float32) * factors
        return values.view(codes.shape)


def read_parts(
    parts: Sequence[Part],
    part: Sequence[Span],
    shape: tuple[int, ...],
    read: Callable[[str, Sequence[Span]], Tensor],
) -> Tensor:
    """Read a part of a parameter from the tensors of the files that contain the parameter.

    Args:
        parts: these tensors.
        part: the part to read.
        shape: the shape of the parameter.
        read: reads a part of one tensor.

    Returns:
        The part. If several tensors contain the parameter, (matrices, rows, columns).
    """
    if parts[0].is_whole:
        return read(parts[0].name, part)
    if parts[0].matrix is None:
        start, size = part[0]
        ranges = []
        for each in parts:
            first, stop = max(each.rows.start, start), min(each.rows.stop, start + size)
            if first < stop or each is parts[-1]:
                count = max(stop - first, 0)
                ranges.append(read(each.name, [(first - each.rows.start, count), *part[1:]]))
        return torch.cat(ranges)
    matrices, rows, cols = _matrices(part, shape)
    found = []
    for each in parts:
        assert each.matrix is not None
        # The sum of a start and a size is the end.
        start, stop = max(each.rows.start, rows[0]), min(each.rows.stop, sum(rows))
        if matrices[0] <= each.matrix < sum(matrices) and start < stop:
            found.append(read(each.name, [(start - each.rows.start, stop - start), cols]))
    if not found:
        return torch.empty(matrices[1], 0, cols[1])
    return torch.cat(found).view(matrices[1], -1, found[0].shape[-1])


def _matrices(part: Sequence[Span], shape: tuple[int, ...]) -> Sequence[Span]:
    r"""Return the rows and columns of a part, after the matrices if it is of a batch (E, \*, K).

    If rows have several dimensions, the part has consecutive rows.
    """
    if len(shape) < 4:
        return part
    begin, size = 0, 1
    for n, (start, count) in zip(shape[1:-1], part[1:-1], strict=True):
        begin, size = begin * n + start, size * count
    return [part[0], (begin, size), part[-1]]


def _blocks(block: int, begin: int, size: int) -> tuple[int, int]:
    """Return the first block that overlaps a range of rows or columns, and the number of blocks."""
    if block < 0:
        return 0, 1
    if not size:
        return 0, 0
    first = begin // block
    return first, -(-(begin + size) // block) - first


def _fits(block: Block, shape: tuple[int, ...], scale_shape: tuple[int, ...]) -> bool:
    if block == (-1, -1):
        return math.prod(scale_shape) == 1
    counts = tuple(_blocks(b, 0, n)[1] for b, n in zip(block, shape, strict=True))
    return scale_shape == counts or (block == (1, -1) and scale_shape == counts[:1])


def _declared(quantization: dict[str, Any], directory: Path) -> Iterator[Block]:
    """Yield the block shapes that a ``quantization_config`` declares.

    Raises:
        ValueError: the declared format is not supported.
    """
    method = quantization.get("quant_method")
    if method == "fp8":
        if quantization.get("weight_block_size"):
            down, across = quantization["weight_block_size"]
            yield down, across
        return
    if method != "compressed-tensors":
        raise ValueError(f"{directory} is quantized with quant_method {method!r}. {READABLE}")
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense" or quantization.get("transform_config"):
        what = f"sparsity format {sparsity!r}" if sparsity != "dense" else "a transform_config"
        raise ValueError(f"{directory} uses {what} of compressed-tensors. {READABLE}")
    for group in (quantization.get("config_groups") or {}).values():
        weights = group.get("weights")
        if weights is None:
            continue
        format = group.get("format") or quantization.get("format")
        kind = f"{weights.get('num_bits')}-bit {weights.get('type')} weights"
        kind += "" if weights.get("symmetric", True) else " with zero points"
        known = format in ("float-quantized", "naive-quantized", "mxfp8-quantized")
        if not known or kind != "8-bit float weights":
            raise ValueError(
                f"{directory} is in compressed-tensors format {format!r} ({kind}). {READABLE}"
            )
        strategy = weights.get("strategy")
        if strategy == "block":
            down, across = weights["block_structure"]
            yield down, across
        elif strategy == "group":
            yield 1, weights["group_size"]


def _json(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return found
