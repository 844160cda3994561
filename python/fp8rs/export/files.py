"""Sharded safetensors with an index and a config.json, as transformers and servers read them."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .formats import ServingFormat, serving_format
from .tensors import kept_layers, tensors

INDEX = "model.safetensors.index.json"


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    format: str = "fp8-block",
    *,
    dtype: torch.dtype = torch.bfloat16,
    scale_fmt: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write what ``tensors`` gives to a directory that servers load.

    All ranks call it; the first one writes, one file's tensors in memory at a time. Files of an
    export that was there before are replaced once all new ones are written: an error leaves them as
    they were.

    Args:
        model: as for ``tensors``. Where it has a ``config`` as transformers' models do, that is
            saved with it.
        directory: made if it is not there. It gets model.safetensors, or
            model-00001-of-0000N.safetensors and so on with model.safetensors.index.json, and
            config.json with what the format says under ``quantization_config``.
        format: as for ``tensors``.
        dtype: likewise.
        scale_fmt: likewise.
        max_shard_bytes: how large files are, unless a tensor is larger.

    Raises:
        ImportError: safetensors is not installed.
        TypeError, ValueError: as ``tensors``.
        OSError: what is written did not fit, or may not be written; on every rank.
    """
    serving = serving_format(format, scale_fmt)
    if not isinstance(max_shard_bytes, int) or max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes!r}; it must be a positive int")
    # Errors of these are every rank's.
    save, path = safetensors_writer(), Path(directory)
    config = json_of(config_of(model, serving, dtype))
    each = tensors(model, format, dtype=dtype, scale_fmt=scale_fmt)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    error: OSError | None = None
    try:
        if writes:
            with Files(path, max_shard_bytes, save) as files:
                for name, tensor in each:
                    files.add(name, tensor)
                files.finish(config)
    except OSError as e:
        error = e
    for _ in each:  # ranks that write nothing, or no more: the others' gathers want them
        pass
    raise_on_all(error)


def raise_on_all(error: OSError | None) -> None:
    """Raise the first rank's error on every rank."""
    text: list[Any] = [None if error is None else str(error)]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(text)
    if error is not None:
        raise error
    if text[0] is not None:
        raise OSError(f"rank 0 could not write the model: {text[0]}")


def config_of(model: nn.Module, serving: ServingFormat, dtype: torch.dtype) -> dict[str, Any]:
    """What config.json says: the model's own, and how weights are quantized."""
    own: Any = getattr(model, "config", None)
    config: dict[str, Any] = dict(own.to_diff_dict()) if hasattr(own, "to_diff_dict") else {}
    if config:
        config.setdefault("architectures", [architecture(model)])
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("quantization_config", None)
    if serving.config is not None:
        config["quantization_config"] = serving.config(kept_layers(model))
    return config


def architecture(model: nn.Module) -> str:
    """The name of a model's class, which compilers wrap; FSDP2 puts its own in front of it."""
    return type(getattr(model, "_orig_mod", model)).__name__.removeprefix("FSDP")


def json_of(value: Any) -> str:
    """The text of a JSON file."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


#: Writes tensors to a file.
Save = Callable[[dict[str, Tensor], Path], None]


def safetensors_writer() -> Save:
    """What raises ImportError where safetensors is not installed, and OSError of a full disk."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    def save(tensors: dict[str, Tensor], path: Path) -> None:
        try:
            save_file(tensors, path, metadata={"format": "pt"})
        except SafetensorError as error:  # as which it raises what the disk refuses
            raise OSError(f"{path}: {error}") from error

    return save


class Files:
    """The files of one export, written beside the directory's own until they are all there."""

    def __init__(self, directory: Path, max_bytes: int, save: Save) -> None:
        self._directory, self._max_bytes, self._save = directory, max_bytes, save
        directory.mkdir(parents=True, exist_ok=True)
        self._new = Path(tempfile.mkdtemp(prefix=".export-", dir=directory))
        self._part: dict[str, Tensor] = {}
        self._part_bytes = self._total_bytes = 0
        #: The names in each file that is written.
        self._written: list[list[str]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take in one tensor; a file is written when the next one would not fit."""
        size = tensor.numel() * tensor.element_size()
        if self._part and self._part_bytes + size > self._max_bytes:
            self._write()
        self._part[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._part_bytes += size
        self._total_bytes += size

    def _write(self) -> None:
        self._save(self._part, self._new / f"{len(self._written)}.safetensors")
        self._written.append(list(self._part))
        self._part, self._part_bytes = {}, 0

    def finish(self, config: str) -> None:
        """Write the rest and config.json, and put all in the place of what was there."""
        if self._part:
            self._write()
        count = len(self._written)
        names = [file_name(i, count) for i in range(count)]
        if count > 1:
            where = {t: file for file, held in zip(names, self._written, strict=True) for t in held}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": where}
            (self._new / INDEX).write_text(json_of(index))
        (self._new / "config.json").write_text(config)
        for i, name in enumerate(names):
            os.replace(self._new / f"{i}.safetensors", self._directory / name)
        others = ["config.json", *([INDEX] if count > 1 else [])]
        for name in others:
            os.replace(self._new / name, self._directory / name)
        for path in self._directory.glob("model*.safetensors*"):
            if path.name not in (*names, *others):
                path.unlink()

    def __enter__(self) -> Files:
        return self

    def __exit__(self, *error: object) -> None:
        """Remove what was not put in its place."""
        shutil.rmtree(self._new, ignore_errors=True)


def file_name(number: int, count: int) -> str:
    """The name of one of ``count`` files."""
    if count == 1:
        return "model.safetensors"
    return f"model-{number + 1:05}-of-{count:05}.safetensors"
