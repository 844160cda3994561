"""The sharded weights of one converted model, and what their layers tell of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from fp8rs._torch import sharded_parameters
from fp8rs.nn.linear import Float8Linear
from fp8rs.nn.model_state import ModelState
from fp8rs.quantize.spec import quant_spec

from .agreement import compare_conversions
from .block_maker import BlockMaker
from .maker import Maker
from .param import ParamHandle
from .passes import WeightPasses
from .scales import SharedScales
from .tensor_maker import TensorMaker

#: Makes a sharded parameter of a layer one that is gathered in FP8, if it is to be.
Adopt = Callable[["ShardedModel", nn.Module, str, Any], None]


class ShardedModel:
    """What a converted model tells of sharding: `fp8rs.nn.sharding.Sharding`.

    Args:
        state: the model's.
        adopt: see `fp8rs.fsdp.adopt`.

    Attributes:
        passes: quantizes the weights for their gathers.
        scales: agrees on those that shards of FP8 weights have in common.
        left: indices of layers whose weights stay in high precision.
    """

    def __init__(self, state: ModelState, adopt: Adopt) -> None:
        self._state = weakref.ref(state)
        self._adopt = adopt
        #: By the layer's index and the parameter's name, in that order, which is that of all ranks.
        self._weights: dict[tuple[int, str], ParamHandle] = {}
        maker = maker_for(state)
        self.scales = SharedScales(maker, self.weights)
        self.passes = WeightPasses(state, maker, self.scales, self.weights, self._meet)
        self.left: set[int] = set()
        #: The meshes whose ranks have compared what they converted.
        self._met: set[Any] = set()
        self._begun = False
        self._others: list[tuple[str, weakref.ref[nn.Module]]] | None = None

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
        """See `Sharding`: at the first, ranks meet, whichever layers they converted.

        If FSDP2 shards what is in the root. Of what it gathers together a part may run on some of
        the ranks alone: these meet at the gather.
        """
        if not self._begun:
            for mesh in {p.device_mesh: None for p in sharded_parameters(root)}:
                self._meet(mesh)
            self._begun = True
        self.passes.forward_begins()

    def stepped(self) -> None:
        """See `Sharding`: scales of FP8 weights become those of all ranks."""
        self.scales.stepped()

    def _meet(self, mesh: Any) -> None:
        """All ranks of a mesh are about to gather weights of the model: compare, once."""
        if mesh not in self._met:
            compare_conversions(self.state, mesh)
            self._met.add(mesh)

    def add(self, weight: ParamHandle) -> None:
        """A weight is sharded, in the place of another one maybe."""
        place = (weight.index, weight.name)
        before = self._weights.get(place)
        if before is not None:
            self.passes.replaced(before)
        self._weights = dict(sorted({**self._weights, place: weight}.items()))

    def weights(self) -> list[ParamHandle]:
        """Every weight of which the module holds the shard at the moment, once."""
        shards = (weight.local for weight in self._weights.values())
        return list(dict.fromkeys(shard._weight for shard in shards if shard is not None))

    def others(self) -> list[tuple[str, weakref.ref[nn.Module]]]:
        """The modules that have parameters and are not converted, with their names.

        To look for them takes as long as a model has modules, and each weight asks.
        """
        root = self.state.root
        if self._others is None and root is not None:
            self._others = [
                (name or type(part).__name__, weakref.ref(part))
                for name, part in root.named_modules()
                if part._parameters and not isinstance(part, Float8Linear)
            ]
        return self._others or []


def maker_for(state: ModelState) -> Maker:
    """The maker of a model's weights: by whether their blocks are cut out of the tensor."""
    spec = quant_spec(state.recipe, "weight")
    if spec.format.per_tensor:
        return TensorMaker(spec, None if state.delayed is None else state.delayed.histories)
    return BlockMaker(spec)


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
