"""A sharded FP8 parameter: all ranks write it together, so that its scales agree at once.

A shard's own dispatch cannot tell whether other ranks are writing too; a call on the parameter, a
DTensor, says so. Beyond that it is the DTensor that FSDP2 made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from fp8rs._torch import local_tensor

#: Methods whose names end like those that write values, but which do not.
_OTHERS = frozenset(
    [
        "as_strided_",
        "detach_",
        "rename_",
        "requires_grad_",
        "resize_",
        "resize_as_",
        "set_",
        "share_memory_",
        "squeeze_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "unsqueeze_",
    ]
)


class Float8Parameter(DTensor):
    """A DTensor over a shard of FP8 codes."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # torch's way is for classes whose clones are of that class, which DTensor's are not.
        self.__class__ = DTensor  # type: ignore[assignment]
        try:
            new = copy.deepcopy(self, memo)
        finally:
            self.__class__ = Float8Parameter
        new.__class__ = Float8Parameter
        return new


def _together(name: str) -> Callable[..., Any]:
    plain = getattr(DTensor, name)

    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        with local_tensor(self)._weight.written_by_all_ranks():
            return plain(self, *args, **kwargs)

    write.__name__ = name
    write.__doc__ = plain.__doc__
    return write


for _name in dir(Tensor):
    if _name.endswith("_") and not _name.startswith("_") and _name not in _OTHERS:
        setattr(Float8Parameter, _name, _together(_name))
