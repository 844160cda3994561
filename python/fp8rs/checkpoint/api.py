"""Save and load checkpoints by DCP."""

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
from .plans import ABSENT, LoadPlanner, MismatchError, SavePlanner


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or loaded. Every rank raises it, with all ranks' reasons.

    Attributes:
        causes: the exceptions, by the rank that raised each.
    """

    def __init__(self, what: str, causes: dict[int, BaseException]) -> None:
        by_text: dict[str, list[int]] = {}
        for rank, cause in sorted(causes.items()):
            by_text.setdefault(f"{type(cause).__name__}: {cause}", []).append(rank)
        texts = [
            # The coordinator compares all ranks, and its message has the ranks that it is about.
            str(causes[of[0]])
            if isinstance(causes[of[0]], MismatchError)
            else f"rank {', '.join(map(str, of))}: {text}"
            for text, of in by_text.items()
        ]
        super().__init__("\n".join([what, *texts]))
        self.causes = causes


def save(
    state: dict[str, Any], directory: str | os.PathLike[str], *, process_group: Any = None
) -> None:
    """Save a checkpoint by ``torch.distributed.checkpoint.save``. All ranks call it.

    A local directory is written under another name and renamed when all ranks have written. In a
    store, the file ``.metadata`` is written last, and a directory without it is not a checkpoint.
    Older checkpoints are not touched.

    Args:
        state: `Model` and `Optimizer` under names of your choice, other ``Stateful`` objects,
            tensors, numpy arrays, and values that ``torch.load(weights_only=True)`` reads.
        directory: a directory that does not exist and that all ranks share, or a URL that fsspec
            supports (``s3://``, ``gs://``, ``memory://``, ``file://``), as a str.
        process_group: the ranks that save. The default is the default group.

    Raises:
        ValueError: fsspec does not support the URL.
        CheckpointError: on all ranks, if one of them could not save: its disk is full, ranks
            disagree on what they save, a value could not be loaded again, the ranks do not share
            the directory, or it exists. Nothing is left of the checkpoint.
    """
    writer = Writer(directory)
    with _clear_errors(f"{directory} was not saved", writer):
        state_dict_saver.save(
            state, storage_writer=writer, planner=SavePlanner(), process_group=process_group
        )


def async_save(
    state: dict[str, Any], directory: str | os.PathLike[str], *, process_group: Any
) -> Future[None]:
    """Copy the state to the CPU and save it in a thread, while training goes on.

    Args:
        state: as for `save`.
        directory: as for `save`.
        process_group: a group with a CPU backend that nothing else uses meanwhile, neither training
            nor another save: ``dist.new_group(backend="gloo")``. None is the default group, of a
            single process.

    Returns:
        A future. Its ``result()`` waits until the checkpoint is complete, and raises what `save`
        raises.
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
    state: dict[str, Any],
    directory: str | os.PathLike[str],
    *,
    process_group: Any = None,
    strict: bool = True,
) -> None:
    """Load a checkpoint by ``torch.distributed.checkpoint.load``. All ranks call it.

    Names, shapes and dtypes are compared before anything is read. Bytes are checked before anything
    is written: all of a rank's state is first read into CPU memory. If any rank cannot read its
    part, the model and its optimizers are as they were.

    Any number of ranks reads a checkpoint of any other number. Names are compared over all ranks,
    so each rank may have its own: the names of a pipeline stage, for example. Entries of the
    checkpoint under keys that ``state`` does not have are ignored. Under its keys only two things
    may be missing in the checkpoint: histories of delayed scaling, which start again, and scales of
    FP8 weights that it has in high precision, which are quantized.

    Args:
        state: as for `save`. Tensors are written in place. Other values are replaced.
        directory: a checkpoint of `save` or of ``torch.distributed.checkpoint.save``: a directory,
            or a URL that fsspec supports, as a str.
        process_group: the ranks that load. The default is the default group.
        strict: False loads the entries that the state and the checkpoint both have, and leaves the
            others as they are: a parameter without a saved optimizer state, say, since it had no
            gradient yet. Entries of another shape or dtype are still an error.

    Raises:
        ValueError: fsspec does not support the URL.
        CheckpointError: on all ranks, if one of them could not load: files are missing or damaged,
            or the state does not fit the checkpoint. Nothing was written.
    """
    reader = Reader(directory)
    live = {k: v.state_dict() if isinstance(v, Stateful) else v for k, v in state.items()}
    read = mapped(live, lambda t: torch.empty_like(t, device="cpu"), str)
    with _clear_errors(f"{directory} was not loaded"):
        state_dict_loader.load(
            read,
            storage_reader=reader,
            planner=LoadPlanner(strict),
            process_group=process_group,
        )
    with torch.no_grad():
        for key, value in state.items():
            if read[str(key)] is ABSENT:
                continue
            written = _written(live[key], read[str(key)], keep=not isinstance(value, Stateful))
            if isinstance(value, Stateful):
                live[key] = written
            else:
                state[key] = written
    for key, value in state.items():
        if isinstance(value, Stateful):
            value.load_state_dict(live[key])


def _written(live: Any, read: Any, keep: bool) -> Any:
    """Write what was read to the tensors and containers of a state, and return what it is now.

    Args:
        live: the state, or a value in it.
        read: what was read for it. Its keys are str.
        keep: whether to write to dictionaries too. Otherwise new ones are returned, which do not
            have the entries that the checkpoint does not have.
    """
    if isinstance(live, dict) and isinstance(read, dict):
        found = {k: _written(v, read[str(k)], keep) for k, v in live.items() if str(k) in read}
        if not keep:
            return found
        for k, v in found.items():
            live[k] = v  # which Counter.update would add
        return live
    if isinstance(live, list) and isinstance(read, list) and len(live) == len(read):
        return [v if r is ABSENT else _written(v, r, keep) for v, r in zip(live, read, strict=True)]
    if isinstance(read, Tensor) and isinstance(live, Tensor) and read.dtype == live.dtype:
        own_part(live).copy_(own_part(read))
        return live
    return read


@contextmanager
def _clear_errors(what: str, writer: Writer | None = None) -> Iterator[None]:
    """Raise a `CheckpointError` for DCP's error, and remove what was written so far."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            yield
    except CheckpointException as error:
        if writer is not None:
            writer.remove()
        causes = {rank: cause for rank, (cause, _) in error.failures.items()}
        raise CheckpointError(what, causes) from error
