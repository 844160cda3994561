"""Counts the calls of operators of fp8rs."""

import collections

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Counts the calls of each operator of fp8rs by name."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "fp8rs":
            self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def gemms(self):
        """The calls of `dequantize`: a GEMM on CPU dequantizes its operands."""
        return {n: c for n, c in self.counts.items() if n == "dequantize"}

    @property
    def quantizations(self):
        return sum(n for name, n in self.counts.items() if name.lstrip("_").startswith("quantize"))
