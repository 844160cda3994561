"""Find the routers and gates of mixtures of experts, which stay in high precision.

A router's outputs are compared with each other, so a rounding error sends a token to other experts.
A gate has a few outputs that scale whole experts. Inference servers build both without a
quantization config. Neither is large enough to gain from FP8.

Both are found by structure, because their names differ between libraries. The terms:

- Experts are a module with stacked weights (E, N, K), or a list of E equal MLPs.
- A block is the smallest module that contains experts and other parameters.
- A branch is a child of a block, such as a router, a gate or a shared expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from fp8rs.convert.expert_selection import may_have_experts
from fp8rs.nn.expert_modules import batched_parameters

#: Reasons for reports and logs.
ROUTER = "it is a router: its outputs select experts"
GATE = "it is a gate next to experts, with fewer than 16 outputs"

#: A layer next to experts with fewer outputs is a gate. FP8 GEMMs have tiles of at least 16.
_MIN_OUTPUTS = 16


@dataclass(frozen=True)
class ExpertsOfBlock:
    """Experts of a model.

    Attributes:
        module: the module with stacked weights, or the list of MLPs.
        count: the number of experts.
        stacked: whether the weights are stacked. A list of MLPs may also run one after the other,
            so it is a list of experts only if there is a router with an output for each.
    """

    module: nn.Module
    count: int
    stacked: bool


def routers_and_gates(root: nn.Module) -> dict[nn.Module, str]:
    """Return the routers and gates of a model, with the reason not to convert each.

    The last layer of a branch is a router if it has an output for each expert, or one more for
    tokens that no expert computes. It is a gate if it has fewer than 16 outputs. A layer whose
    outputs another layer of its branch may read, as in a shared expert, is neither.
    """
    parents: dict[nn.Module, nn.Module] = {}
    for module in root.modules():
        for child in module.children():
            parents.setdefault(child, module)

    reasons: dict[nn.Module, str] = {}
    for experts in _experts(root):
        block = _block(experts, parents)
        if block is None:
            continue

        ends = _ends_of_branches(block, experts)
        routers = [end for end in ends if end.out_features in (experts.count, experts.count + 1)]
        reasons.update(dict.fromkeys(routers, ROUTER))

        if experts.stacked or routers:
            for end in ends:
                if end.out_features < _MIN_OUTPUTS:
                    reasons.setdefault(end, GATE)
    return reasons


def _experts(root: nn.Module) -> Iterator[ExpertsOfBlock]:
    """Yield the experts of a model."""
    for module in root.modules():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            if _are_equal_mlps(list(module.children())):
                yield ExpertsOfBlock(module, len(module), stacked=False)
        elif may_have_experts(module):
            for weight in batched_parameters(module).values():
                # Convolutions and embeddings of positions have dimensions of one element.
                if min(weight.shape) > 1:
                    yield ExpertsOfBlock(module, weight.shape[0], stacked=True)


def _are_equal_mlps(modules: list[nn.Module]) -> bool:
    """Whether modules are MLPs of two or three layers each, without norms, of equal shapes."""
    shapes = []
    for module in modules:
        layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        parameters = [p for layer in layers for p in layer.parameters(recurse=False)]
        if len(layers) not in (2, 3) or len(parameters) != len(list(module.parameters())):
            return False
        shapes.append([(layer.out_features, layer.in_features) for layer in layers])
    return len(shapes) > 1 and all(shape == shapes[0] for shape in shapes)


def _block(experts: ExpertsOfBlock, parents: dict[nn.Module, nn.Module]) -> nn.Module | None:
    """Return the smallest module that contains experts and other parameters, or None."""
    inside = set() if experts.stacked else set(experts.module.modules())
    block: nn.Module | None = experts.module
    while block is not None:
        for module in block.modules():
            has_parameters = any(p is not None for p in module._parameters.values())
            if has_parameters and module not in inside and not batched_parameters(module):
                return block
        block = parents.get(block)
    return None


def _ends_of_branches(block: nn.Module, experts: ExpertsOfBlock) -> list[nn.Linear]:
    """Return the last layer of each branch, unless another layer may read its outputs."""
    ends = []
    for branch in block.children():
        if branch is experts.module:
            continue
        layers = [layer for layer in branch.modules() if isinstance(layer, nn.Linear)]
        inputs = {layer.in_features for layer in layers}
        if layers and layers[-1].out_features not in inputs:
            ends.append(layers[-1])
    return ends
