"""The sharded weights of one converted model, and what their layers tell of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from fp8rs.nn.registry import ModelState

from .agreement import Agreement
from .passes import WeightPasses
from .weight import Weight, local_of

#: Makes a sharded parameter of a layer one that is gathered in FP8, if it is to be.
Adopt = Callable[["ShardedModel", nn.Module, str, Any], None]


class ShardedModel:
    """What a converted model tells of sharding: `fp8rs.nn.sharding.Sharding`.

    Args:
        state: the model's.
        adopt: see `fp8rs.fsdp.adopt`.

    Attributes:
        passes: quantizes the weights for their gathers.
        agreement: what ranks have compared of what they converted.
        left: indices of layers whose weights stay in high precision.
    """

    def __init__(self, state: ModelState, adopt: Adopt) -> None:
        self._state = weakref.ref(state)
        self._adopt = adopt
        #: By the layer's index and the parameter's name, in that order, which is that of all ranks.
        self._weights: dict[tuple[int, str], Weight] = {}
        self.agreement = Agreement()
        self.passes = WeightPasses(state, self.weights, self._reach)
        self.left: set[int] = set()

    @property
    def state(self) -> ModelState:
        """The state of the converted model."""
        state = self._state()
        assert state is not None
        return state

    def sharded(self, layer: nn.Module, name: str, parameter: Any) -> None:
        """See `Sharding`."""
        if layer._parameters.get(name) is parameter:
            self.passes.moved()
        self._adopt(self, layer, name, parameter)

    def forward_begins(self, root: nn.Module) -> None:
        """See `Sharding`: ranks compare what they converted, at the first."""
        self.agreement.forward_begins(self.state, root)
        self.passes.forward_begins()

    def stepped(self) -> None:
        """See `Sharding`: scales of FP8 weights become those of all ranks."""
        self.passes.stepped()

    def _reach(self, mesh: Any) -> None:
        self.agreement.reach(self.state, mesh)

    def add(self, weight: Weight) -> None:
        """A weight is sharded, in the place of another one maybe."""
        place = (weight.index, weight.name)
        before = self._weights.get(place)
        if before is not None:
            self.passes.replaced(before)
        self._weights = dict(sorted({**self._weights, place: weight}.items()))

    def weights(self) -> list[Weight]:
        """Every weight of which the module holds the shard at the moment, once."""
        found: dict[Weight, None] = {}
        for weight in self._weights.values():
            parameter: Any = weight.parameter if weight.in_place else None
            if isinstance(parameter, DTensor):
                local = local_of(parameter)
                if local is not None:
                    found[local._weight] = None
        return list(found)


def of(state: ModelState) -> ShardedModel:
    """The sharded weights of a model."""
    sharding = state.shards()
    assert isinstance(sharding, ShardedModel)
    return sharding


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Find the scales of all sharded FP8 weights now, for the next forward.

    Call it after the optimizer's step: it takes the amaxes and their one all-reduce out of the
    forward. The scales hold for one forward of each converted model in ``module``; weights
    must not be written between this call and that forward. Models without FP8 all-gather and
    recipes without dynamic scales are left as they are.

    Args:
        module: a module that contains converted layers, usually FSDP2's root.
    """
    states = {id(s): s for m in module.modules() if (s := getattr(m, "_fp8_state", None))}
    for state in states.values():
        if state.sharding is not None:
            of(state).passes.precompute()
