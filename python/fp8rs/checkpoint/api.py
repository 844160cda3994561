"""Save and load checkpoints with DCP."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from fp8rs._torch import own_part
from fp8rs.nn.fp8_params import Float8Params

from .files import DamagedError, Reader, Writer, map_local
from .plans import ABSENT, LoadPlanner, MismatchError, SavePlanner
from .states import Model, Optimizer


@dataclass(frozen=True)
class _AsyncSave:
    """An unfinished asynchronous save: the process group that it uses, and the path it writes."""

    process_group: dist.ProcessGroup | None
    path: str | os.PathLike[str]


#: The unfinished asynchronous saves of this process.
_unfinished: dict[Future[None], _AsyncSave] = {}


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. Every rank raises it, with all ranks' reasons.

    Attributes:
        causes: the exceptions, by the rank that raised each.
    """

    def __init__(self, summary: str, causes: dict[int, BaseException]) -> None:
        ranks_by_text: dict[str, list[int]] = {}
        for rank, cause in sorted(causes.items()):
            ranks_by_text.setdefault(f"{type(cause).__name__}: {cause}", []).append(rank)

        lines = [summary]
        for text, ranks in ranks_by_text.items():
            cause = causes[ranks[0]]
            if isinstance(cause, MismatchError):
                # The coordinator compared all ranks, so its message already names them.
                lines.append(str(cause))
            else:
                lines.append(f"rank {', '.join(map(str, ranks))}: {text}")
        super().__init__("\n".join(lines))
        self.causes = causes


def save(
    state: dict[str, Any],
    directory: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Save a checkpoint with ``torch.distributed.checkpoint.save``. All ranks call it.

    The file ``.metadata`` is written last, and a directory without it is not a checkpoint. Existing
    checkpoints are not changed.

    Args:
        state: `Model` and `Optimizer` under names of your choice, other ``Stateful`` objects,
            tensors, numpy arrays, and values that ``torch.load(weights_only=True)`` reads. A
            converted module stands for ``Model(module)``.
        directory: a directory that does not exist and is visible to all ranks, or a URL that fsspec
            supports (``s3://``, ``gs://``, ``memory://``, ``file://``), as a str.
        process_group: the ranks that save. The default is the default group.

    Raises:
        TypeError: ``state`` is not a dictionary.
        ValueError: fsspec does not support the URL.
        CheckpointError: on all ranks, if one of them could not save. Its disk is full, ranks save
            different tensors or options under one name, a value could not be loaded again, the
            directory is not visible to all ranks, or it exists. The files of the checkpoint are
            removed.
    """
    writer = _new_writer(directory, process_group)
    summary = f"{directory} was not saved"
    current = _call_state_dicts(_wrap_models(state), summary, process_group)
    with _checkpoint_errors(summary, writer):
        state_dict_saver.save(
            current, storage_writer=writer, planner=SavePlanner(), process_group=process_group
        )


def async_save(
    state: dict[str, Any],
    directory: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None,
) -> Future[None]:
    """Copy the state to the CPU and save it in a thread, while training continues.

    If an earlier asynchronous save with this group or directory is not complete, `async_save` and
    `save` wait for it first.

    Args:
        state: as in `save`.
        directory: as in `save`.
        process_group: a group with a CPU backend that training does not use in the meantime, such
            as ``dist.new_group(backend="gloo")``. With a single process, None.

    Returns:
        A future. Its ``result()`` waits until the checkpoint is complete, and raises the errors of
        writing it as `save` does.

    Raises:
        TypeError: ``state`` is not a dictionary.
        ValueError: fsspec does not support the URL.
        CheckpointError: on all ranks, if an object of the state raised an error on one of them.
    """
    writer = _new_writer(directory, process_group)
    summary = f"{directory} was not saved"
    current = _call_state_dicts(_wrap_models(state), summary, process_group)
    with _checkpoint_errors(summary, writer):
        dcp_future: Any = state_dict_saver.async_save(
            current, storage_writer=writer, planner=SavePlanner(), process_group=process_group
        )

    # DCP's future has DCP's errors.
    future: Future[None] = Future()

    def finish(dcp_future: Future[Any]) -> None:
        try:
            with _checkpoint_errors(summary, writer):
                dcp_future.result()
            future.set_result(None)
        except Exception as error:
            future.set_exception(error)

    _unfinished[future] = _AsyncSave(process_group, writer.path)
    future.add_done_callback(_unfinished.pop)
    dcp_future.add_done_callback(finish)
    return future


def _new_writer(
    directory: str | os.PathLike[str], process_group: dist.ProcessGroup | None
) -> Writer:
    """Return the writer of a new save, after unfinished saves with its group or its path.

    Collectives of two saves would mix, and the later save would remove the files of the earlier.
    """
    writer = Writer(directory)
    earlier = []
    for future, save in list(_unfinished.items()):
        if save.process_group is process_group or save.path == writer.path:
            earlier.append(future)
    wait(earlier)
    return writer


def load(
    state: dict[str, Any],
    directory: str | os.PathLike[str],
    *,
    process_group: dist.ProcessGroup | None = None,
    strict: bool = True,
) -> None:
    """Load a checkpoint with ``torch.distributed.checkpoint.load``. All ranks call it.

    Names, shapes and dtypes are compared before anything is read. Each rank reads its part into CPU
    memory and checks the bytes before anything is written. If any rank cannot read its part, the
    model and its optimizers are unchanged.

    The number of ranks may differ from that at the save. Names are compared over all ranks, so
    ranks may have different names, such as those in a pipeline stage. Entries of the checkpoint
    under keys that ``state`` does not have are ignored. Under its keys, two kinds of entries may be
    missing in the checkpoint: histories of delayed scaling, which are reset, and scales of FP8
    weights that were saved in high precision, which are quantized.

    Args:
        state: as in `save`. Tensors are written in place. Other values are replaced.
        directory: a checkpoint written by `save` or ``torch.distributed.checkpoint.save``. It is a
            directory, or a URL that fsspec supports, as a str.
        process_group: the ranks that load. The default is the default group.
        strict: if False, load the entries that the state and the checkpoint both have, and do not
            change others, such as the optimizer state of a parameter that had no gradient before
            the save. Entries with different shapes or dtypes are still an error. So is a model, an
            optimizer or a dictionary of which the checkpoint has no entry.

    Raises:
        TypeError: ``state`` is not a dictionary.
        ValueError: fsspec does not support the URL.
        CheckpointError: on all ranks, if one of them could not load. The directory does not exist,
            files are missing or damaged, or the state does not match the checkpoint. Nothing was
            written.
    """
    summary = f"{directory} was not loaded"
    objects = _wrap_models(state)
    live = _call_state_dicts(objects, summary, process_group)

    def empty_on_cpu(tensor: Tensor) -> Tensor:
        # The planner raises an error for tensors on the meta device.
        return torch.empty_like(tensor, device=None if tensor.is_meta else "cpu")

    read = map_local(live, empty_on_cpu, key=str)

    def check() -> None:
        for key, value in objects.items():
            if isinstance(value, Optimizer):
                value.check(live[key], read[str(key)])

    reader = Reader(directory, check)
    with _checkpoint_errors(summary):
        state_dict_loader.load(
            read,
            storage_reader=reader,
            planner=LoadPlanner(strict),
            process_group=process_group,
        )

    # All ranks have read their parts. From now on, the state changes.
    with torch.no_grad():
        for key, value in objects.items():
            if read[str(key)] is ABSENT:
                continue
            is_stateful = isinstance(value, Stateful)
            loaded = _write(live[key], read[str(key)], in_place=not is_stateful)
            if is_stateful:
                live[key] = loaded
            else:
                state[key] = loaded
    for key, value in objects.items():
        if isinstance(value, Stateful):
            value.load_state_dict(live[key])


def _wrap_models(state: Any) -> dict[Any, Any]:
    """Return a copy of a state with a `Model` in the place of each converted module.

    A module has the methods of a ``Stateful`` object, but its own state dict has no histories.

    Raises:
        TypeError: ``state`` is not a dictionary.
    """
    if not isinstance(state, Mapping):
        raise TypeError(
            'state must be a dictionary such as {"model": fp8rs.checkpoint.Model(model)}, not '
            f"{type(state).__name__}"
        )
    objects: dict[Any, Any] = {}
    for key, value in state.items():
        objects[key] = Model(value) if _is_converted(value) else value
    return objects


def _is_converted(value: object) -> bool:
    """Return whether a value is a module with converted layers or experts."""
    if not isinstance(value, nn.Module):
        return False
    return any(isinstance(module, Float8Params) for module in value.modules())


def _call_state_dicts(
    state: dict[Any, Any], summary: str, process_group: dist.ProcessGroup | None
) -> dict[str, Any]:
    """Return a state with the state dicts of its ``Stateful`` objects in their place.

    DCP would call them without an exchange of errors, and other ranks would wait.

    Raises:
        CheckpointError: on all ranks, if an object raised on one of them.
    """
    current: dict[str, Any] = {}
    error: Exception | None = None
    for key, value in state.items():
        # A rank on which an object fails still joins the collectives of the next objects.
        try:
            current[key] = value.state_dict() if isinstance(value, Stateful) else value
        except Exception as e:
            error = error or e

    errors: list[BaseException | None] = [error]
    if dist.is_initialized():
        errors = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(errors, _picklable(error), process_group)
    causes = {rank: cause for rank, cause in enumerate(errors) if cause is not None}
    if causes:
        raise CheckpointError(summary, causes) from _unexplained(error, causes)
    return current


def _picklable(error: Exception | None) -> Exception | None:
    """Return an error, or a RuntimeError with its text if it cannot be sent to other ranks."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an error's own code can raise any type
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _write(live: Any, read: Any, in_place: bool) -> Any:
    """Write loaded values to the tensors and containers of a state, and return the new state.

    Args:
        live: the state, or a value in it.
        read: the loaded value. Keys are str.
        in_place: whether to write to dictionaries in place. Otherwise new ones are returned,
            without entries that are not in the checkpoint.
    """
    if isinstance(live, dict) and isinstance(read, dict):
        loaded = {}
        for key, value in live.items():
            if str(key) in read:
                loaded[key] = _write(value, read[str(key)], in_place)
        if not in_place:
            return loaded
        for key, value in loaded.items():
            live[key] = value  # Counter.update would add the values
        return live

    if isinstance(live, list) and isinstance(read, list) and len(live) == len(read):
        members = []
        for live_member, read_member in zip(live, read, strict=True):
            if read_member is not ABSENT:
                live_member = _write(live_member, read_member, in_place)
            members.append(live_member)
        return members

    if isinstance(read, Tensor) and isinstance(live, Tensor) and read.dtype == live.dtype:
        own_part(live).copy_(own_part(read))
        return live
    return read


@contextmanager
def _checkpoint_errors(summary: str, writer: Writer | None = None) -> Iterator[None]:
    """Raise a `CheckpointError` for DCP's error, and remove the written files."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        if writer is not None:
            writer.remove()
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        raise CheckpointError(summary, causes) from _unexplained(error, causes)


def _unexplained(
    error: BaseException | None, causes: dict[int, BaseException]
) -> BaseException | None:
    """Return the exception that a `CheckpointError` is raised from.

    Returns:
        None if the messages of all causes say what is wrong with the checkpoint or the state.
        Otherwise ``error``, whose tracebacks show where the others were raised.
    """
    explained = (OSError, DamagedError, MismatchError)
    if all(isinstance(cause, explained) for cause in causes.values()):
        return None
    return error
