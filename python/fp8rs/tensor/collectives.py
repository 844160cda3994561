"""Collectives of torch.distributed on quantized tensors.

On other ranks the same collective may have plain tensors: a load from rank 0 distributes FP8
weights to ranks that have empty tensors. The number, the shapes and the dtypes of collectives must
not depend on which tensors are quantized, because no rank can find out what others have. All
collectives therefore run on dequantized values. This includes the functional collectives by which
DTensor redistributes tensors, and which return plain tensors.

Tensors that a collective writes are quantized when the results have arrived. Such a collective has
finished when it returns.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8rs.tensor.fallback import quantized_in, run_dequantized, wait, written_by
from fp8rs.tensor.plane_storage import WriteKind
from fp8rs.tensor.quantized import QuantizedTensor

#: Operators of the namespace c10d that only read tensors. All others write their first argument,
#: although their schemas do not declare it.
READING = ("send", "barrier", "monitored_barrier_", "check_for_nan")
#: Operators that receive from one other rank.
RECEIVING = ("recv_", "recv_any_source_", "irecv", "batch_p2p_ops")


def collective(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a collective on dequantized values, and quantize what it wrote.

    Raises:
        NotImplementedError: the collective receives from one other rank.
    """
    name = func._schema.name.partition("::")[2]
    _refuse_to_receive(name)
    if name == "scatter_" and all(_has_planes(output) for output in args[0]):
        return _scatter(func, *args, **kwargs)
    outputs = [] if name in READING else quantized_in(args[0])
    return run_dequantized(func, args, kwargs, outputs, WriteKind.COPY)


def _has_planes(tensor: Tensor) -> bool:
    return isinstance(tensor, QuantizedTensor) and tensor.planes != (None, None)


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


def functional(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a functional collective on dequantized values, and quantize what it wrote.

    Raises:
        NotImplementedError: the collective receives from one other rank.
    """
    name = func._schema.name.partition("::")[2]
    if name in ("wait_tensor", "wait_tensors"):
        # Collectives that write quantized tensors have finished.
        return args[0]
    _refuse_to_receive(name)
    return run_dequantized(func, args, kwargs, written_by(func, args, kwargs), WriteKind.COPY)


def _refuse_to_receive(name: str) -> None:
    if name in RECEIVING:
        # Values that have not arrived cannot be quantized, and waiting here could make two ranks
        # wait for each other.
        raise NotImplementedError(
            f"{name} into a quantized tensor is not possible. Use a plain tensor "
            "(torch.empty_like gives one) and copy_() it"
        )
