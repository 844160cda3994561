"""Load checkpoints of inference servers into a model for training, sharded or not.

`load` first compares names, shapes and formats on all ranks. It then loads one tensor at a time.
Each rank reads its own part of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
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
)
from fp8rs.checkpoint.parts import SCALE, parts_of
from fp8rs.checkpoint.states import load_parts
from fp8rs.nn.fp8_params import reset_scales
from fp8rs.tensor.formats import MX_1X32, MX_32X32
from fp8rs.tensor.quantized import QuantizedTensor

from .files import on_all_ranks
from .names import Part, stored_parts
from .stored import ACTIVATION_SCALES, CODES, HIGH_PRECISION, Slice, StoredTensors
from .tensors import check_expert_parallel, is_fp8, persistent_buffers

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


@dataclass(eq=False)
class Target:
    """A parameter or buffer of the model.

    Attributes:
        tensor: the parameter or buffer.
        layer: the converted module that the tensor is a weight of, or None.
        names: its names in the unconverted model. A tied parameter has several.
        parts: for each of these names, the tensors that the files may have instead.
        stored: its name in the files, or "" if they do not contain it.
    """

    tensor: Tensor
    layer: Any
    names: list[str] = field(default_factory=list)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    stored: str = ""

    @property
    def part(self) -> Slice:
        """The start and the size of this rank's part."""
        tensor: Any = self.tensor
        if not is_distributed(tensor):
            return (0,) * tensor.dim(), tuple(tensor.shape)
        size, begin = local_shape_and_offset(
            tuple(tensor.shape), tensor.device_mesh, tensor.placements
        )
        return begin, size

    @property
    def fp8_weight(self) -> QuantizedTensor | None:
        """This rank's part of an FP8 weight, or None for other tensors."""
        local = own_part(self.tensor)
        return local if isinstance(local, QuantizedTensor) else None


@dataclass
class RankFindings:
    """Findings of one rank before anything is written.

    Attributes:
        error: the error that was raised while the files were opened or compared.
        names: names of all targets.
        missing: names of targets that the files do not contain.
        used: names of the tensors of the files that are used.
        fp8: for the name of each FP8 weight, whether this rank can load codes and scales.
    """

    error: Exception | None = None
    names: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    used: list[str] = field(default_factory=list)
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
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    findings, stored, found = RankFindings(), None, []
    try:
        stored = StoredTensors(directory)
        found = targets(model)
        compare(stored, found, findings)
    except Exception as error:
        findings.error = error
    all_findings = on_all_ranks(findings)
    if findings.error is not None:
        raise findings.error
    for rank, other in enumerate(all_findings):
        if other.error is not None:
            raise type(other.error)(f"rank {rank}: {other.error}")
    assert stored is not None
    loaded = summary(stored, all_findings)
    if strict and (loaded.missing_keys or loaded.unexpected_keys):
        raise ValueError(
            f"{directory} does not match the model, and nothing was loaded. Pass strict=False to "
            "load the names that both have"
            + list_names("missing in the files", loaded.missing_keys)
            + list_names("unexpected in the files", loaded.unexpected_keys)
        )
    exact = set(loaded.exact)
    for target in found:
        if target.stored:
            write(stored, target, target.names[0] in exact)
    return loaded


# --- comparison ----------------------------------------------------------------------------------


def targets(model: nn.Module) -> list[Target]:
    """Return the parameters and persistent buffers of a model, each once.

    Raises:
        ValueError: one is on the meta device.
    """
    check_expert_parallel(model)
    reshard(model)
    found: dict[int, Target] = {}
    stored_as = stored_parts(model)
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
            target = found.setdefault(
                id(tensor), Target(tensor, module if is_fp8(module, key) else None)
            )
            target.names.append(name)
            if name in stored_as:
                target.parts[name] = stored_as[name]
    return list(found.values())


def compare(stored: StoredTensors, found: Iterable[Target], findings: RankFindings) -> None:
    """Compare the files with this rank's tensors.

    Raises:
        ValueError: some tensors do not match. The message lists them.
    """
    problems = []
    for target in found:
        findings.names += target.names
        names = []
        try:
            for name in target.names:
                parts = target.parts.get(name, [])
                if name in stored:
                    names.append(name)
                elif parts and all(part.name in stored for part in parts):
                    findings.used += [part.name for part in parts]
                    if parts[0].matrix is None:
                        names.append(parts[0].name)
                    else:
                        stored.stack(name, parts, tuple(target.tensor.shape))
                        names.append(name)
            if not names:
                findings.missing.append(target.names[0])
                continue
            target.stored = names[0]
            for name in names:
                check(stored, target, name)
                if stored.is_fp8(name):
                    findings.used += stored.scales(name).names
            if len(names) > 1:
                check_ties(stored, target, names)
            if target.fp8_weight is not None:
                findings.fp8[target.names[0]] = has_weight_format(stored, target)
        except ValueError as error:
            problems.append(f"{target.names[0]}: {error}")
    if problems:
        raise ValueError(
            f"{stored.directory} does not match the model, and nothing was loaded"
            + list_names("these tensors differ", problems)
        )


def check(stored: StoredTensors, target: Target, name: str) -> None:
    """Raise ValueError if a tensor of the files cannot be loaded into the model's."""
    tensor, shape, dtype = target.tensor, stored.shape(name), stored.dtype(name)
    if shape != tuple(tensor.shape):
        raise ValueError(f"shape {shape} in the files, {tuple(tensor.shape)} in the model")
    if tensor.is_floating_point() != (dtype in HIGH_PRECISION or dtype in CODES):
        raise ValueError(
            f"type {dtype} in the files, {str(tensor.dtype).removeprefix('torch.')} in the model: "
            "integers and packed formats are not converted to floating point"
        )


def check_ties(stored: StoredTensors, target: Target, names: list[str]) -> None:
    """Raise ValueError if the files have different values for the names of a tied parameter."""
    first, *others = (stored.read_values(n, target.part, torch.device("cpu")) for n in names)
    for name, values in zip(names[1:], others, strict=True):
        if not torch.equal(first, values):
            raise ValueError(
                f"tied to {name} in the model, but the two differ in the files: untie them "
                "(tie_word_embeddings=False in transformers)"
            )


def has_weight_format(stored: StoredTensors, target: Target) -> bool:
    """Return whether the files have codes and scales in the format of this rank's FP8 weight."""
    weight = target.fp8_weight
    if weight is None or weight._store.observer is None or not stored.is_fp8(target.stored):
        return False
    if CODES[stored.dtype(target.stored)] != weight.fp8_dtype:
        return False
    if parts_of(target.tensor) is None:
        return False
    scales = stored.scales(target.stored)
    if weight.format.microscaled:
        if not scales.e8m0 or scales.block != MX_1X32.block:
            return False
        return weight.format is MX_1X32 or shares_scales(stored, target)
    if scales.block != weight.format.block:
        return False
    if not weight.spec.power_2_scale:
        return True
    own = stored.read_scales(target.stored, target.part).to(torch.float32)
    return bool((torch.frexp(own)[0] == 0.5).all())


def shares_scales(stored: StoredTensors, target: Target) -> bool:
    """Return whether each 32x32 block that overlaps this rank's part has one scale."""
    if target.tensor.dim() > 3:
        return False
    begin, size = whole_blocks(target)
    own = stored.read_scales(target.stored, (begin, size)).view(torch.uint8)
    return torch.equal(own[..., ::32, :].repeat_interleave(32, -2)[..., : size[-2], :], own)


def whole_blocks(target: Target) -> Slice:
    """Return this rank's part, extended to whole rows of 32x32 blocks."""
    begin, size = (list(each) for each in target.part)
    if size[-2]:
        stop = min(-(-(begin[-2] + size[-2]) // 32) * 32, target.tensor.shape[-2])
        begin[-2] = begin[-2] // 32 * 32
        size[-2] = stop - begin[-2]
    return begin, size


def summary(stored: StoredTensors, all_findings: list[RankFindings]) -> Loaded:
    """Combine the findings of all ranks. Ranks may have different parts of a model."""
    known = {name for r in all_findings for name in (*r.names, *r.used)}
    unexpected = [
        name for name in stored.files if name not in known and not name.endswith(ACTIVATION_SCALES)
    ]
    fp8 = dict.fromkeys(name for r in all_findings for name in r.fp8)
    exact = [name for name in fp8 if all(r.fp8.get(name, True) for r in all_findings)]
    return Loaded(
        missing_keys=list(dict.fromkeys(name for r in all_findings for name in r.missing)),
        unexpected_keys=sorted(unexpected),
        exact=exact,
        quantized=[name for name in fp8 if name not in set(exact)],
    )


def list_names(what: str, names: list[str]) -> str:
    """Return a list of names for an error, or "" if there are none."""
    if not names:
        return ""
    more = [f"and {len(names) - LISTED} more"] if len(names) > LISTED else []
    return "".join(f"\n  {line}" for line in (f"{what}:", *names[:LISTED], *more))


# --- writes --------------------------------------------------------------------------------------


@torch.no_grad()
def write(stored: StoredTensors, target: Target, exact: bool) -> None:
    """Load one tensor, on all ranks."""
    tensor, local = target.tensor, own_part(target.tensor)
    if (layer := target.layer) is not None:
        reset_scales(layer)
    # With 1x32 blocks, the files lack the columnwise plane. It is quantized from the values.
    if not exact or cast(QuantizedTensor, local).format is MX_1X32:
        values = stored.read_values(target.stored, target.part, local.device)
        tensor.copy_(dtensor_like(tensor, values) if is_distributed(tensor) else values)
    if exact:
        write_codes(stored, target)


def write_codes(stored: StoredTensors, target: Target) -> None:
    """Load the codes and scales of an FP8 weight unchanged."""
    weight, parts = target.fp8_weight, parts_of(target.tensor)
    assert weight is not None and parts is not None
    if weight.format is MX_32X32:
        own = stored.read_scales(target.stored, whole_blocks(target))[..., ::32, :]
    else:
        own = stored.read_scales(target.stored, target.part)
    if weight.numel() or weight.format.per_tensor:
        parts[SCALE] = own.view(own_part(parts[SCALE]).shape)
    if weight.numel():
        parts[""] = stored.read(target.stored, target.part)
    load_parts(target.tensor, parts)
