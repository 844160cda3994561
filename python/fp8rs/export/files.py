"""Write sharded safetensors with an index and a config.json."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fp8rs._torch import unwrapped
from fp8rs.quantize.recipes import check_module
from fp8rs.storage import locate, open_store

from .formats import ServingFormat, serving_format
from .tensors import kept_layers, tensors

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"

#: The names of files that `ExportWriter` replaces.
EXPORTED = re.compile(r"config\.json|model(-\d{5,}-of-\d{5,})?\.safetensors(\.index\.json)?")

_T = TypeVar("_T")


def save_pretrained(
    model: nn.Module,
    directory: str | os.PathLike[str],
    format: str = "fp8-block",
    *,
    dtype: torch.dtype = torch.bfloat16,
    scale_fmt: str | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> None:
    """Write a model to a directory that inference servers load.

    All ranks call it. The first rank writes the tensors that `fp8rs.export.tensors` yields, and
    holds the tensors of one file in memory at a time. When all new files are written, they replace
    the files of an earlier export. An error before that leaves the earlier export unchanged. If the
    replacement is interrupted, the directory has no config.json.

    Args:
        model: as in ``tensors``. If it has a ``config``, as transformers' models do, config.json
            contains it.
        directory: a directory, which is created if it does not exist, or a URL that fsspec supports
            (``s3://``, ``gs://``, ``memory://``, ``file://``), as a str. Its files are config.json
            and either model.safetensors, or model-00001-of-0000N.safetensors and so on with
            model.safetensors.index.json.
        format: as in ``tensors``.
        dtype: as in ``tensors``.
        scale_fmt: as in ``tensors``.
        max_shard_bytes: maximum size of a file. A file with one tensor may be larger.

    Raises:
        ImportError: safetensors is not installed.
        TypeError: as in ``tensors``.
        ValueError: as in ``tensors``, or fsspec does not support the URL.
        OSError: the disk is full or not writable. Every rank raises.
    """
    check_module("model", model)
    serving = serving_format(format, scale_fmt)
    if not isinstance(max_shard_bytes, int) or max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes is {max_shard_bytes!r}; it must be a positive int")
    import_safetensors()  # raises on every rank, like the following lines
    path = locate(directory)
    config = json_of(config_of(unwrapped(model), serving, dtype))
    named_tensors = tensors(model, format, dtype=dtype, scale_fmt=scale_fmt)
    writes = not dist.is_initialized() or dist.get_rank() == 0
    error: Exception | None = None
    try:
        try:
            if writes:
                with ExportWriter(path, max_shard_bytes) as files:
                    for name, tensor in named_tensors:
                        files.add(name, tensor)
                    files.finish(config)
        finally:
            for _ in named_tensors:  # all ranks join the gathers, also after an error
                pass
    except Exception as e:
        error = e
    raise_on_all(error)


def raise_on_all(error: Exception | None) -> None:
    """Raise this rank's error, or else the first error of another rank.

    Errors of stores may not be picklable. Other ranks raise the class of Python that they extend,
    or ValueError for a UnicodeError, whose subclasses need more arguments than a message.
    """
    report: tuple[type[Exception], str] | None = None
    if error is not None:
        bases: Any = type(error).__mro__
        for cls in bases:
            if cls.__module__ == "builtins" and not issubclass(cls, UnicodeError):
                report = (cls, str(error))
                break
    reports = on_all_ranks(report)
    if error is not None:
        raise error
    for rank, other in enumerate(reports):
        if other is not None:
            cls, text = other
            raise cls(f"rank {rank}: {text}")


def on_all_ranks(value: _T) -> list[_T]:
    """Return the values of all ranks, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def config_of(model: nn.Module, serving: ServingFormat, dtype: torch.dtype) -> dict[str, Any]:
    """Return the contents of config.json: the model's config and ``quantization_config``."""
    model_config: Any = getattr(model, "config", None)
    has_config = hasattr(model_config, "to_diff_dict")
    config: dict[str, Any] = dict(model_config.to_diff_dict()) if has_config else {}
    if config:
        # Without the names of torch.compile and FSDP2.
        name = type(getattr(model, "_orig_mod", model)).__name__.removeprefix("FSDP")
        config.setdefault("architectures", [name])
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
    config.pop("quantization_config", None)
    if serving.config is not None:
        config["quantization_config"] = serving.config(*kept_layers(model))
    return config


def json_of(value: Any) -> str:
    """Return a value as the text of a JSON file."""
    return json.dumps(value, indent=2, sort_keys=True) + "\n"


def import_safetensors() -> Any:
    """Import safetensors, or raise ImportError."""
    try:
        return import_module("safetensors")
    except ImportError as error:
        raise ImportError(
            "fp8rs.export reads and writes files with safetensors, which is not installed: "
            "pip install safetensors"
        ) from error


class ExportWriter:
    """Writes the files of one export. `finish` replaces an earlier export.

    Args:
        directory: a local path, or the URL of a store.
        max_bytes: maximum size of a file. A file with one tensor may be larger.
    """

    def __init__(self, directory: Path | str, max_bytes: int) -> None:
        self._is_local = isinstance(directory, Path)
        self._max_bytes = max_bytes
        #: The tensors of the file that is written next.
        self._part: dict[str, Tensor] = {}
        self._part_bytes = 0
        self._total_bytes = 0
        #: The names of the tensors in each written file.
        self._written: list[list[str]] = []
        with _os_errors(directory):
            self._store, self._directory = open_store(directory)
            self._new = f"{self._directory}/.export-{uuid4().hex}"
            self._store.makedirs(self._new)

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor. If it does not fit in the current file, that file is written first."""
        size = tensor.numel() * tensor.element_size()
        if self._part and self._part_bytes + size > self._max_bytes:
            self._write()
        self._part[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._part_bytes += size
        self._total_bytes += size

    def _write(self) -> None:
        from safetensors.torch import save_file

        path = f"{self._new}/{len(self._written)}.safetensors"
        metadata = {"format": "pt"}
        with _os_errors(path):
            if self._is_local:
                save_file(self._part, path, metadata)
            else:
                with tempfile.TemporaryDirectory() as folder:
                    save_file(self._part, f"{folder}/part.safetensors", metadata)
                    self._store.put_file(f"{folder}/part.safetensors", path)
        self._written.append(list(self._part))
        self._part = {}
        self._part_bytes = 0

    def finish(self, config: str) -> None:
        """Write the remaining files, then replace the earlier export.

        Files of the earlier export are removed before any file is moved, because some readers take
        all files of a directory without an index. config.json is removed first and moved last.
        Inference servers do not start without it.
        """
        if self._part:
            self._write()

        # The names of the files with tensors, and the contents of the others.
        count = len(self._written)
        texts: dict[str, str] = {}
        if count == 1:
            files = [SINGLE]
        else:
            files = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
        if count > 1:
            file_of_tensor: dict[str, str] = {}
            for file, tensor_names in zip(files, self._written, strict=True):
                file_of_tensor.update(dict.fromkeys(tensor_names, file))
            metadata = {"total_size": self._total_bytes}
            texts[INDEX] = json_of({"metadata": metadata, "weight_map": file_of_tensor})
        texts[CONFIG] = config

        moves = {f"{i}.safetensors": file for i, file in enumerate(files)}
        moves.update((name, name) for name in texts)
        with _os_errors(self._directory):
            for name, text in texts.items():
                self._store.pipe_file(f"{self._new}/{name}", text.encode())
            for path in sorted(self._store.ls(self._directory, detail=False)):  # config.json first
                if EXPORTED.fullmatch(path.rpartition("/")[2]):
                    self._store.rm_file(path)
            for new, name in moves.items():
                self._store.mv(f"{self._new}/{new}", f"{self._directory}/{name}")

    def __enter__(self) -> ExportWriter:
        return self

    def __exit__(self, *error: object) -> None:
        """Remove the new files that have not replaced earlier ones."""
        with suppress(Exception):
            self._store.rm(self._new, recursive=True)


@contextmanager
def _os_errors(path: Path | str) -> Iterator[None]:
    """Raise the errors of stores and of safetensors as OSError."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{path}: {type(error).__name__}: {error}") from error
