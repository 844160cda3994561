"""Read and write the files of a checkpoint, in a local directory or a store."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from fp8rs._torch import fsspec_file_system, own_part
from fp8rs.storage import locate

from .parts import distribute_like

#: Endings of the names of files that an unfinished save may have left.
UNFINISHED = (".distcp", ".metadata.tmp")


class DamagedError(ValueError):
    """A file of a checkpoint is missing, truncated or damaged."""


def map_local(value: Any, function: Any, key: Any = lambda k: k, other: Any = lambda v: v) -> Any:
    """Apply a function to this rank's part of each tensor in a state.

    Args:
        value: the state, or a value in it.
        function: called with local tensors.
        key: called with the keys of dictionaries that DCP flattens. DCP does not flatten tuples.
        other: called with values that are not tensors.
    """
    if isinstance(value, dict):
        return {key(name): map_local(item, function, key, other) for name, item in value.items()}
    if type(value) is list:
        return [map_local(item, function, key, other) for item in value]
    if type(value) is tuple:
        return tuple(map_local(item, function, other=other) for item in value)
    if not isinstance(value, Tensor):
        return other(value)
    return distribute_like(value, function(own_part(value).detach()))


def copy_if_possible(value: Any) -> Any:
    """Return a deep copy, or the value itself if it has none. The planner refuses such a value."""
    try:
        return deepcopy(value)
    except Exception:  # any type can raise any error
        return value


class Writer(FileSystemWriter):
    """DCP's writer, which keeps existing checkpoints and removes the files of a failed save.

    DCP writes ``.metadata`` last and renames it into place. A directory without it is not a
    checkpoint.

    Until all ranks have planned, no rank writes anything. The coordinator then removes what an
    unfinished save has left, and after that the ranks create the directory and write.

    Args:
        directory: the directory or URL of the checkpoint.

    Raises:
        ValueError: fsspec does not support the URL, or torch does not write the checksums that
            `find_damage` reads.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        if not torch.serialization.get_crc32_options():
            raise ValueError(
                "checkpoints need checksums, which torch.serialization.set_crc32_options(False) "
                "has switched off. Call it with True"
            )
        located = locate(directory)
        self.local = isinstance(located, Path)
        # A store cannot flush a file before it is closed.
        super().__init__(located, sync_files=self.local)
        if isinstance(located, str):
            self.fs, self.path = fsspec_file_system(located), cast(Any, located)
        self._begun = False

    def stage(self, state_dict: Any) -> Any:
        """Copy the state of an asynchronous save to the CPU."""
        self.per_thread_copy_ahead = 0
        return map_local(state_dict, lambda t: t.to("cpu", copy=True), other=copy_if_possible)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check that the directory is new.

        Raises:
            FileExistsError: the directory exists, and an unfinished save did not create it.
        """
        if is_coordinator and self._exists():
            raise FileExistsError(
                f"{self.path} exists, and checkpoints are not overwritten, because the old one "
                "would be lost if this save failed. Save under another name"
            )
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan. DCP's writer would create the directory here."""
        return plan

    def _exists(self) -> bool:
        """Return whether there are files that an unfinished save has not left."""
        if not self.fs.exists(self.path):
            return False
        if self.local:
            if not os.path.isdir(self.path):
                return True
            names = os.listdir(self.path)
        else:
            names = cast(Any, self.fs).fs.ls(self.path, detail=False)
        return not all(name.endswith(UNFINISHED) for name in names)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Remove the files of an unfinished save, on the coordinator."""
        self._begun = True
        self.remove()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Create the directory and write this rank's files."""
        # A local path may name a different disk on each rank. A store is shared.
        self._begun = self._begun or self.local
        self.fs.mkdir(self.path)
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Write the metadata.

        Raises:
            DamagedError: files that ranks have written are not visible to the coordinator.
        """
        self._check_written(results)
        super().finish(metadata, results)

    def _check_written(self, results: list[list[WriteResult]]) -> None:
        sizes: dict[str, tuple[int, int]] = {}
        for rank, written in enumerate(results):
            for info in (result.storage_data for result in written):
                _, size = sizes.get(info.relative_path, (rank, 0))
                sizes[info.relative_path] = rank, max(size, info.offset + info.length)
        if not self.local:
            cast(Any, self.fs).fs.invalidate_cache()
        missing = []
        for name, (rank, size) in sizes.items():
            try:
                with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as file:
                    found = file.seek(0, os.SEEK_END)
            except FileNotFoundError:
                found = 0
            if found < size:
                missing.append(f"{name} (rank {rank}, {found} of {size} bytes)")
        if missing:
            raise DamagedError(
                f"{len(missing)} of {len(sizes)} files in {self.path} are not visible to the first "
                f"rank: {', '.join(missing[:3])}{', ...' if missing[3:] else ''}. Pass a directory "
                "on a file system that all ranks share, or the URL of a store"
            )

    def remove(self) -> None:
        """Remove the files of a failed save, if all ranks have planned.

        In a store, the coordinator removes them.
        """
        if not self._begun:
            return
        if self.local:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            with suppress(Exception):  # an error here would hide why the save failed
                cast(Any, self.fs).fs.rm(self.path, recursive=True)


class Reader(FileSystemReader):
    """Reads a checkpoint and checks its bytes.

    Args:
        directory: the directory or URL of the checkpoint.
        check: called when this rank has read its entries. All ranks raise its errors.
    """

    def __init__(self, directory: str | os.PathLike[str], check: Callable[[], None]) -> None:
        located = locate(directory)
        super().__init__(located)
        self.check = check
        if isinstance(located, str):
            self.fs, self.path = fsspec_file_system(located), cast(Any, located)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata, or store the error and return empty metadata.

        If this raised, DCP would look for other files and drop the error. `set_up_storage_reader`
        raises it.
        """
        self.problem: Exception | None = None
        try:
            return super().read_metadata(*args, **kwargs)
        except Exception as error:  # stores have their own types, and damaged bytes raise any type
            exists = True
            with suppress(Exception):  # a store that cannot be read may raise here too
                exists = not isinstance(error, FileNotFoundError) or self.fs.exists(self.path)
            if exists:
                self.problem = DamagedError(
                    f"{self.path} is not a checkpoint, or is incomplete: {_first_line(error)}"
                )
            else:
                self.problem = FileNotFoundError(
                    f"{self.path} does not exist. Expected the directory of a checkpoint"
                )
            return Metadata({})

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        """Set up DCP's reader.

        Raises:
            FileNotFoundError: the directory does not exist.
            DamagedError: the metadata could not be read.
        """
        if self.problem is not None:
            raise self.problem
        super().set_up_storage_reader(*args, **kwargs)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        data = super()._slice_file(file, sinfo).read()
        problem = find_damage(data, sinfo.length)
        if problem is not None:
            path = self.fs.concat_path(self.path, sinfo.relative_path)
            raise DamagedError(f"{path} is damaged: {problem}")
        return io.BytesIO(data)

    def read_data(self, plan: Any, planner: Any) -> Any:
        """Read the entries of a plan.

        Raises:
            DamagedError: a file is missing or damaged.
            Exception: `check` raised it.
        """
        try:
            done = super().read_data(plan, planner)
        except OSError as error:
            raise DamagedError(f"a file of {self.path} cannot be read: {error}") from None
        self.check()
        return done


def find_damage(data: bytes, length: int) -> str | None:
    """Return a description of damage to the bytes of one ``torch.save``, or None."""
    if len(data) != length:
        return f"it ends after {len(data)} of a tensor's {length} bytes"
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            # torch leaves the memory of an entry that is marked as a directory undefined.
            marked = [info.filename for info in archive.infolist() if info.external_attr & 0x10]
            broken = archive.testzip()
    except Exception as error:  # damaged bytes can raise any type
        return _first_line(error)
    if marked:
        return f"{marked[0]} is marked as a directory"
    return None if broken is None else f"{broken} does not match its checksum"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
