"""Load checkpoints of inference servers into a model for training, sharded or not.

`load` first compares names, shapes and formats on all ranks. It then loads one tensor at a time.
Each rank reads its own part of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fp8rs._torch import (
    dtensor_like,
    is_distributed,
    local_shape_and_offset,
    own_part,
    plain_name,
    reshard,
    unwrapped,
)
from fp8rs.checkpoint.parts import SCALE, parts_of
from fp8rs.checkpoint.states import load_parts
from fp8rs.nn.fp8_params import Float8Params, reset_scales
from fp8rs.quantize.formats import MX_1X32, MX_32X32, BlockFormat
from fp8rs.quantize.recipes import check_module
from fp8rs.tensor.quantized import QuantizedTensor

from .files import on_all_ranks, raise_on_all
from .names import Fused, Part, layout_of, persistent_buffers
from .stored import ACTIVATION_SCALES, CODES, HIGH_PRECISION, Span, StoredTensors, read_parts
from .tensors import check_expert_parallel, is_fp8

#: The number of names of one kind that an error lists.
LISTED = 10


@dataclass(frozen=True)
class Loaded:
    """Result of `load`, equal on all ranks.

    Attributes:
        missing_keys: parameters and buffers of the model that the files do not contain.
        unexpected_keys: tensors of the files that the model does not have on any rank.
        exact: FP8 weights that have the codes and scales of the files.
        quantized: the other FP8 weights, which were quantized from the values in the files.
    """

    missing_keys: list[str]
    unexpected_keys: list[str]
    exact: list[str]
    quantized: list[str]


@dataclass(frozen=True)
class Source:
    """The tensors of the files that contain a tensor of the model.

    Attributes:
        name: the name of the model's tensor.
        parts: the tensors of the files.
        fused: their conversion, if they contain other rows or several tensors of the model.
    """

    name: str
    parts: list[Part]
    fused: Fused | None = None


@dataclass(eq=False)
class Target:
    """A parameter or buffer of the model.

    Attributes:
        tensor: the parameter or buffer.
        layer: the converted module that the tensor is a weight of, or None.
        name: its name in the unconverted model. The first one of a tied parameter.
        sources: where the files have it, for each of its names.
        scale: the scales of this rank's part if its codes and scales can be loaded unchanged.
    """

    tensor: Tensor
    layer: Float8Params | None
    name: str
    sources: list[Source] = field(default_factory=list)
    scale: Tensor | None = None

    @property
    def part(self) -> list[Span]:
        """The start and the size of this rank's part along each dimension."""
        tensor: Any = self.tensor
        if not is_distributed(tensor):
            return [(0, size) for size in self.shape]
        sizes, starts = local_shape_and_offset(self.shape, tensor.device_mesh, tensor.placements)
        return list(zip(starts, sizes, strict=True))

    @property
    def fp8_weight(self) -> QuantizedTensor | None:
        """This rank's part of an FP8 weight, or None for other tensors."""
        local = own_part(self.tensor)
        return local if isinstance(local, QuantizedTensor) else None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor, of all ranks."""
        return tuple(self.tensor.shape)


@dataclass
class RankFindings:
    """Findings of one rank before anything is written.

    Attributes:
        missing: names of targets that the files do not contain.
        used: names of the tensors of the files that are used.
        unused: names of the other tensors of the files.
        fp8: for the name of each FP8 weight, whether this rank can load codes and scales.
    """

    missing: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    fp8: dict[str, bool] = field(default_factory=dict)


def load(model: nn.Module, directory: str | os.PathLike[str], *, strict: bool = True) -> Loaded:
    """Load a safetensors checkpoint, FP8 or not, into a model for training.

    All ranks call it, before or after ``fully_shard``. Each rank reads only its own part of each
    tensor. Supported are the files of `save_pretrained`, of DeepSeek (``weight_scale_inv``), of
    compressed-tensors (``weight_scale`` per tensor, row or block, and MXFP8), and files in high
    precision.

    The files of a transformers model may store experts one by one, as its own files do, or stacked.

    Master weights and unconverted layers get the dequantized values, rounded once to the
    parameter's dtype. FP8 weights get the codes and scales of the files if these have the format of
    the recipe's weights. Otherwise they get the dequantized values, quantized once. The return
    value lists both kinds. Histories of delayed scaling are reset.

    Args:
        model: the model, converted or not. If it is on the meta device, call ``to_empty`` first.
            Buffers with ``persistent=False`` keep their values.
        directory: contains model.safetensors, or model.safetensors.index.json and its files, and
            optionally config.json.
        strict: raise an error if names are missing or unexpected. A tied weight is not missing if
            the files have one of its names.

    Returns:
        Missing and unexpected keys, and the FP8 weights that were loaded exactly.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the directory or one of its files is missing or damaged.
        TypeError: ``model`` is not a module.
        ValueError: the quantization format of the files is not supported, scales are missing, names
            or shapes differ, or a tensor of the model is on the meta device. Every rank raises, and
            nothing was written.
    """
    check_module("model", model)
    error: Exception | None = None
    try:
        stored = StoredTensors(directory)
        targets = targets_of(unwrapped(model), stored)
        findings = compare(stored, targets)
    except Exception as e:
        error = e
    raise_on_all(error)
    loaded = summary(on_all_ranks(findings))

    if strict and (loaded.missing_keys or loaded.unexpected_keys):
        raise ValueError(
            f"{directory} does not match the model, and nothing was loaded. Pass strict=False to "
            "load the names that both have"
            + list_names("missing in the files", loaded.missing_keys)
            + list_names("unexpected in the files", loaded.unexpected_keys)
        )
    exact = set(loaded.exact)
    for target in targets:
        if target.sources:
            write(stored, target, target.name in exact)
    return loaded


# --- comparison ----------------------------------------------------------------------------------


def targets_of(model: nn.Module, stored: StoredTensors) -> list[Target]:
    """Return the parameters and persistent buffers of a model, each once.

    Raises:
        ValueError: one is on the meta device.
    """
    check_expert_parallel(model)
    reshard(model)
    targets: dict[int, Target] = {}
    layout = layout_of(model)
    for path, module in model.named_modules(remove_duplicate=False):
        for key, tensor in (*module._parameters.items(), *persistent_buffers(module)):
            if tensor is None:
                continue
            name = plain_name(f"{path}.{key}".lstrip("."))
            if tensor.is_meta:
                raise ValueError(
                    f"{name} is on the meta device, without memory to load into: call "
                    "model.to_empty(device=...) first"
                )

            layer = module if is_fp8(module, key) else None
            # A tied parameter has several names, and one target.
            target = targets.setdefault(id(tensor), Target(tensor, layer, name))
            if name in stored:
                source = Source(name, [Part(name)])
            else:
                source = Source(name, layout.files_of(name), layout.fused.get(name))
            if all(part.name in stored for part in source.parts):
                target.sources.append(source)
    return list(targets.values())


def compare(stored: StoredTensors, targets: Iterable[Target]) -> RankFindings:
    """Compare the files with this rank's tensors.

    Raises:
        ValueError: some tensors do not match. The message lists them.
    """
    findings = RankFindings()
    problems: list[str] = []
    for target in targets:
        has_problem = False
        for source in target.sources:
            for part in source.parts:
                findings.used.append(part.name)
                try:
                    check(stored, target, source, part)
                    if stored.is_fp8(part.name):
                        findings.used.append(stored.scales(part.name).name)
                except ValueError as error:
                    problems.append(f"{part.name}: {error}")
                    has_problem = True
        if has_problem:
            continue

        if not target.sources:
            findings.missing.append(target.name)
        elif differ(stored, target):
            names = " and ".join(source.parts[0].name for source in target.sources)
            problems.append(
                f"{names}: tied in the model, but different in the files. Untie them "
                "(tie_word_embeddings=False in transformers)"
            )
        elif target.fp8_weight is not None:
            target.scale = read_weight_scales(stored, target)
            findings.fp8[target.name] = target.scale is not None
    if problems:
        raise ValueError(
            f"{stored.directory} does not match the model, and nothing was loaded"
            + list_names("these tensors differ", problems)
        )
    used = set(findings.used)
    findings.unused = [name for name in stored.files if name not in used]
    return findings


def check(stored: StoredTensors, target: Target, source: Source, part: Part) -> None:
    """Raise ValueError if a tensor of the files cannot be loaded into the model's."""
    tensor = target.tensor
    dtype = stored.dtype(part.name)
    if source.fused is not None:
        shape = source.fused.files[part.name]
    else:
        shape = part.shape(target.shape)
    if stored.shape(part.name) != shape:
        raise ValueError(f"shape {stored.shape(part.name)} in the files, {shape} in the model")
    if tensor.is_floating_point() != (dtype in HIGH_PRECISION or dtype in CODES):
        raise ValueError(
            f"type {dtype} in the files, {str(tensor.dtype).removeprefix('torch.')} in the model: "
            "integers and packed formats are not converted to floating point"
        )


def differ(stored: StoredTensors, target: Target) -> bool:
    """Return whether the files have different values for the names of a tied parameter."""
    if len(target.sources) == 1:
        return False
    first = read_values(stored, target, target.sources[0])
    for source in target.sources[1:]:
        if not torch.equal(first, read_values(stored, target, source)):
            return True
    return False


def summary(all_findings: list[RankFindings]) -> Loaded:
    """Combine the findings of all ranks. Ranks may have different parts of a model."""
    used: set[str] = set()
    unused: set[str] = set()
    missing: dict[str, None] = {}  # a set in the order of the model
    is_exact: dict[str, bool] = {}
    for findings in all_findings:
        used.update(findings.used)
        unused.update(findings.unused)
        missing.update(dict.fromkeys(findings.missing))
        for name, is_exact_on_rank in findings.fp8.items():
            is_exact[name] = is_exact.get(name, True) and is_exact_on_rank

    unexpected = [name for name in unused - used if not name.endswith(ACTIVATION_SCALES)]
    return Loaded(
        missing_keys=list(missing),
        unexpected_keys=sorted(unexpected),
        exact=[name for name, exact in is_exact.items() if exact],
        quantized=[name for name, exact in is_exact.items() if not exact],
    )


def list_names(heading: str, names: list[str]) -> str:
    """Return a list of names for an error, or "" if there are none."""
    if not names:
        return ""
    lines = [f"{heading}:", *names[:LISTED]]
    if len(names) > LISTED:
        lines.append(f"and {len(names) - LISTED} more")
    return "".join(f"\n  {line}" for line in lines)


# --- reads ---------------------------------------------------------------------------------------


def read_values(
    stored: StoredTensors, target: Target, source: Source, device: str | torch.device = "cpu"
) -> Tensor:
    """Read this rank's part of a tensor in high precision."""
    if source.fused is None:
        read = partial(stored.read_values, device=torch.device(device))
        values = read_parts(source.parts, target.part, target.shape, read)
    else:
        files = {}
        for name, shape in source.fused.files.items():
            spans = [(0, size) for size in shape]
            files[name] = stored.read_values(name, spans, torch.device("cpu"))
        values = source.fused.from_files(files)[source.name]
        values = values[tuple(slice(start, start + size) for start, size in target.part)]
    return values.to(device).view(own_part(target.tensor).shape)


def read_weight_scales(stored: StoredTensors, target: Target) -> Tensor | None:
    """Read the scales of this rank's part of an FP8 weight.

    Returns:
        None if the files do not have codes and scales in the format of the weight.
    """
    weight = target.fp8_weight
    source = target.sources[0]
    if weight is None or weight._storage.observer is None or parts_of(target.tensor) is None:
        return None
    if source.fused is not None:
        return None  # files with other rows also have other scales
    if not _have_format(stored, source.parts, weight):
        return None
    spans = _scale_spans(target, weight.format, source.parts)
    if spans is None:
        return None

    # A block of the weight has several rows, whose scales in the files must be equal.
    scales = read_parts(source.parts, spans, target.shape, stored.read_scales)
    rows = scales.shape[-2]
    rows_per_scale = 1
    if weight.format is MX_32X32:
        rows_per_scale = 32
    elif weight.format.per_tensor:
        rows_per_scale = max(rows, 1)
    weight_scales = scales[..., ::rows_per_scale, :]
    if rows_per_scale > 1:
        expected = weight_scales.view(torch.uint8).repeat_interleave(rows_per_scale, -2)
        if not torch.equal(expected[..., :rows, :], scales.view(torch.uint8)):
            return None
    if weight.spec.power_2_scale and (torch.frexp(weight_scales.float())[0] != 0.5).any():
        return None
    return weight_scales


def _have_format(stored: StoredTensors, parts: list[Part], weight: QuantizedTensor) -> bool:
    """Return whether the codes and scales of files have the format of a weight.

    MXFP8 files have blocks of 1x32, also for weights with blocks of 32x32.
    """
    format = weight.format
    block = MX_1X32.block if format.microscaled else format.block
    for part in parts:
        if part.matrix is None and not part.is_whole:
            return False  # the scales of ranges of rows may end within a block
        if CODES.get(stored.dtype(part.name)) != weight.fp8_dtype:
            return False
        scales = stored.scales(part.name)
        if scales.block != block or (format.microscaled and not scales.e8m0):
            return False
    return True


def _scale_spans(target: Target, format: BlockFormat, parts: list[Part]) -> list[Span] | None:
    """Return the part of a weight whose scales this rank compares.

    Returns:
        None if a tensor of the files begins within a block of the weight, or the rows of the blocks
        have several dimensions.
    """
    spans = target.part
    if format.per_tensor:
        # The tensors of a matrix need equal scales, also those without rows of this rank.
        spans[1:] = [(0, size) for size in target.shape[1:]]
        return spans
    for part in parts:
        if part.matrix is not None and part.rows.start % format.block[0]:
            return None
    if format is MX_32X32:
        if len(target.shape) > 3:
            return None
        start, size = spans[-2]
        if size:  # the rows of a block need equal scales, also rows of other ranks
            first_row = start - start % 32
            stop = min(-(-(start + size) // 32) * 32, target.shape[-2])
            spans[-2] = (first_row, stop - first_row)
    return spans


# --- writes --------------------------------------------------------------------------------------


@torch.no_grad()
def write(stored: StoredTensors, target: Target, exact: bool) -> None:
    """Load one tensor, on all ranks."""
    tensor = target.tensor
    local = own_part(tensor)
    if target.layer is not None:
        reset_scales(target.layer)
    # With 1x32 blocks, the files lack the columnwise plane. It is quantized from the values.
    if not exact or cast(QuantizedTensor, local).format is MX_1X32:
        values = read_values(stored, target, target.sources[0], local.device)
        tensor.copy_(dtensor_like(tensor, values) if is_distributed(tensor) else values)
    if not exact:
        return
    parts = parts_of(tensor)
    assert parts is not None and target.scale is not None
    local_scale = own_part(parts[SCALE])
    if local_scale.numel():
        parts[SCALE] = target.scale.view(local_scale.shape)
    if local.numel():
        codes = read_parts(target.sources[0].parts, target.part, target.shape, stored.read)
        parts[""] = codes.view(local.shape)
    load_parts(tensor, parts)
