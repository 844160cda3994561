"""Operators on dequantized values, with what they wrote quantized back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from fp8rs.tensor.quantized import QuantizedTensor


def dequantized_call(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run ``func`` on dequantized arguments; quantize back those that it mutated."""
    written = written_by(func, args, kwargs)
    return on_values(func, args, kwargs, written, keep=not overwrites(func))


def written_by(func: Any, args: Any, kwargs: Any) -> list[QuantizedTensor]:
    """Return the quantized tensors that an operator writes, by its schema."""
    written = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            written += quantized_in(given)
    return written


def quantized_in(value: Any) -> list[QuantizedTensor]:
    """The quantized tensors in an argument."""
    return [t for t in tree_leaves(value) if isinstance(t, QuantizedTensor)]


def on_values(
    func: Any,
    args: Any,
    kwargs: Any,
    written: Sequence[QuantizedTensor],
    *,
    keep: bool = False,
    wait: Callable[[Any], None] | None = None,
) -> Any:
    """Run ``func`` on dequantized values, and quantize those that it has written.

    Args:
        func: the operator.
        args, kwargs: its arguments.
        written: those of them that it writes.
        keep: elements that it leaves as they were keep their codes' value.
        wait: waits for what is written, by what ``func`` gave.

    Returns:
        What ``func`` gives, with the tensors themselves in place of their dequantized stand-ins.
    """
    for t in written:
        t.check_writable()
    plain: dict[int, Tensor] = {}

    def dequantize(t: QuantizedTensor) -> Tensor:
        if id(t) not in plain:
            plain[id(t)] = t.dequantize()
        return plain[id(t)]

    given, named = tree_map_only(QuantizedTensor, dequantize, (args, kwargs))
    out = func(*given, **named)
    if not written:
        return out
    if wait is not None:
        wait(out)
    stand_ins = {}
    for t in {id(t): t for t in written}.values():
        value = plain[id(t)]
        stand_ins[id(value)] = t
        if func.namespace == "_c10d_functional":  # they return before they have written
            value = torch.ops._c10d_functional.wait_tensor(value)
        t.write(value, t.spec, t._store.delayed, keep)
    return tree_map(lambda v: stand_ins.get(id(v), v) if isinstance(v, Tensor) else v, out)


@cache
def overwrites(func: Any) -> bool:
    """Whether an operator that writes a tensor does not ask what was there: fills, draws, ``out=``.

    Others are arithmetic, which may leave elements as they were: these are to keep their values.
    """
    schema = func._schema
    name = schema.name.partition("::")[2].removeprefix("_foreach_")
    return (
        name in ("fill_", "zero_")
        or func.namespace == "_c10d_functional"
        or torch.Tag.nondeterministic_seeded in func.tags
        or any(argument.is_out for argument in schema.arguments)
    )


def each_member(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A call on lists (torch's foreach and fused optimizers), of one member of them at a time.

    All of a model's weights dequantized at once would not fit. Plain members go together.
    """
    lists = [a for a in (*args, *kwargs.values()) if _is_tensors(a)]
    if not lists:
        return dequantized_call(func, *args, **kwargs)
    for t in written_by(func, args, kwargs):
        t.check_writable()
    count = len(lists[0])
    columns = zip(*(given for given in lists if len(given) == count), strict=True)
    alone = [i for i, of in enumerate(columns) if any(isinstance(x, QuantizedTensor) for x in of)]
    rest = sorted(set(range(count)) - set(alone))
    results: dict[int, Any] = {}
    for places in filter(None, [rest, *([i] for i in alone)]):

        def take(value: Any, places: list[int] = places) -> Any:
            is_list = isinstance(value, (list, tuple)) and len(value) == count
            return [value[i] for i in places] if is_list else value

        out = dequantized_call(func, *map(take, args), **{k: take(v) for k, v in kwargs.items()})
        if out is not None:
            each = zip(*out, strict=True) if isinstance(out, tuple) else out
            results.update(zip(places, each, strict=True))
    if not results:
        return None
    members = [results[i] for i in range(count)]
    # Several lists come back as they are given: a list of each.
    several = isinstance(members[0], tuple)
    return tuple(map(list, zip(*members, strict=True))) if several else members


def _is_tensors(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and isinstance(value[0], Tensor)
