"""One rank of a client's run: ``observe.py FOLDER FILE [ARGUMENTS]`` under torchrun.

Calls ``main(ARGUMENTS)`` of FILE and writes FOLDER/RANK.json, which contains its return value, the
bytes of the rank's all-gathers, and the parameters that moved. See `harness`. With
OBSERVE_GATHERS=0, all-gathers are not counted.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

#: Every operator behind the all-gathers of torch.distributed, with the index of its output.
GATHERS = {
    "c10d::_allgather_base_": 0,
    "c10d::allgather_": 0,
    "c10d::allgather_coalesced_": 0,
    "c10d::allgather_into_tensor_coalesced_": 0,
    "c10d::all_gather_single": 0,
    "_c10d_functional::all_gather_into_tensor": None,
    "_c10d_functional::all_gather_into_tensor_out": None,
    "_c10d_functional::all_gather_into_tensor_coalesced": None,
}


class Gathers(TorchDispatchMode):
    """Counts the bytes of all-gather outputs by dtype.

    It cannot be used with a job that compiles, because Dynamo does not compile under a dispatch
    mode.
    """

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in GATHERS:
            position = GATHERS[name]
            self._count(result if position is None else args[position])
        return result

    def _count(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            self.nbytes[str(value.dtype).removeprefix("torch.")] += value.nbytes
        elif isinstance(value, list | tuple):
            for item in value:
                self._count(item)


class Watch:
    """Records the first module whose forward runs with gradients, and copies of its parameters."""

    def __init__(self) -> None:
        self.root: nn.Module | None = None
        self.before: dict[str, torch.Tensor] = {}
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._note)

    def _note(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or not any(p.requires_grad for p in module.parameters()):
            return
        self._hook.remove()
        self.root = module
        self.before = {n: local(p).clone() for n, p in module.named_parameters()}

    def parameters(self) -> dict[str, dict[str, bool]]:
        """Return for each name whether it is trainable, and whether this rank's part changed."""
        if self.root is None:
            return {}
        return {
            n: {"trainable": p.requires_grad, "moved": not torch.equal(local(p), self.before[n])}
            for n, p in self.root.named_parameters()
        }

    def converted(self) -> dict[str, int]:
        """Return the converted layers, with the padded size of their gathered weight.

        Other modules with FP8 parameters are listed by parameter.
        """
        from fp8rs.nn.linear import Float8Linear

        ranks = int(os.environ["WORLD_SIZE"])
        numel_by_layer = {}
        for n, m in self.root.named_modules() if self.root is not None else ():
            for name in getattr(m, "_fp8_params", ()):
                weight = m._parameters[name]
                numel = -(-weight.shape[0] // ranks) * ranks * weight.shape[1:].numel()
                numel_by_layer[n if isinstance(m, Float8Linear) else f"{n}.{name}"] = numel
        return numel_by_layer


def local(p: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a parameter."""
    p = p.detach()
    return p.to_local() if hasattr(p, "to_local") else p


def main() -> None:
    folder, path, *arguments = sys.argv[1:]
    try:
        result = observed(path, arguments)
    except BaseException:
        Path(folder, f"{os.environ['RANK']}.error").write_text(traceback.format_exc())
        raise
    Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    if torch.distributed.is_initialized():
        time.sleep(0.1)  # gloo may abort the exit otherwise, see docs/troubleshooting.md
        torch.distributed.destroy_process_group()


def observed(path: str, arguments: list[str]) -> dict[str, Any]:
    """Call ``main`` of a file and return the data of a `harness.Run`."""
    warnings.filterwarnings("error", module="fp8rs")
    torch.set_num_threads(1)
    sys.argv = [path, *arguments]
    spec = importlib.util.spec_from_file_location("example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Pickles and data loader workers find the classes of the file by this name.
    sys.modules["example"] = module
    spec.loader.exec_module(module)
    watch = Watch()
    gathers = Gathers()
    with gathers if os.environ.get("OBSERVE_GATHERS") != "0" else contextlib.nullcontext():
        returned = module.main(arguments)
    return {
        "returned": returned,
        "gathered": dict(gathers.nbytes),
        "parameters": watch.parameters(),
        "converted": watch.converted(),
    }


if __name__ == "__main__":
    main()
