"""The files of a checkpoint: whole or not there when written, checked when read."""

from __future__ import annotations

import importlib
import io
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan

from fp8rs._torch import is_distributed, own_part

from .parts import like

METADATA = ".metadata"

#: DCP's classes, which a checkpoint's metadata is made of.
CLASSES = "torch.distributed.checkpoint.metadata"
#: What it is made of beside.
VALUES = (
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
)
MODULES = {CLASSES, *(module for module, _ in VALUES)}


class DamagedError(ValueError):
    """A file of a checkpoint is missing, cut short, or has other bytes than were written."""


def mapped(value: Any, function: Any) -> Any:
    """A state dict with a function applied to each rank's own tensors."""
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mapped(item, function) for item in value)
    if not isinstance(value, Tensor):
        return value
    own = function(own_part(value).detach())
    return like(value, own) if is_distributed(value) else own


class Writer(FileSystemWriter):
    """DCP's own, into a directory that gets its name when all ranks have written.

    Args:
        directory: of the checkpoint; there is none yet.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        super().__init__(self.directory.with_name(f"{self.directory.name}.partial"))

    def stage(self, state_dict: Any) -> Any:
        """A copy on the CPU of what an asynchronous save is to write."""
        self.per_thread_copy_ahead = 0
        return mapped(state_dict, lambda t: t.to("cpu", copy=True))

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remove what a save that failed has left.

        Raises:
            FileExistsError: there is a checkpoint of this name.
        """
        if is_coordinator:
            if self.directory.exists():
                raise FileExistsError(
                    f"{self.directory} exists, and checkpoints are not overwritten: the one before "
                    "would be lost if this one fails. Save under another name"
                )
            self.remove()
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See the base; the directory may have gone with what was left in it."""
        self.fs.mkdir(self.path)
        return super().prepare_global_plan(plans)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Give the directory its name: all ranks have written."""
        super().finish(metadata, results)
        Path(self.path).rename(self.directory)

    def remove(self) -> None:
        """Remove what is not whole."""
        shutil.rmtree(self.path, ignore_errors=True)


class Reader(FileSystemReader):
    """DCP's own, which takes no bytes but those that were written."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint has; nothing where that cannot be had, of which the next call tells.

        DCP would go on to look for other files after an error here, and not pass it on.
        """
        path = Path(self.path, METADATA)
        self.problem: DamagedError | None = None
        try:
            metadata = parse_metadata(path.read_bytes())
        except OSError as error:
            self.problem = DamagedError(f"{self.path} is no checkpoint, or not whole: {error}")
        except Exception as error:  # whatever bytes of chance lead to
            self.problem = DamagedError(f"{path} is damaged: {_first_line(error)}")
        if self.problem is not None:
            return Metadata({})
        metadata.storage_meta = StorageMeta(checkpoint_id=self.path, load_id=self.load_id)
        return metadata

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        """See the base.

        Raises:
            DamagedError: the metadata could not be had.
        """
        if self.problem is not None:
            raise self.problem
        super().set_up_storage_reader(*args, **kwargs)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        data = super()._slice_file(file, sinfo).read()
        problem = damage(data, sinfo.length)
        if problem is not None:
            raise DamagedError(f"{Path(self.path, sinfo.relative_path)} is damaged: {problem}")
        return io.BytesIO(data)

    def read_data(self, plan: Any, planner: Any) -> Any:
        """See the base.

        Raises:
            DamagedError: a file is missing or damaged.
        """
        try:
            return super().read_data(plan, planner)
        except OSError as error:
            raise DamagedError(f"a file of {self.path} cannot be read: {error}") from None


def damage(data: bytes, length: int) -> str | None:
    """What is wrong with the bytes of one tensor, as ``torch.save`` wrote them; None if nothing."""
    if len(data) != length:
        return f"it ends after {len(data)} of a tensor's {length} bytes"
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            broken = archive.testzip()
    except Exception as error:  # whatever bytes of chance lead to
        return _first_line(error)
    return None if broken is None else f"{broken} has another checksum than was written"


class _Unpickler(pickle.Unpickler):
    """Makes plain values and what DCP's metadata has, and calls nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(importlib.import_module(module), name, None) if module in MODULES else None
        known = (module, name) in VALUES or isinstance(found, torch.dtype)
        if known or (module == CLASSES and getattr(found, "__module__", None) == CLASSES):
            return found
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def parse_metadata(data: bytes) -> Metadata:
    """The metadata of a checkpoint, from its bytes.

    Raises:
        Exception: of any kind, where they are not that.
    """
    metadata = _Unpickler(io.BytesIO(data)).load()
    if not isinstance(metadata, Metadata):
        raise ValueError("it is not a checkpoint's metadata")
    names: set[tuple[str, Any]] = set()
    for index, info in metadata.storage_data.items():
        relative = Path(info.relative_path)
        if relative.is_absolute() or ".." in relative.parts or min(info.offset, info.length) < 0:
            raise ValueError(f"{index.fqn} lies outside of the checkpoint")
        names.add((index.fqn, index.offset))
    for name, entry in metadata.state_dict_metadata.items():
        stored: list[Any] = [None]
        if isinstance(entry, TensorStorageMetadata):
            _check_chunks(name, entry)
            stored = [chunk.offsets for chunk in entry.chunks]
        if not {(name, offsets) for offsets in stored} <= names:
            raise ValueError(f"{name} is in no file")
    return metadata


def _check_chunks(name: str, entry: TensorStorageMetadata) -> None:
    """ValueError where the chunks of a tensor do not make up all of it."""
    size = torch.Size(entry.size)
    covered = 0
    for chunk in entry.chunks:
        ends = [o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        inside = all(
            0 <= o <= end <= n for o, end, n in zip(chunk.offsets, ends, size, strict=True)
        )
        if not inside:
            raise ValueError(f"{name} has a part outside of it")
        covered += torch.Size(chunk.sizes).numel()
    if covered != size.numel():
        raise ValueError(f"{name} has {covered} of {size.numel()} elements")


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
