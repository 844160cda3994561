"""Runs operators on dequantized values, and quantizes the tensors that they write."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from fp8rs.tensor.plane_storage import WriteKind
from fp8rs.tensor.quantized import QuantizedTensor


def dequantized_call(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on dequantized arguments, and quantize those that it wrote."""
    written = written_by(func, args, kwargs)
    kind = WriteKind.VALUES if overwrites(func) else WriteKind.ARITHMETIC
    return run_dequantized(func, args, kwargs, written, kind)


def written_by(func: Any, args: Any, kwargs: Any) -> list[QuantizedTensor]:
    """Return the quantized tensors that an operator writes."""
    return quantized_in(written_arguments(func, args, kwargs))


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operator writes."""
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in written_places(func)]


@cache
def written_places(func: Any) -> list[tuple[int, str]]:
    """Return the positions and names of the arguments that an operator writes, by its schema."""
    return [
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def quantized_in(value: Any) -> list[QuantizedTensor]:
    """Return the quantized tensors in an argument."""
    return [t for t in tree_leaves(value) if isinstance(t, QuantizedTensor)]


def run_dequantized(
    func: Any,
    args: Any,
    kwargs: Any,
    written: Sequence[QuantizedTensor],
    kind: WriteKind,
) -> Any:
    """Run an operator on dequantized arguments, and quantize those that it wrote.

    Arithmetic on a weight with a master runs on the master. Arithmetic on codes would lose changes
    that are smaller than half the distance to the next code.

    Args:
        func: the operator.
        args: its positional arguments.
        kwargs: its keyword arguments.
        written: the arguments that it writes.
        kind: what it writes.

    Returns:
        The result of the operator. Arguments that it wrote are returned as quantized tensors.

    Raises:
        NotImplementedError: an argument cannot be written. Nothing was written.
    """
    for t in written:
        t.check_writable()
    exact: dict[int, Tensor] = {}
    if kind is WriteKind.ARITHMETIC:
        operands = tree_leaves(written_arguments(func, args, kwargs))
        if len(operands) == len(written):  # a fused optimizer also writes its moments
            exact = exact_values_of(written)
    plain = {key: values.clone() for key, values in exact.items()}

    def dequantize(t: QuantizedTensor) -> Tensor:
        if id(t) not in plain:
            # Keep a transposed matrix transposed, because kernels are chosen by strides.
            transposed = t.dim() > 1 and t.stride(-2) == 1 and t.stride(-1) != 1
            plain[id(t)] = t.mT.dequantize().mT if transposed else t.dequantize()
        return plain[id(t)]

    given, named = tree_map_only(QuantizedTensor, dequantize, (args, kwargs))
    if exact:
        given, named = promoted(given, named)
    out = func(*given, **named)
    if not written:
        return out
    if func.namespace == "c10d":
        wait(out)
    elif func.namespace == "_c10d_functional":
        for result in tree_leaves(out):
            torch.ops._c10d_functional.wait_tensor(result)
    stand_ins = {}
    for t in {id(t): t for t in written}.values():
        value = plain[id(t)]
        stand_ins[id(value)] = t
        before = exact.get(id(t))
        t_kind = kind if before is None else WriteKind.EXACT_ARITHMETIC
        t.write(value, t.spec, t._storage.delayed, t_kind, before)
    return tree_map(lambda v: stand_ins.get(id(v), v) if isinstance(v, Tensor) else v, out)


def exact_values_of(written: Sequence[QuantizedTensor]) -> dict[int, Tensor]:
    """Return the values that codes were rounded from, of the tensors that have them, by id."""
    exact = {}
    for t in written:
        observer = t._storage.active_observer
        values = None if observer is None else observer.exact_values(t)
        if values is not None:
            exact[id(t)] = values
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


def each_member(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator on lists (torch's foreach and fused optimizers) for one member at a time.

    The weights of a whole model may not fit in memory when they are dequantized.
    """
    lists = [a for a in (*args, *kwargs.values()) if _is_list(a) and isinstance(a[0], Tensor)]
    if not lists:
        return dequantized_call(func, *args, **kwargs)
    for t in written_by(func, args, kwargs):
        t.check_writable()
    count, results = len(lists[0]), []
    for i in range(count):

        def member(value: Any, i: int = i) -> Any:
            return value[i : i + 1] if _is_list(value) and len(value) == count else value

        own = {name: member(value) for name, value in kwargs.items()}
        results.append(dequantized_call(func, *map(member, args), **own))
    if results[0] is None:
        return None
    if isinstance(results[0], tuple):  # several lists
        return tuple([x for (x,) in each] for each in zip(*results, strict=True))
    return [x for (x,) in results]


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0
