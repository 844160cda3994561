"""What a conversion changes in a model, for comparisons of models before and after."""

import torch
from torch.utils._pytree import tree_map_only

import fp8rs
from internals import local_of


class Foreign(torch.Tensor):
    """A weight of another quantization library: a subclass without the operators of fp8rs."""

    @staticmethod
    def __new__(cls, values):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=values.dtype)

    def __init__(self, values):
        self.values = values

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func.namespace == "fp8rs":
            raise NotImplementedError(f"Foreign has no {func}")
        args, kwargs = tree_map_only(cls, lambda t: t.values, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, cls, func(*args, **kwargs))


def values_of(parameter):
    local = local_of(parameter.detach())
    local = getattr(local, "values", local) if isinstance(local, Foreign) else local
    local = local.dequantize() if isinstance(local, fp8rs.QuantizedTensor) else local
    return local.cpu().clone().numpy().tobytes()


def contents(model):
    """Return everything that a conversion changes in a model: attributes by id, and values."""
    entries = {}
    for name, module in model.named_modules():
        entries[name, "class"] = type(module)
        for attribute, value in module.__dict__.items():
            items = value.items() if isinstance(value, dict) else [("", value)]
            entries[name, attribute] = [(key, id(item)) for key, item in items]
    for name, p in model.named_parameters():
        entries[name, "values"] = type(p), values_of(p), list(p.__dict__)
    return entries
