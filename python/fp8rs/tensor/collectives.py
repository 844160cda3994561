"""Collectives of torch.distributed on quantized tensors.

Collectives of c10d write their arguments, although their schemas do not declare it. They run on
dequantized values, and the results are quantized when they have arrived. A collective into a
quantized tensor has therefore finished when it returns. On other ranks the same collective may have
plain tensors: a load from rank 0 distributes FP8 weights to ranks that have empty tensors. The
number, the shapes and the dtypes of collectives therefore do not depend on which tensors are
quantized.

DTensor redistributes by functional collectives, which return plain tensors. An all-gather sends
codes and scales, so the tensors of all ranks must be quantized. Other functional collectives would
send values in high precision, so they raise an error.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8rs.quantize import formats
from fp8rs.quantize.planes import Plane, as_bytes
from fp8rs.tensor.fallback import quantized_in, run_dequantized, wait
from fp8rs.tensor.plane_storage import WriteKind
from fp8rs.tensor.quantized import QuantizedTensor

_gather_all = torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default
_wait_for = torch.ops._c10d_functional.wait_tensor.default

#: Operators of the namespace c10d that only read tensors, and that receive from one other rank. All
#: others write their first argument.
READING = ("send", "barrier", "monitored_barrier_", "check_for_nan")
RECEIVING = ("recv_", "recv_any_source_")


def collective(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a collective on dequantized values, and quantize what it wrote.

    Raises:
        NotImplementedError: the collective receives from one other rank.
    """
    name = func._schema.name.partition("::")[2]
    if name in RECEIVING:
        # Values that have not arrived cannot be quantized, and waiting here could make two ranks
        # wait for each other.
        raise NotImplementedError(
            f"c10d.{name} into a quantized tensor is not possible. Use a plain tensor "
            "(torch.empty_like gives one) and copy_() it"
        )
    quantized_outputs = name == "scatter_" and all(
        isinstance(output, QuantizedTensor) and output.planes != (None, None) for output in args[0]
    )
    if quantized_outputs:
        return _scatter(func, *args, **kwargs)
    written = [] if name in READING else quantized_in(args[0])
    return run_dequantized(func, args, kwargs, written, WriteKind.COPY)


def _scatter(
    func: Any,
    outputs: list[QuantizedTensor],
    inputs: list[list[Tensor]],
    *args: Any,
    **kwargs: Any,
) -> tuple[list[QuantizedTensor], Any]:
    """Scatter dequantized values into quantized tensors."""
    for output in outputs:
        output.check_writable()
    received = [output.dequantize() for output in outputs]
    sent = tree_map_only(QuantizedTensor, lambda part: part.dequantize(), inputs)

    _, work = func(received, sent, *args, **kwargs)
    wait((work,))

    for output, values in zip(outputs, received, strict=True):
        _write_received(output, values)
    return outputs, work


def _write_received(output: QuantizedTensor, values: Tensor) -> None:
    """Quantize values, with the scales of ``output`` if these represent all values exactly.

    DTensor allocates ``output`` like the first part of this rank's own tensor. If a part does not
    contain the largest element of a scale's block, a scale of the part alone would round values
    that were rounded before.
    """
    # Parts differ, so ranks of a group cannot reduce the amaxes of this write together.
    spec = output.spec.without_group()
    delayed = output._storage.delayed
    with_old_scales = cast(QuantizedTensor, output.clone())
    with_old_scales.write(values, spec, delayed, WriteKind.MERGED_COPY)
    if torch.equal(with_old_scales.dequantize(), values):
        output.copy_(with_old_scales)
    else:
        output.write(values, spec, delayed)


# --- functional collectives ----------------------------------------------------------------------


def functional(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a functional collective, as DTensor does to redistribute a tensor.

    Raises:
        NotImplementedError: the collective is not an all-gather.
    """
    name = func._schema.name.partition("::")[2]
    if name == "all_gather_into_tensor":
        return _gathered(*args, **kwargs)
    if name == "wait_tensor":  # other collectives have completed when they return
        return args[0]
    raise NotImplementedError(
        f"{name} of a quantized tensor would send it in high precision. all_gather_into_tensor "
        "sends codes. For others, dequantize() it first, and copy_() the result"
    )


def _gathered(t: QuantizedTensor, group_size: int, group_name: str) -> Tensor:
    """Gather codes and scales, and return the dequantized values of all ranks.

    Raises:
        ValueError: ``t`` is a view that splits blocks. Or it has no rowwise plane, and the blocks
            are not square.
    """
    plane = t.make_plane("rowwise", "a gather") if t.rowwise is None else t.rowwise
    height, width = plane.format.block
    format, rows, scale = plane.format, plane.matrix.shape[-2], as_bytes(plane.scale)
    if format.per_tensor:
        scale, format = scale.view(-1, 1), formats.ROW
        if plane.batched:
            scale = scale.repeat_interleave(rows, 0)
    elif height > 1:
        # Repeat scales for each row, because all ranks must send the same number of scales.
        scale = scale.repeat_interleave(height, -2).narrow(-2, plane.block_offset[0], rows)
        format = formats.format_of((1, width), format.scale_dtype)
    # A batch is sent as the rows of its matrices, in order.
    sent = [x.contiguous().view(torch.uint8) for x in (plane.data, scale.flatten(0, -2))]
    codes, scale = map(_wait_for, _gather_all(sent, group_size, group_name))
    if plane.format.per_tensor and not plane.batched:
        scale = scale.repeat_interleave(rows, 0)
    whole = Plane(codes.view(plane.data.dtype), scale.view(plane.scale.dtype), format)
    return whole.dequantize(torch.float32 if t.dtype == torch.float64 else t.dtype).to(t.dtype)
