"""Runs operators on dequantized values, and quantizes the tensors that they write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from fp8rs.tensor.plane_storage import WriteKind
from fp8rs.tensor.quantized import QuantizedTensor


def dequantized_call(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on dequantized arguments, and quantize those that it wrote."""
    outputs = written_by(func, args, kwargs)
    kind = WriteKind.VALUES if overwrites(func) else WriteKind.ARITHMETIC
    return run_dequantized(func, args, kwargs, outputs, kind)


def written_by(func: Any, args: Any, kwargs: Any) -> list[QuantizedTensor]:
    """Return the quantized tensors that an operator writes."""
    return quantized_in(written_arguments(func, args, kwargs))


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operator writes."""
    arguments = []
    for position, name in written_parameters(func):
        if position < len(args):
            arguments.append(args[position])
        else:
            arguments.append(kwargs.get(name))
    return arguments


@cache
def written_parameters(func: Any) -> list[tuple[int, str]]:
    """Return the positions and names of the arguments that an operator writes, by its schema."""
    return [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def quantized_in(value: Any) -> list[QuantizedTensor]:
    """Return the quantized tensors in an argument."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, QuantizedTensor)]


def run_dequantized(
    func: Any,
    args: Any,
    kwargs: Any,
    outputs: Sequence[QuantizedTensor],
    kind: WriteKind,
) -> Any:
    """Run an operator on dequantized arguments, and quantize those that it wrote.

    Arithmetic on a weight with a master runs on the master. Arithmetic on codes would lose changes
    that are smaller than half the distance to the next code.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        outputs: the arguments that it writes.
        kind: what it writes.

    Returns:
        The result of the operator. Arguments that it wrote are returned as quantized tensors.

    Raises:
        NotImplementedError: an argument cannot be written. Nothing was written.
    """
    for output in outputs:
        output.check_writable()
    exact: dict[int, Tensor] = {}
    if kind is WriteKind.ARITHMETIC:
        operands = tree_leaves(written_arguments(func, args, kwargs))
        if len(operands) == len(outputs):  # a fused optimizer also writes its moments
            exact = exact_values_of(outputs)

    #: The values that the operator reads and writes, by the id of the quantized tensor.
    plain = {key: values.clone() for key, values in exact.items()}

    def dequantize(tensor: QuantizedTensor) -> Tensor:
        if id(tensor) not in plain:
            # Keep a transposed matrix transposed, because kernels are chosen by strides.
            if tensor.dim() > 1 and tensor.stride(-2) == 1 and tensor.stride(-1) != 1:
                plain[id(tensor)] = tensor.mT.dequantize().mT
            else:
                plain[id(tensor)] = tensor.dequantize()
        return plain[id(tensor)]

    plain_args, plain_kwargs = tree_map_only(QuantizedTensor, dequantize, (args, kwargs))
    if exact:
        plain_args, plain_kwargs = promoted(plain_args, plain_kwargs)
    result = func(*plain_args, **plain_kwargs)
    if not outputs:
        return result

    if func.namespace == "c10d":
        wait(result)
    elif func.namespace == "_c10d_functional":
        for received in tree_leaves(result):
            torch.ops._c10d_functional.wait_tensor(received)

    # Quantize each tensor once, also if it was passed twice.
    quantized_by_value: dict[int, QuantizedTensor] = {}
    for output in {id(output): output for output in outputs}.values():
        values = plain[id(output)]
        quantized_by_value[id(values)] = output
        exact_values = exact.get(id(output))
        output_kind = kind if exact_values is None else WriteKind.EXACT_ARITHMETIC
        output.write(values, output.spec, output._storage.delayed, output_kind, exact_values)

    def restore(value: Tensor) -> Tensor:
        return quantized_by_value.get(id(value), value)

    return tree_map_only(Tensor, restore, result)


def exact_values_of(tensors: Sequence[QuantizedTensor]) -> dict[int, Tensor]:
    """Return the values that codes were rounded from, of the tensors that have them, by id."""
    exact = {}
    for tensor in tensors:
        observer = tensor._storage.active_observer
        values = None if observer is None else observer.exact_values(tensor)
        if values is not None:
            exact[id(tensor)] = values
    return exact


def promoted(args: Any, kwargs: Any) -> Any:
    """Return arguments with 16-bit floats as float32.

    Some operators, such as ``lerp_``, do not promote the other arguments to the dtype of a master.
    """

    def promote(x: Tensor) -> Tensor:
        return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x

    return tree_map_only(Tensor, promote, (args, kwargs))


def wait(out: Any) -> None:
    """Wait for the work of a collective, which its result is or contains."""
    from torch.distributed import Work

    for value in out if isinstance(out, tuple) else (out,):
        if not isinstance(value, (Tensor, list)):
            work = Work.unbox(value)
            if work is not None:  # NCCL returns None if the current stream is already ordered
                work.wait()


@cache
def overwrites(func: Any) -> bool:
    """Return whether the result does not depend on the previous values of written arguments.

    This holds for fills, random numbers and ``out=``. Other operators may leave elements unchanged,
    which then keep their codes.
    """
    schema = func._schema
    name = schema.name.partition("::")[2].removeprefix("_foreach_")
    return (
        name in ("fill_", "zero_")
        or torch.Tag.nondeterministic_seeded in func.tags
        or any(argument.is_out for argument in schema.arguments)
    )


def foreach_call(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on lists (torch's foreach and fused optimizers) for one member at a time.

    The weights of a whole model may not fit in memory when they are dequantized.
    """
    length = None
    for value in (*args, *kwargs.values()):
        if _is_list(value) and isinstance(value[0], Tensor):
            length = len(value)
            break
    if length is None:
        return dequantized_call(func, *args, **kwargs)
    for output in written_by(func, args, kwargs):
        output.check_writable()

    results = []
    for index in range(length):
        member_args = [_member(value, index, length) for value in args]
        member_kwargs = {name: _member(value, index, length) for name, value in kwargs.items()}
        results.append(dequantized_call(func, *member_args, **member_kwargs))

    # A result is None, a list of one tensor, or several such lists.
    if results[0] is None:
        return None
    if isinstance(results[0], tuple):
        return tuple(_joined(lists) for lists in zip(*results, strict=True))
    return _joined(results)


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0


def _member(value: Any, index: int, length: int) -> Any:
    """Return a list of one member if the value is a list of this length, else the value."""
    if _is_list(value) and len(value) == length:
        return value[index : index + 1]
    return value


def _joined(lists: Sequence[list[Tensor]]) -> list[Tensor]:
    """Return a list of the members of lists of one tensor."""
    return [tensor for (tensor,) in lists]
