"""Collectives of torch.distributed on quantized tensors.

Their schemas say nothing of what they write. Dequantized values go over the wire, and what arrives
is quantized, once it is there: a collective into a quantized tensor has finished when it returns.
Parts that are scattered are codes and scales already, and stay what they are: tensor parallelism
cuts weights so.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from fp8rs.tensor.fallback import on_values, quantized_in
from fp8rs.tensor.planes import as_bytes
from fp8rs.tensor.quantized import QuantizedTensor

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
