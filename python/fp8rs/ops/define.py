"""Decorators that define an operator from the signature of one function.

The function allocates the outputs, for fake and meta tensors. It may use only shapes, dtypes and
devices:

    @native_op
    def transpose(codes: Tensor) -> Tensor:
        return codes.new_empty(...)

Most operators have their CPU and CUDA kernels in Rust (``src/python/native``), without a Python
frame. These kernels allocate outputs and check arguments themselves. ``opcheck`` compares their
outputs with the function's.

Operators that call torch's grouped GEMMs have their kernels in Python. So do operators that declare
a write, because torch's C interface cannot increment a tensor's version:

    @python_op(native_random_uniform, mutates_args=["x"])
    def random_uniform_(x: Tensor, seed: int) -> None: ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from fp8rs._core import register_kernels as native_register_kernels

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Raiser:
    """Raises the exception that it, or its ``__torch_function__``, is called with."""

    def __call__(self, error: BaseException) -> NoReturn:
        raise error

    @staticmethod
    def __torch_function__(func: object, types: object, args: Any, kwargs: object) -> NoReturn:
        raise args[0]


#: Operators whose kernels are in Rust.
NATIVE = frozenset(native_register_kernels(torch.Tensor, _Raiser()))

_library = torch.library.Library("fp8rs", "DEF")
_increment_version = torch._C._increment_version


def native_op(function: _Function, name: str | None = None) -> _Function:
    """Define an operator whose kernels are in Rust. The default name is the function's."""
    _define(function, (), name or function.__name__)
    return function


def python_op(
    compute: Callable[..., Any], *, mutates_args: Sequence[str] = ()
) -> Callable[[_Function], _Function]:
    """Define the operator with the function's name, whose kernel is ``compute``."""

    def register(function: _Function) -> _Function:
        names = _define(function, mutates_args, function.__name__)
        mutated_positions = [names.index(name) for name in mutates_args]

        def kernel(*args: Any, **kwargs: Any) -> Any:
            result = compute(*args, **kwargs)
            for position in mutated_positions:
                arg = args[position]
                _increment_version((arg,) if isinstance(arg, Tensor) else arg)
            return result

        for device in ("CPU", "CUDA"):
            _library.impl(function.__name__, kernel, device)
        return function

    return register


def _define(function: Callable[..., Any], mutates_args: Sequence[str], name: str) -> list[str]:
    """Register an operator's schema and fake kernel. Return the names of its arguments."""
    schema = torch.library.infer_schema(function, op_name=name, mutates_args=mutates_args)
    # Integer arguments are plain numbers in traces too. Only sizes of tensors are symbolic.
    schema = schema.replace("SymInt", "int")
    _library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    names = [argument.name for argument in torch._C.parse_schema(f"fp8rs::{schema}").arguments]

    def fake(*args: Any, **kwargs: Any) -> Any:
        _check_devices({**dict(zip(names, args, strict=False)), **kwargs})
        return function(*args, **kwargs)

    torch.library.register_fake(f"fp8rs::{name}", fake, lib=_library)
    return names


def _check_devices(arguments: dict[str, Any]) -> None:
    """Raise ValueError if a tensor is on another device than the first one.

    If one tensor is on meta, torch calls only the fake kernel, and no kernel would check.
    """
    device: torch.device | None = None
    device_of = ""  # the argument that is on `device`
    for name, argument in arguments.items():
        tensors = argument if isinstance(argument, (list, tuple)) else (argument,)
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                continue
            if device is None:
                device = tensor.device
                device_of = name
            elif tensor.device != device:
                raise ValueError(
                    f"{name} is on {tensor.device} and {device_of} is on {device}: both must be "
                    "on one"
                )
