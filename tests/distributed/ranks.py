"""The `ranks` decorator, which turns a function into a pytest test on several ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from .pool import MOST_WORKERS, WORKERS, pool

SECONDS = 240.0
"""A case's time-out. The slowest takes seconds; on a machine that others load one was seen at work
after a minute."""


def ranks(
    *world_sizes: int,
    cpu: bool = True,
    cuda: bool = True,
    seconds: float = SECONDS,
    by: Callable[..., int] | None = None,
) -> Callable:
    """Run the decorated function on every rank of each of these world sizes.

    `cuda=False` excludes CUDA, and `cpu=False` excludes the CPU. `seconds` is the timeout on CPU.
    `by` computes the only world size of a case from its `device_type` and its other arguments. If
    the function has a `check` attribute, it is called with the results by rank.
    """
    for world_size in world_sizes:
        most = WORKERS if cpu else MOST_WORKERS
        if not 1 <= world_size <= most:
            raise ValueError(f"world size {world_size}: the pool has at most {most} workers")

    def decorate(case: Callable) -> Callable:
        parameters = [p for p in inspect.signature(case).parameters.values() if p.name != "rig"]

        def test(*, device_type: str, world_size: int = 0, **arguments: Any) -> None:
            if by is not None:
                world_size = by(device_type=device_type, **arguments)
            if device_type == "cuda":
                need_gpus(world_size)
            pool().run(case.__module__, case.__name__, world_size, device_type, arguments, seconds)

        # pytest reads the signature to find the arguments of the test.
        keyword = inspect.Parameter.KEYWORD_ONLY
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                *(p.replace(kind=keyword) for p in parameters),
                *([] if by else [inspect.Parameter("world_size", keyword)]),
                inspect.Parameter("device_type", keyword),
            ]
        )
        test.__name__ = case.__name__
        test.__qualname__ = case.__qualname__
        test.__module__ = case.__module__
        test.__doc__ = case.__doc__
        test.case = case  # type: ignore[attr-defined]
        test.pytestmark = list(getattr(case, "pytestmark", []))  # type: ignore[attr-defined]
        devices: list[Any] = ["cpu"] if cpu else []
        if cuda:
            devices.append(pytest.param("cuda", marks=pytest.mark.gpu))
        parametrize = pytest.mark.parametrize
        if by is None:
            test = parametrize("world_size", world_sizes, ids=lambda n: f"{n}ranks")(test)
        return parametrize("device_type", devices)(test)

    return decorate


def need_gpus(count: int) -> None:
    """Skip a test that needs more GPUs than there are. This does not initialize CUDA."""
    import torch

    if not torch.distributed.is_nccl_available() or torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
