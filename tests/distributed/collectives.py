"""Records collectives and their sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fp8rs import QuantizedTensor


@dataclass(frozen=True)
class Collective:
    """One collective, with the dtype and the bytes of its largest output."""

    kind: str
    dtype: torch.dtype
    nbytes: int


KINDS = {
    "allgather": "gather",
    "_allgather_base": "gather",
    "all_gather_single": "gather",
    "allreduce": "reduce",
    "_reduce_scatter_base": "scatter",
    "reduce_scatter_single": "scatter",
    "reduce_scatter": "scatter",
    "broadcast": "broadcast",
    "all_gather_into_tensor": "gather",
    "all_gather_into_tensor_coalesced": "gather",
    "all_reduce": "reduce",
    "reduce_scatter_tensor": "scatter",
}


class Collectives(TorchDispatchMode):
    """Records every collective that runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Collective] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "_c10d_functional" and any(
            issubclass(kind, QuantizedTensor) for kind in types
        ):
            # The quantized tensor issues collectives on its values, which are recorded instead.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1].rstrip("_")
        if func.namespace == "c10d":
            tensors = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
            largest = max(tensors, key=lambda t: t.nbytes)
            kind = KINDS.get(name, name)
            self.calls.append(Collective(kind, largest.dtype, largest.nbytes))
        elif func.namespace == "_c10d_functional" and name in KINDS:
            kind = KINDS[name]
            outputs = tree_leaves(args[0] if kind == "scatter" else out)
            self.calls += [Collective(kind, t.dtype, t.nbytes) for t in outputs]
        return out

    def counts(self) -> Counter[tuple[str, torch.dtype]]:
        """Count the collectives of each kind and dtype."""
        return Counter((c.kind, c.dtype) for c in self.calls)

    def nbytes(self, kind: str) -> int:
        """Return the bytes of all collectives of a kind."""
        return sum(c.nbytes for c in self.calls if c.kind == kind)
