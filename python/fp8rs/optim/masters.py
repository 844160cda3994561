"""Fp32 masters in an optimizer's state: made, kept in step with what others write, loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fp8rs._torch import check_graph_capture, dtensor_like, is_distributed, own_part
from fp8rs.optim import weights

#: What of a parameter's state is of its master, and not of the rule that steps it.
OWN = ("master", "scale")


class WithMasters(Optimizer):
    """Base of the optimizers whose state has masters, under "master": see `new_master`.

    Of weights with delayed scaling the state has under "scale" what codes were last written with.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        #: Of parameters with masters, which of their writes was the last to reach those.
        self._followed: dict[Tensor, tuple[int, int, int]] = {}
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._followed = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        A compiled ``step`` runs as an eager one: there is nothing in it to fuse.

        Args:
            closure: computes the loss anew, once, before the update; its result is given back.
        """
        check_graph_capture(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        """Update every parameter that has a gradient, untraced."""
        raise NotImplementedError

    def _master(
        self, param: Tensor, wanted: bool = True, stochastic: bool = False
    ) -> Tensor | None:
        """A parameter's master, or None; what others have written to the parameter is in it.

        Args:
            param: as the optimizer has it.
            wanted: make one where there is none yet, and the parameter is not exact by itself.
            stochastic: how the optimizer rounds.
        """
        state, weight = self.state[param], own_part(param)
        if wanted and "master" not in state and not is_exact(param):
            state["master"] = new_master(param, weight)
        weights.drop_init(param)  # also where masters came from a checkpoint
        master: Tensor | None = state.get("master")
        if master is not None:
            if "scale" not in state and weights.known(param):
                state["scale"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            writes = weights.writes(param)
            if self._followed.get(param, writes) != writes:
                scale = state.get("scale")
                weights.follow(param, own_part(master), stochastic, scale)
        return master

    def _wrote(self, params: Sequence[Tensor]) -> None:
        """A step has written these parameters."""
        weights.wrote(params)
        scales = [(p, self.state[p]["scale"]) for p in params if "scale" in self.state[p]]
        weights.keep_scales([(p, scale) for p, scale in scales if weights.known(p)])
        for param in params:
            if "master" in self.state[param]:
                self._followed[param] = weights.writes(param)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim``'s, but what is loaded keeps the dtype that it was saved in.

        Masters are taken as they are, whatever the parameters are at the moment; what is written to
        these afterwards they follow.

        Raises:
            ValueError: a master or a moment does not fit its parameter. Nothing is loaded then.
        """
        loaded: list[dict[str, Any]] = []

        def last(_: Optimizer, state_dict: dict[str, Any]) -> None:
            # Other numbers of groups or parameters are for torch to refuse.
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
                self._check_group(saved)
                for param, key in zip(group["params"], saved["params"], strict=False):
                    check_sizes(param, state_dict["state"].get(key, {}))
            loaded.append(state_dict)  # as other hooks have left it

        def first(_: Optimizer) -> None:
            self._take_state(loaded[-1])

        hooks = (
            self.register_load_state_dict_pre_hook(last),
            self.register_load_state_dict_post_hook(first, prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _check_group(self, saved: dict[str, Any]) -> None:
        """Raise for the options of a saved group that this optimizer cannot go on with."""

    def _take_state(self, state_dict: dict[str, Any]) -> None:
        self._followed = {}
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, param in zip(saved, own, strict=True):
            if key not in state_dict["state"]:
                continue
            device, state = own_part(param).device, self.state[param]
            for name, value in state_dict["state"][key].items():
                if name == "step":
                    state[name] = self._loaded_step(deepcopy(state[name]), device)
                elif isinstance(value, Tensor):
                    state[name] = value.to(device, copy=True)
            if "master" in state:
                self._followed[param] = weights.writes(param)

    def _loaded_step(self, step: Any, device: torch.device) -> Any:
        """The counter of a parameter's steps, from what ``torch.optim`` made of what was saved."""
        return step


def is_exact(param: Tensor) -> bool:
    """Whether a parameter needs no master: it is neither FP8 nor of another 16-bit dtype."""
    low = (torch.bfloat16, torch.float16)
    return weights.quantized(param) is None and own_part(param).dtype not in low


def new_master(param: Any, weight: Tensor) -> Tensor:
    """A float32 copy of a parameter's values, or of those that it was initialized with."""
    kept = weights.kept_init(param)
    quantized = weights.quantized(param)
    if kept is not None:
        master = kept.detach().to(weight.device, torch.float32, copy=True).contiguous()
        weights.drop_init(param)
    elif quantized is not None:
        master = quantized.dequantize(torch.float32)
    else:
        master = torch.zeros_like(weight, dtype=torch.float32).copy_(weight)
    return distributed_like(param, master)


def distributed_like(param: Any, part: Tensor) -> Tensor:
    """``part`` as the local part of a tensor that is distributed as ``param`` is."""
    if not is_distributed(param):
        return part
    return dtensor_like(param, part)


def check_sizes(param: Tensor, state: dict[str, Any]) -> None:
    """Raise for a state that is another parameter's, or of another number of ranks."""
    own = own_part(param).shape
    for name in ("exp_avg", "exp_avg_sq", "master"):
        if name in state and own_part(state[name]).shape != own:
            raise ValueError(
                f"{name} in the state has shape {tuple(own_part(state[name]).shape)} here,"
                f" its parameter {tuple(own)}; they must be the same"
            )
