"""Save and load, by DCP: a checkpoint is there whole or not at all, and a load leaves no half."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.stateful import Stateful

from fp8rs._torch import own_part

from .files import Reader, Writer, mapped
from .plans import LoadPlanner, SavePlanner


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded; each rank has this error, with all ranks' reasons.

    Attributes:
        causes: the exception of each rank that had one.
    """

    def __init__(self, what: str, causes: dict[int, BaseException]) -> None:
        by_text: dict[str, list[int]] = {}
        for rank, cause in sorted(causes.items()):
            by_text.setdefault(f"{type(cause).__name__}: {cause}", []).append(rank)
        texts = [f"rank {', '.join(map(str, of))}: {text}" for text, of in by_text.items()]
        super().__init__("\n".join([what, *texts]))
        self.causes = causes


def save(
    state: dict[str, Any], directory: str | os.PathLike[str], *, process_group: Any = None
) -> None:
    """Save a checkpoint, by ``torch.distributed.checkpoint.save`` on all ranks.

    It is written to a directory beside, which gets its name when all ranks have written: an older
    checkpoint is as it was, whatever happens.

    Args:
        state: `Model` and `Optimizer` under names of your choice, other ``Stateful`` objects,
            tensors, and values that ``torch.load(weights_only=True)`` takes.
        directory: of this checkpoint; it does not exist yet.
        process_group: of the ranks that save; the default group.

    Raises:
        CheckpointError: on all ranks, where one could not: its disk is full, ranks disagree on what
            they save, or the directory exists. Nothing is left of the checkpoint.
    """
    writer = Writer(directory)
    with _clear_errors(f"{directory} was not saved", writer):
        state_dict_saver.save(
            state, storage_writer=writer, planner=SavePlanner(), process_group=process_group
        )


def async_save(
    state: dict[str, Any], directory: str | os.PathLike[str], *, process_group: Any
) -> Future[None]:
    """As `save`, from a copy on the CPU, in a thread: training goes on meanwhile.

    Args:
        state: as for `save`.
        directory: as there.
        process_group: one with a backend for the CPU that nothing else uses meanwhile: neither
            training nor another save (``dist.new_group(backend="gloo")``). None is the default
            group, of a single process.

    Returns:
        A future. Its ``result()`` waits until the checkpoint has its name, and raises what `save`
        does.
    """
    writer = Writer(directory)
    what = f"{directory} was not saved"
    done: Future[None] = Future()
    with _clear_errors(what, writer):
        saving: Any = state_dict_saver.async_save(
            state, storage_writer=writer, planner=SavePlanner(), process_group=process_group
        )

    def finish(saved: Future[Any]) -> None:
        try:
            with _clear_errors(what, writer):
                saved.result()
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)

    saving.add_done_callback(finish)
    return done


def load(
    state: dict[str, Any], directory: str | os.PathLike[str], *, process_group: Any = None
) -> None:
    """Load a checkpoint, by ``torch.distributed.checkpoint.load`` on all ranks.

    Names, shapes and dtypes are compared before anything is read, and bytes are checked before
    anything is written: all is read into memory of the CPU first, as much as a rank has of the
    state. So the model and its optimizers are as they were, if any rank cannot read its part.

    Any number of ranks reads a checkpoint of any other. What a checkpoint has beside the keys of
    ``state`` is left alone. Under these keys only two things may be absent: histories of delayed
    scaling, which begin anew, and scales of FP8 weights that the checkpoint has in high precision,
    which are quantized.

    Args:
        state: as for `save`. Tensors are written in place; other values are replaced in it.
        directory: of the checkpoint; one that ``torch.distributed.checkpoint.save`` has written
            will do.
        process_group: of the ranks that load; the default group.

    Raises:
        CheckpointError: on all ranks, where one could not: files are missing or damaged, or the
            state differs from the checkpoint, in what the message lists. Nothing was written.
    """
    live = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state.items()}
    read = mapped(live, lambda t: torch.empty_like(t, device="cpu"))
    with _clear_errors(f"{directory} was not loaded"):
        state_dict_loader.load(
            read,
            storage_reader=Reader(directory),
            planner=LoadPlanner(),
            process_group=process_group,
        )
    with torch.no_grad():
        live = _written(live, read)
    for key, value in state.items():
        if isinstance(value, Stateful):
            value.load_state_dict(live[key])
        else:
            state[key] = live[key]


def _written(live: Any, read: Any) -> Any:
    """What was read, in the tensors that are there for it."""
    if isinstance(read, dict):
        return {key: _written(live[key], value) for key, value in read.items()}
    if isinstance(read, Tensor) and isinstance(live, Tensor) and read.dtype == live.dtype:
        own_part(live).copy_(own_part(read))
        return live
    return read


@contextmanager
def _clear_errors(what: str, writer: Writer | None = None) -> Iterator[None]:
    """Have what DCP raises on all ranks say what happened, and leave no half of a checkpoint."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        if writer is not None:
            writer.remove()
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        raise CheckpointError(what, causes) from error
