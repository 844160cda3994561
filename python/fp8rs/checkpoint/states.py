"""``Stateful`` objects through which DCP saves and loads a model and its optimizers."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.optim import Optimizer as TorchOptimizer

from fp8rs._torch import names_of, note_write, own_part, reshard, sharded_parameters
from fp8rs.model.handle import replaced_name
from fp8rs.nn.fp8_params import load_histories, reset_scales
from fp8rs.nn.linear import Float8Linear
from fp8rs.quantize.recipes import check_module
from fp8rs.scaling.histories import BUFFERS, keep_local
from fp8rs.tensor.plane_storage import Write, WriteKind
from fp8rs.tensor.quantized import QuantizedTensor, is_fp8

from .parts import SCALE, distribute_like, parts_of

#: The name that ``fp8rs.optim`` gives to masters in a parameter's state.
MASTER = "master"
#: Entries of a parameter's state that change in each step, with the values before the first one.
COUNTERS = {"step": 0, "mu_product": 1}


class Model:
    """A model's part of a checkpoint: a ``Stateful`` object for DCP.

    The state dict has the names of the unconverted model. An FP8 weight's codes have the weight's
    name, and its scales have that name with a suffix (see the page on checkpoints). With delayed
    scaling, a layer X also has X.fp8_scale, X.fp8_amax and X.fp8_amax_history.

    Args:
        model: the model, converted or not, sharded by FSDP2 or on one device.
    """

    def __init__(self, model: nn.Module) -> None:
        check_module("model", model)
        self.model = model

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Return plain tensors that share memory with the weights, and copies of histories.

        All ranks call it, because it synchronizes the scales that shards share.

        Raises:
            ValueError: a parameter or buffer has the name of an FP8 weight's scales.
        """
        state: dict[str, Any] = get_model_state_dict(self.model)
        plain: dict[str, Tensor] = {}
        split_weights = []
        for name, value in state.items():
            if not is_fp8(value):
                plain[name] = value
                continue
            parts = parts_of(value)
            if parts is None:
                split_weights.append(name)
                plain[name] = distribute_like(value, own_part(value).dequantize())
                continue

            for suffix, part in parts.items():
                if suffix and name + suffix in state:
                    raise ValueError(
                        f"the model has a {name + suffix}, which is also the name of a part of the "
                        f"FP8 weight {name} in a checkpoint: give it another name"
                    )
                plain[name + suffix] = part

        if split_weights:
            warnings.warn(
                "FP8 weights whose blocks tensor parallelism splits are saved in high precision: "
                f"{', '.join(split_weights)}. To save codes and scales, choose sizes per rank that "
                "are multiples of the block's",
                stacklevel=2,
            )

        # A layer with an FP8 weight has copied its histories into the state dict. For other layers,
        # whose state dict is that of the unconverted layer, copy them here.
        for prefix, layer in _layers_with_histories(self.model):
            keep_local(layer._buffers)
            for buffer in BUFFERS:
                if prefix + buffer not in plain:
                    plain[prefix + buffer] = layer.get_buffer(buffer).clone()
        return plain

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict. Its tensors may be the ones that `state_dict` returned.

        If it has no scales for an FP8 weight, it has high-precision values, which are quantized. If
        it has no histories, these are reset.
        """
        plain = dict(state_dict)
        current: Any = get_model_state_dict(self.model)

        # Codes, scales and histories are loaded here, and all other entries by torch.
        parts_by_weight: dict[str, dict[str, Tensor]] = {}
        for name, value in current.items():
            if not is_fp8(value) or name + SCALE not in plain:
                continue
            parts_by_weight[name] = {}
            for suffix in parts_of(value) or ():
                parts_by_weight[name][suffix] = plain.pop(name + suffix)
        histories: dict[str, dict[str, Any]] = {}
        for prefix, _ in _layers_with_histories(self.model):
            histories[prefix] = {}
            for buffer in BUFFERS:
                histories[prefix][buffer] = plain.pop(prefix + buffer, None)

        set_model_state_dict(self.model, plain, options=StateDictOptions(strict=False))
        for name, parts in parts_by_weight.items():
            load_parts(current[name], parts)
        _sync_scales(current)
        for prefix, layer in _layers_with_histories(self.model):
            if histories[prefix]["fp8_scale"] is not None:
                load_histories(layer, histories[prefix])


@dataclass(frozen=True)
class GroupToLoad:
    """A param group of an optimizer, with names in place of parameters.

    Attributes:
        current: the group before the load.
        saved: the saved group that it is loaded from. Empty if there is none.
    """

    current: dict[str, Any]
    saved: dict[str, Any]


class Optimizer:
    """The optimizers' part of a checkpoint: a ``Stateful`` object for DCP.

    Entries are ``state.NAME.exp_avg``, ``state.NAME.master`` and so on, where NAME is the name of a
    parameter, and ``param_groups``, which are not tensors.

    Args:
        model: the module whose parameters the optimizers step.
        optimizers: optimizers of ``torch.optim`` or ``fp8rs.optim``.

    Raises:
        TypeError: ``model`` is not a module, or one of ``optimizers`` is not an optimizer.
        ValueError: an optimizer steps tensors that are not parameters of the model.
    """

    def __init__(self, model: nn.Module, *optimizers: TorchOptimizer) -> None:
        check_module("model", model)
        for optimizer in optimizers:
            if not isinstance(optimizer, TorchOptimizer):
                raise TypeError(
                    f"optimizers must be torch.optim.Optimizer, not {type(optimizer).__name__}"
                )
        self.model = model
        self.optimizers = optimizers
        #: Whether an optimizer had a state before torch created an empty one to load into.
        self._had_state = True
        self._check_parameters()

    def _check_parameters(self) -> None:
        """Raise ValueError if an optimizer steps tensors that are not parameters of the model."""
        # A forward without a backward leaves unsharded parameters on the root.
        parameters = {*map(id, self.model.parameters()), *map(id, sharded_parameters(self.model))}
        for optimizer in self.optimizers:
            foreign = []
            for index, group in enumerate(optimizer.param_groups):
                for position, param in enumerate(group["params"]):
                    if id(param) not in parameters:
                        foreign.append(_describe(group, index, position))

            if foreign:
                raise ValueError(
                    f"{type(optimizer).__name__} steps {len(foreign)} tensors that are not "
                    f"parameters of model, the first of them {foreign[0]}. Create the optimizer "
                    "after fully_shard, which replaces parameters"
                )

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizers' own tensors, under the names of their parameters.

        Raises:
            ValueError: an optimizer steps tensors that are not parameters of the model.
        """
        self._had_state = any(optimizer.state for optimizer in self.optimizers)
        return self._by_name()

    def _by_name(self) -> dict[str, Any]:
        """Return torch's state dict of the optimizers, which has names in place of parameters."""
        reshard(self.model)  # a forward without a backward leaves the root's parameters unsharded
        self._check_parameters()  # the model may have been sharded since
        without_state = [optimizer for optimizer in self.optimizers if not optimizer.state]
        params: list[Tensor] = []
        for optimizer in without_state:
            for group in optimizer.param_groups:
                params += group["params"]

        # torch would leave the state of an optimizer with gradients empty.
        gradients = [param.grad for param in params]
        try:
            for param in params:
                param.grad = None
            state_dict = get_optimizer_state_dict(self.model, self.optimizers)
        finally:
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient

        # torch creates a missing state by a step of length 0, which must not count.
        for optimizer in without_state:
            for state in optimizer.state.values():
                for name in COUNTERS.keys() & state.keys():
                    state[name] = state[name] * 0 + COUNTERS[name]
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict. State that it does not contain is unchanged.

        A param group gets the options of the saved group that has one of its parameters. Pipeline
        stages save their groups under the same names, so that only one stage's group may be saved.
        A group without a match therefore gets the options of the saved group at its position.
        """
        current = self._by_name()
        current_states = current["state"]
        saved_states = state_dict.get("state", {})
        groups_per_optimizer = self._groups(current, state_dict)
        for optimizer, groups in zip(self.optimizers, groups_per_optimizer, strict=True):
            # Optimizers number their parameters, in the order of the groups.
            numbered_groups: list[dict[str, Any]] = []
            numbered_states: dict[int, dict[str, Any]] = {}
            first_number = 0
            for group in groups:
                names = group.current["params"]
                numbers = list(range(first_number, first_number + len(names)))
                first_number += len(names)
                numbered_groups.append({**group.current, **group.saved, "params": numbers})

                for number, name in zip(numbers, names, strict=True):
                    state = saved_states.get(name) or {}
                    if state or self._had_state:
                        # Entries that were not saved stay. Optimizers keep masters themselves.
                        current_state = dict(current_states.get(name, {}))
                        current_state.pop(MASTER, None)
                        state = current_state | state
                    if state:
                        numbered_states[number] = state

            if not self._had_state:
                optimizer.state.clear()  # parameters without a saved state have none
            optimizer.load_state_dict({"state": numbered_states, "param_groups": numbered_groups})

    def check(self, current: dict[str, Any], saved: dict[str, Any]) -> None:
        """Raise ValueError if an optimizer cannot continue with the options of a saved group.

        Args:
            current: the state dict before the load.
            saved: the state dict to load, with all options that its groups were saved with.
        """
        groups_per_optimizer = self._groups(current, saved)
        for optimizer, groups in zip(self.optimizers, groups_per_optimizer, strict=True):
            if hasattr(optimizer, "check_group"):  # of `fp8rs.optim`
                for group in groups:
                    optimizer.check_group(group.saved)

    def _groups(self, current: dict[str, Any], saved: dict[str, Any]) -> list[list[GroupToLoad]]:
        """Return the param groups of each optimizer.

        Args:
            current: the state dict before the load.
            saved: the state dict to load.
        """
        saved_groups = saved.get("param_groups", [])
        group_by_name: dict[str, dict[str, Any]] = {}
        for saved_group in saved_groups:
            for name in saved_group.get("params", ()):
                group_by_name[name] = saved_group

        groups: list[GroupToLoad] = []
        for position, group in enumerate(current["param_groups"]):
            saved_group = saved_groups[position] if position < len(saved_groups) else {}
            for name in group["params"]:
                if name in group_by_name:
                    saved_group = group_by_name[name]
                    break
            groups.append(GroupToLoad(group, saved_group))

        # torch lists the groups of one optimizer after those of the other.
        groups_per_optimizer = []
        start = 0
        for optimizer in self.optimizers:
            end = start + len(optimizer.param_groups)
            groups_per_optimizer.append(groups[start:end])
            start = end
        return groups_per_optimizer


def _describe(group: dict[str, Any], index: int, position: int) -> str:
    """Return the name of a parameter of an optimizer, or its place and shape if it has no name.

    Args:
        group: the param group.
        index: the index of the group in the optimizer.
        position: the parameter's position in the group.
    """
    param = group["params"][position]
    name = replaced_name(param)
    if name is None and "param_names" in group:
        name = group["param_names"][position]
    if name is not None:
        return name
    return f"parameter {position} of param group {index}, of shape {tuple(param.shape)}"


def _sync_scales(state: dict[str, Any]) -> None:
    """Synchronize the scales that shards of FP8 weights share. All ranks call this."""
    handles = [own_part(value)._storage.observer for value in state.values() if is_fp8(value)]
    for model in dict.fromkeys(handle.sharded_model for handle in handles):
        if model is not None:
            model.sync_scales()


def _layers_with_histories(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the prefixes of names and the layers of delayed scaling. A layer may have several.

    The prefix of a layer X is "X.", and that of a model that is one layer is empty.
    """
    for path, layer in model.named_modules():
        if isinstance(layer, Float8Linear) and layer._fp8_state.delayed is not None:
            (weight,) = layer._fp8_params
            for weight_name in sorted(names_of(model, f"{path}.{weight}".lstrip("."))):
                yield weight_name.removesuffix(weight), layer


def load_parts(value: Tensor, parts: dict[str, Tensor]) -> None:
    """Write loaded codes and scales to an FP8 weight. All ranks call it."""
    weight: QuantizedTensor = own_part(value)
    for suffix, part in (parts_of(value) or {}).items():
        dst = own_part(part)
        src = own_part(parts[suffix])
        if dst.data_ptr() != src.data_ptr():
            dst.copy_(src)
        note_write(dst)
    handle: Any = weight._storage.observer
    reset_scales(handle.module)
    # Ranks that loaded high-precision values now have scales of their own. Notify the handle, so
    # that scales are synchronized. Scales that already agree do not change.
    handle.observe_write(weight, Write(WriteKind.CODES))
