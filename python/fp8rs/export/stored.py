"""Read safetensors directories: shapes, slices, and the scales of FP8 weights.

The shapes of a weight and its scales determine the block of one scale. If they are ambiguous,
``quantization_config`` in config.json determines it. `read_parts` reads a batched weight whose
matrices are separate tensors.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
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

#: Block shapes that are recognized without a config.
KNOWN_BLOCKS: list[Block] = []
#: Suffixes that DeepSeek and compressed-tensors add to a weight's name for its scales.
SCALE_SUFFIXES: list[str] = []
for _format in FORMATS.values():
    if _format.spec is not None:
        KNOWN_BLOCKS.append(_format.spec.format.block)
        _suffix = _format.scale_name.removeprefix("weight")
        if _suffix not in SCALE_SUFFIXES:
            SCALE_SUFFIXES.append(_suffix)
KNOWN_BLOCKS.sort()

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
        self._safe_open = safetensors.safe_open
        self._error = safetensors.SafetensorError
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise FileNotFoundError(
                f"directory is {os.fspath(directory)!r}, which is not a directory on this machine: "
                "download the model first, for example with huggingface_hub.snapshot_download"
            )
        self._open_files: dict[str, Any] = {}
        #: The blocks that config.json declares.
        self.blocks: list[Block] = []
        config = self.directory / CONFIG
        if config.exists():
            quantization = _read_json(config).get("quantization_config")
            if quantization is not None:
                self.blocks = _declared_blocks(quantization, self.directory)
        #: The name of the file of each tensor.
        self.files = self._file_names()

    def _file_names(self) -> dict[str, str]:
        if (self.directory / SINGLE).exists():
            return dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        index = self.directory / INDEX
        if not index.exists():
            raise FileNotFoundError(
                f"{self.directory} has neither {SINGLE} nor {INDEX}. Other file formats, such as "
                "pytorch_model.bin, are not supported: save the model as safetensors"
            )
        file_names: dict[str, str] = _read_json(index)["weight_map"]
        missing = [
            file_name
            for file_name in sorted(set(file_names.values()))
            if not (self.directory / file_name).exists()
        ]
        if missing:
            raise FileNotFoundError(
                f"{index} names missing files: {', '.join(missing)}. Complete the download"
            )
        return file_names

    def _file(self, name: str) -> Any:
        if name not in self._open_files:
            path = self.directory / name
            try:
                self._open_files[name] = self._safe_open(path, "pt")
            except self._error as error:
                raise OSError(f"{path} is damaged or incomplete: {error}") from error
        return self._open_files[name]

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
        tensor: Tensor = self._slice(name)[slices or ...]
        return tensor

    # --- FP8 weights -----------------------------------------------------------------------------

    def is_fp8(self, name: str) -> bool:
        """Return whether a tensor holds FP8 codes."""
        return self.dtype(name) in CODES

    def scales(self, weight: str) -> Scales:
        """Find the scales of an FP8 weight.

        Raises:
            ValueError: there are none, or their type or shape is not supported.
        """
        names = [weight + suffix for suffix in SCALE_SUFFIXES]
        name = next((name for name in names if name in self), None)
        if name is None:
            raise ValueError(
                f"FP8 codes without scales: expected {' or '.join(names)} in the files"
            )
        dtype = self.dtype(name)
        if dtype not in HIGH_PRECISION | E8M0:
            raise ValueError(f"scales of type {dtype}: they must be floating point or E8M0")

        scales_shape = self.shape(name)
        shape = self.shape(weight)
        *batch, rows, cols = shape
        # The scales of one matrix, or of each matrix of a batch.
        matrix_scales = scales_shape
        if batch:
            rows *= math.prod(batch[1:])
            matrix_scales = scales_shape[1:]
        if not batch or (matrix_scales and scales_shape[0] == batch[0]):
            # Prefer what config.json declares. E8M0 scales are probably MXFP8.
            blocks = [*self.blocks, (1, 32)] if dtype in E8M0 else self.blocks
            for block in (*blocks, *KNOWN_BLOCKS):
                if _fits(block, (rows, cols), matrix_scales):
                    return Scales(name, dtype, scales_shape, block)
        expected = ", ".join(map(str, dict.fromkeys((*self.blocks, *KNOWN_BLOCKS))))
        raise ValueError(
            f"scales of shape {scales_shape} for a weight of shape {shape}: no block of {expected} "
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
        block_rows, block_cols = scales.block
        spans = [*batch, _blocks(block_rows, *rows), _blocks(block_cols, *cols)]
        # Scales of rows may be stored as a vector.
        values = self.read(scales.name, spans[: len(scales.shape)])
        values = values.reshape([count for _, count in spans])
        if scales.dtype == "U8":
            return values.contiguous().view(torch.float8_e8m0fnu)
        return values if scales.e8m0 else values.to(torch.float32)

    def read_values(self, name: str, part: Sequence[Span], device: torch.device) -> Tensor:
        """Read a part of a tensor in high precision. FP8 codes are dequantized to float32."""
        if not self.is_fp8(name):
            return self.read(name, part).to(device)
        factors = self.read_scales(name, part).to(device).to(torch.float32)
        spans = _matrices(part, self.shape(name))
        for dim, block in zip((-2, -1), self.scales(name).block, strict=True):
            start, size = spans[dim]
            if block > 1:
                # The part may begin within a block.
                offset = start % block if size else 0
                factors = factors.repeat_interleave(block, dim).narrow(dim, offset, size)
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
        return _read_ranges(parts, part, read)

    matrices, rows, cols = _matrices(part, shape)
    first_matrix, matrix_count = matrices
    first_row, row_count = rows
    values = []
    for file_part in parts:
        assert file_part.matrix is not None
        if not first_matrix <= file_part.matrix < first_matrix + matrix_count:
            continue
        start = max(file_part.rows.start, first_row)
        stop = min(file_part.rows.stop, first_row + row_count)
        if start < stop:
            span = (start - file_part.rows.start, stop - start)
            values.append(read(file_part.name, [span, cols]))
    if not values:
        return torch.empty(matrix_count, 0, cols[1])
    return torch.cat(values).view(matrix_count, -1, values[0].shape[-1])


def _read_ranges(
    parts: Sequence[Part], part: Sequence[Span], read: Callable[[str, Sequence[Span]], Tensor]
) -> Tensor:
    """Read a part of a parameter from tensors with ranges of its first dimension."""
    first_row, row_count = part[0]
    values = []
    for file_part in parts:
        start = max(file_part.rows.start, first_row)
        stop = min(file_part.rows.stop, first_row + row_count)
        # If the part is empty, read no rows of the last tensor, for the dtype and the shape.
        if start < stop or file_part is parts[-1]:
            span = (start - file_part.rows.start, max(stop - start, 0))
            values.append(read(file_part.name, [span, *part[1:]]))
    return torch.cat(values)


def _matrices(part: Sequence[Span], shape: tuple[int, ...]) -> Sequence[Span]:
    r"""Return the rows and columns of a part, after the matrices if it is of a batch (E, \*, K).

    If rows have several dimensions, the part has consecutive rows.
    """
    if len(shape) < 4:
        return part
    first_row = 0
    row_count = 1
    for size, (start, count) in zip(shape[1:-1], part[1:-1], strict=True):
        first_row = first_row * size + start
        row_count *= count
    return [part[0], (first_row, row_count), part[-1]]


def _blocks(block: int, begin: int, size: int) -> tuple[int, int]:
    """Return the first block that overlaps a range of rows or columns, and the number of blocks."""
    if block < 0:
        return 0, 1
    if not size:
        return 0, 0
    first = begin // block
    return first, -(-(begin + size) // block) - first


def _fits(block: Block, shape: tuple[int, int], scales_shape: tuple[int, ...]) -> bool:
    """Return whether a matrix has scales of this shape if it has such blocks."""
    if block == (-1, -1):
        return math.prod(scales_shape) == 1
    _, rows_of_blocks = _blocks(block[0], 0, shape[0])
    _, columns_of_blocks = _blocks(block[1], 0, shape[1])
    if block == (1, -1) and scales_shape == (rows_of_blocks,):
        return True
    return scales_shape == (rows_of_blocks, columns_of_blocks)


def _declared_blocks(quantization: dict[str, Any], directory: Path) -> list[Block]:
    """Return the block shapes that a ``quantization_config`` declares.

    Raises:
        ValueError: the declared format is not supported.
    """
    method = quantization.get("quant_method")
    if method == "fp8":
        if not quantization.get("weight_block_size"):
            return []
        rows, cols = quantization["weight_block_size"]
        return [(rows, cols)]
    if method != "compressed-tensors":
        raise ValueError(f"{directory} is quantized with quant_method {method!r}. {READABLE}")
    sparsity = (quantization.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense" or quantization.get("transform_config"):
        feature = f"sparsity format {sparsity!r}" if sparsity != "dense" else "a transform_config"
        raise ValueError(f"{directory} uses {feature} of compressed-tensors. {READABLE}")

    blocks: list[Block] = []
    for group in (quantization.get("config_groups") or {}).values():
        weights = group.get("weights")
        if weights is None:
            continue
        format = group.get("format") or quantization.get("format")
        kind = f"{weights.get('num_bits')}-bit {weights.get('type')} weights"
        if not weights.get("symmetric", True):
            kind += " with zero points"
        is_supported = format in ("float-quantized", "naive-quantized", "mxfp8-quantized")
        if not is_supported or kind != "8-bit float weights":
            raise ValueError(
                f"{directory} is in compressed-tensors format {format!r} ({kind}). {READABLE}"
            )
        strategy = weights.get("strategy")
        if strategy == "block":
            rows, cols = weights["block_structure"]
            blocks.append((rows, cols))
        elif strategy == "group":
            blocks.append((1, weights["group_size"]))
    return blocks


def _read_json(path: Path) -> dict[str, Any]:
    try:
        contents: dict[str, Any] = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    return contents
