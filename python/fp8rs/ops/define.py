"""How an operator comes to be: its signature once, from one function.

The function allocates the outputs and says what computes them::

    @operator("transpose(Tensor codes) -> Tensor")
    def transpose(codes: Tensor) -> Operation:
        out = codes.new_empty(...)
        return out, lambda: _core.transpose(codes, out)

Of fake and meta tensors the outputs are all that is needed, so this is the fake kernel too: outside
of what computes, it may look at shapes, dtypes and devices only.

On the CPU and on CUDA, operators that declare no write have kernels in Rust, without a Python frame
(``src/python/native``). They make room by the same rules, which ``opcheck`` compares. Where torch's
C interface lacks what these take, a warning says so and the function is the kernel: some
microseconds a call slower, and otherwise the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor

from fp8rs import _core

#: Outputs, and what computes them.
Operation: TypeAlias = tuple[Tensor | tuple[Tensor, ...] | None, Callable[[], None]]


class _Raiser:
    """Raises the exception that it is called with, or its ``__torch_function__`` is."""

    def __call__(self, error: BaseException) -> NoReturn:
        raise error

    @staticmethod
    def __torch_function__(func: object, types: object, args: Any, kwargs: object) -> NoReturn:
        raise args[0]


def _register_native() -> frozenset[str]:
    try:
        return frozenset(_core.register_kernels(torch.Tensor, _Raiser()))
    except _core.UnsupportedError as missing:
        warnings.warn(
            f"torch {torch.__version__} lacks what fp8rs's kernels are registered through"
            f" ({missing}): operators take some microseconds a call longer",
            RuntimeWarning,
            stacklevel=2,
        )
        return frozenset()


_library = torch.library.Library("fp8rs", "DEF")
_increment_version = torch._C._increment_version

#: The kernels in Python, by the operators' names; those without one in Rust are registered.
KERNELS: dict[str, Callable[..., Any]] = {}

#: Operators whose kernels are in Rust.
NATIVE = _register_native()


def operator(schema: str) -> Callable[[Callable[..., Operation]], Callable[..., Operation]]:
    """Define ``torch.ops.fp8rs.NAME`` from the function that is decorated."""
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    name = schema.partition("(")[0]
    names, written = _arguments(schema)

    def register(function: Callable[..., Operation]) -> Callable[..., Operation]:
        def fake(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...] | None:
            _check_devices((*args, *kwargs.values()), (*names[: len(args)], *kwargs))
            return function(*args, **kwargs)[0]

        def kernel(*args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...] | None:
            outputs, compute = function(*args, **kwargs)
            compute()
            _count_versions(args, written)
            return outputs

        _implement(name, fake, kernel)
        return function

    return register


def declared(schema: str, silent: Any) -> None:
    """Define an operator that does what ``silent`` does, an operator, and says what that writes."""
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    _, written = _arguments(schema)

    def kernel(*args: Any) -> Any:
        outputs = silent(*args)
        _count_versions(args, written)
        return outputs

    _implement(schema.partition("(")[0], silent, kernel)


def _arguments(schema: str) -> tuple[list[str], list[int]]:
    """The names of an operator's arguments, and the places of those that it says are written."""
    arguments = torch._C.parse_schema(f"fp8rs::{schema}").arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write]
    return [a.name for a in arguments], written


def _check_devices(args: Sequence[Any], names: Sequence[str]) -> None:
    """ValueError where a tensor is on another device than the first one.

    torch calls what makes room for outputs, which then nobody writes, where one tensor is on meta.
    """
    first = None
    for argument, name in zip(args, names, strict=False):
        for x in argument if isinstance(argument, (list, tuple)) else (argument,):
            if not isinstance(x, Tensor):
                continue
            if first is None:
                first, its_name = x.device, name
            elif x.device != first:
                raise ValueError(
                    f"{name} is on {x.device} and {its_name} is on {first}: both must be on one"
                )


def _count_versions(args: Sequence[Any], written: list[int]) -> None:
    for i in written:
        _increment_version((args[i],) if isinstance(args[i], Tensor) else args[i])


def _implement(name: str, fake: Callable[..., Any], kernel: Callable[..., Any]) -> None:
    torch.library.register_fake(f"fp8rs::{name}", fake, lib=_library)
    KERNELS[name] = kernel
    if name not in NATIVE:
        _library.impl(name, kernel, "CPU")
        _library.impl(name, kernel, "CUDA")
