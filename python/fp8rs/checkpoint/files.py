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


#: The attribute of an entry of a zip file that marks a directory.
MSDOS_DIRECTORY = 0x10


class DamagedError(ValueError):
    """A file of a checkpoint is missing, truncated or damaged."""


def _unchanged(value: Any) -> Any:
    return value


def map_local(
    value: Any,
    function: Callable[[Tensor], Tensor],
    key: Callable[[Any], Any] = _unchanged,
    other: Callable[[Any], Any] = _unchanged,
) -> Any:
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
            self.fs = fsspec_file_system(located)
            self.path = cast(Any, located)
        #: Whether this save may have files in the directory, which `remove` then removes.
        self._may_have_files = False

    def stage(self, state_dict: Any) -> Any:
        """Copy the state of an asynchronous save to the CPU."""
        self.per_thread_copy_ahead = 0

        def to_cpu(tensor: Tensor) -> Tensor:
            return tensor.to("cpu", copy=True)

        return map_local(state_dict, to_cpu, other=copy_if_possible)

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
        self._may_have_files = True
        self.remove()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Create the directory and write this rank's files."""
        # A local path may name a different disk on each rank. A store is shared.
        if self.local:
            self._may_have_files = True
        self.fs.mkdir(self.path)
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Write the metadata.

        Raises:
            DamagedError: files that ranks have written are not visible to the coordinator.
        """
        self._check_files(results)
        super().finish(metadata, results)

    def _check_files(self, results: list[list[WriteResult]]) -> None:
        """Raise DamagedError if a file is shorter than what its rank has written to it."""
        rank_by_file: dict[str, int] = {}
        size_by_file: dict[str, int] = {}
        for rank, rank_results in enumerate(results):
            for result in rank_results:
                info = result.storage_data
                name = info.relative_path
                rank_by_file[name] = rank
                size_by_file[name] = max(size_by_file.get(name, 0), info.offset + info.length)

        # Compare the sizes with what this rank, the coordinator, sees.
        if not self.local:
            cast(Any, self.fs).fs.invalidate_cache()
        missing = []
        for name, size in size_by_file.items():
            try:
                with self.fs.create_stream(self.fs.concat_path(self.path, name), "rb") as file:
                    visible_size = file.seek(0, os.SEEK_END)
            except FileNotFoundError:
                visible_size = 0
            if visible_size < size:
                rank = rank_by_file[name]
                missing.append(f"{name} (rank {rank}, {visible_size} of {size} bytes)")

        if missing:
            names = ", ".join(missing[:3])
            if len(missing) > 3:
                names += ", ..."
            raise DamagedError(
                f"{len(missing)} of {len(size_by_file)} files in {self.path} are not visible to "
                f"the first rank: {names}. Pass a directory on a file system that all ranks share, "
                "or the URL of a store"
            )

    def remove(self) -> None:
        """Remove the files of a failed save, if all ranks have planned.

        In a store, the coordinator removes them.
        """
        if not self._may_have_files:
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
            self.fs = fsspec_file_system(located)
            self.path = cast(Any, located)

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
            future = super().read_data(plan, planner)
        except OSError as error:
            raise DamagedError(f"a file of {self.path} cannot be read: {error}") from None
        self.check()
        return future


def find_damage(data: bytes, length: int) -> str | None:
    """Return a description of damage to the bytes of one ``torch.save``, or None."""
    if len(data) != length:
        return f"it ends after {len(data)} of a tensor's {length} bytes"
    directories = []
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            # torch leaves the memory of an entry that is marked as a directory undefined.
            for info in archive.infolist():
                if info.external_attr & MSDOS_DIRECTORY:
                    directories.append(info.filename)
            bad_entry = archive.testzip()
    except Exception as error:  # damaged bytes can raise any type
        return _first_line(error)
    if directories:
        return f"{directories[0]} is marked as a directory"
    if bad_entry is not None:
        return f"{bad_entry} does not match its checksum"
    return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
