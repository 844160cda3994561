"""Collectives of torch.distributed on quantized tensors.

The schemas of those that write into their arguments say nothing of it. Dequantized values go over
the wire, and what arrives is quantized, once it is there: a collective into a quantized tensor has
finished when it returns. Parts that are scattered are codes and scales already, and stay what they
are: tensor parallelism cuts weights so.

Functional ones, which DTensor redistributes by, give plain tensors. Gathers send codes and scales;
others would send high precision, and raise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8rs.tensor import formats
from fp8rs.tensor.fallback import dequantized_call, on_values, quantized_in
from fp8rs.tensor.planes import Plane, as_bytes
from fp8rs.tensor.quantized import QuantizedTensor

_gather_all = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
_wait_for = torch.ops._c10d_functional.wait_tensor.default

#: Operators of the namespace c10d that only read tensors, and that receive from one other rank; all
#: others write their first argument.
READING = ("send", "barrier", "monitored_barrier_", "check_for_nan")
RECEIVING = ("recv_", "recv_any_source_")


def collective(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a collective on dequantized values, and quantize what it wrote.

    Raises:
        NotImplementedError: it receives from another rank.
    """
    name = func._schema.name.partition("::")[2]
    if name in RECEIVING:
        # A receive that is waited for looks like one that is not, and what has not arrived cannot
        # be quantized; waiting here would make two ranks wait for each other.
        raise NotImplementedError(
            f"c10d.{name} into a quantized tensor is not possible. Use a plain tensor "
            "(torch.empty_like gives one) and copy_() it"
        )
    if name == "scatter_" and all(
        isinstance(t, QuantizedTensor) and t.planes != (None, None) for t in args[0]
    ):
        return _scatter(func, *args, **kwargs)
    written = [] if name in READING else quantized_in(args[0])
    return on_values(func, args, kwargs, written, wait=_wait)


def _scatter(func: Any, outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Scatter codes and scales, of which the sender makes parts that are in other formats."""
    arrived = [out.clone() for out in outputs]
    parts = [
        [out.clone().copy_(part) for part in given]
        for out, given in zip(arrived, inputs, strict=False)  # which receivers have none of
    ]
    result: Any = None
    for place in range(len(arrived[0]._store.tensors())):

        def wire(t: QuantizedTensor, place: int = place) -> Tensor:
            return as_bytes(t._store.tensors()[place])

        result = func(*tree_map_only(QuantizedTensor, wire, (arrived, parts)), *args, **kwargs)
        _wait(result)
    for out, got in zip(outputs, arrived, strict=True):
        out.copy_(got)
    return outputs, result[1]


def _wait(out: Any) -> None:
    """Wait for the work that a collective returned, alone or behind its tensors."""
    from torch.distributed import Work

    for value in out if isinstance(out, tuple) else (out,):
        if not isinstance(value, (Tensor, list)):
            work = Work.unbox(value)
            if work is not None:  # NCCL has none where the current stream has it in order
                work.wait()


# --- functional collectives ----------------------------------------------------------------------


def functional(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a collective that DTensor redistributes by.

    Raises:
        NotImplementedError: it is not an all-gather, and does not write a quantized tensor.
    """
    name = func._schema.name.partition("::")[2]
    if name == "all_gather_into_tensor":
        return _gathered([args[0]], *args[1:], **kwargs)[0]
    if name == "all_gather_into_tensor_coalesced":
        return _gathered(*args, **kwargs)
    if name == "wait_tensor":  # of another collective, which has completed
        return args[0]
    if name.endswith("_"):
        return dequantized_call(func, *args, **kwargs)
    raise NotImplementedError(
        f"{name} of a quantized tensor would send it in high precision. Gathers send codes; for "
        "others dequantize() it first"
    )


def _gathered(tensors: list[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    """The values of all ranks' tensors, one rank's after the other's, of codes and scales sent."""
    rows = [_by_rows(t) if isinstance(t, QuantizedTensor) else None for t in tensors]
    sent = [
        part.contiguous().view(torch.uint8)
        for t, row in zip(tensors, rows, strict=True)
        for part in ([t] if row is None else [row.data, row.scale])
    ]
    received = iter(map(_wait_for, _gather_all(sent, group_size, group_name)))
    whole = []
    for t, row in zip(tensors, rows, strict=True):
        got = next(received)
        if row is None:
            whole.append(got.view(t.dtype))
            continue
        scales = next(received).view(row.scale.dtype)
        if row.scale.shape[0] != row.matrix.shape[0]:  # one for each rank
            scales = scales.repeat_interleave(row.matrix.shape[0], 0)
        values = Plane(got.view(row.data.dtype), scales, row.format)
        exact = torch.float32 if t.dtype == torch.float64 else t.dtype
        whole.append(values.dequantize(exact).to(t.dtype))
    return whole


def _by_rows(t: QuantizedTensor) -> Plane:
    """The rowwise plane with blocks of one row, of which ranks have as many, wherever cuts are.

    A scale for all rows of a matrix is present once. A batch has the rows of its matrices in order.

    Raises:
        ValueError: this is a view that cuts blocks, or has no such plane.
    """
    t.any_plane()
    row, _ = t.region.planes
    plane = t.region.made("rowwise", "a gather") if row is None else row
    assert not plane.lead[1]
    rows = plane.matrix.shape[-2]
    if plane.format.per_tensor:
        each = plane.scale.view(-1, 1)
        if plane.batched:
            each = each.repeat_interleave(rows, 0)
        return Plane(plane.data, each, formats.ROW)
    height, width = plane.format.block
    each = as_bytes(plane.scale)
    if height > 1:
        each = each.repeat_interleave(height, -2).narrow(-2, plane.lead[0], rows)
    format = formats.format_of((1, width), plane.format.scale_dtype)
    return Plane(plane.data, each.flatten(0, -2).view(plane.scale.dtype), format)
