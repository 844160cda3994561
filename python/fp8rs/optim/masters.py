"""Fp32 masters in an optimizer's state: made, kept in step with what others write, loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    """Base class of the optimizers that keep fp32 masters in their state, under "master".

    With delayed scaling, the state also has the scale of the last codes, under "scale".

    Other code may write a parameter between steps. Whichever of parameter and master was written or
    loaded last wins, for each parameter:

    - An FP8 weight counts its writes. If the count differs from the one that the optimizer saw
      last, the master is read from the weight again.
    - A plain parameter is compared with its master at every step, on the device. Its version
      counter misses writes through ``.data`` and foreach operators on DTensors.
    - In both cases, the elements whose master still rounds to the stored value keep it.
    - Loading an optimizer state replaces the masters that it contains. They win over earlier
      writes. All other masters stay.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        self._reset_seen()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._reset_seen()

    def _reset_seen(self) -> None:
        #: The write count of each FP8 weight that its master includes. Without an entry, the master
        #: is read from the weight again.
        self._seen: dict[Tensor, tuple[int, ...]] = {}
        #: The content of each plain parameter that differed from its master when that was loaded.
        #: The master wins, unless the parameter is written before the next step.
        self._outdated: dict[Tensor, weights.Content] = {}

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
        """Return the master of a parameter, with what other code has written to the parameter.

        Args:
            param: the parameter, as the optimizer has it.
            wanted: create a missing master, unless the parameter is exact without one.
            stochastic: whether the optimizer rounds codes stochastically.
        """
        state, part = self.state[param], own_part(param)
        if wanted and "master" not in state and not is_exact(param):
            state["master"] = new_master(param, part)
            self._saw(param)
        weights.drop_init(param)  # also where masters came from a checkpoint
        master: Tensor | None = state.get("master")
        if master is None:
            return None
        if "scale" not in state and weights.known(param):
            state["scale"] = torch.zeros((), dtype=torch.float32, device=part.device)
        self._read_writes(param, own_part(master), stochastic)
        if self._outdated.pop(param, None) is not None:
            # The update may be skipped. The parameter must then not look written since.
            part.copy_(own_part(master))
        return master

    def _read_writes(self, param: Tensor, master: Tensor, stochastic: bool) -> None:
        """Read what other code has written to a parameter into its master (a local tensor)."""
        if weights.quantized(param) is None:
            weights.read_plain(param, master, self._outdated.get(param))
        elif self._is_stale(param):
            weights.follow(param, master, stochastic, self.state[param].get("scale"))

    def _is_stale(self, param: Tensor) -> bool:
        """Whether other code has written an FP8 weight since its master was current."""
        return self._seen.get(param) != weights.write_count(param)

    def _saw(self, param: Tensor) -> None:
        """Record that the master of a parameter includes all writes to it."""
        if weights.quantized(param) is not None:
            self._seen[param] = weights.write_count(param)

    def _rounds_stochastically(self, group: dict[str, Any]) -> bool:
        """Return whether the codes of a group's FP8 weights are rounded stochastically."""
        return False

    def _wrote(self, params: Sequence[Tensor]) -> None:
        """A step has written these parameters."""
        weights.wrote(params)
        scales = [(p, self.state[p]["scale"]) for p in params if "scale" in self.state[p]]
        weights.keep_scales([(p, scale) for p, scale in scales if weights.known(p)])
        for param in params:
            if "master" in self.state[param]:
                self._saw(param)

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as ``torch.optim`` does.

        A master whose parameter was written by other code since the last step is a copy with what
        was written. Saving it or loading it again therefore does not undo that write.
        """
        hook = self.register_state_dict_post_hook(_with_current_masters, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Unlike ``torch.optim``, keep the dtypes that it was saved in.

        The masters that it contains win over what was written to the parameters before. Masters
        that it does not contain stay. What is written to the parameters afterwards is read into the
        masters at the next step.

        Raises:
            ValueError: a master or a moment does not fit its parameter. Nothing is loaded then.
        """
        loaded: list[dict[str, Any]] = []
        before = dict(self.state), self._seen, self._outdated

        def last(_: Optimizer, state_dict: dict[str, Any]) -> None:
            # torch refuses other numbers of groups or parameters.
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
                self._check_group(saved)
                for param, key in zip(group["params"], saved["params"], strict=False):
                    check_sizes(param, state_dict["state"].get(key, {}))
            loaded.append(state_dict)  # as other hooks have left it

        def first(_: Optimizer) -> None:
            self._take_state(loaded[-1], *before)

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

    @torch.no_grad()
    def _take_state(
        self,
        state_dict: dict[str, Any],
        old: dict[Tensor, Any],
        seen: dict[Tensor, tuple[int, ...]],
        outdated: dict[Tensor, weights.Content],
    ) -> None:
        for key, param in parameters_by_key(self, state_dict):
            given = state_dict["state"].get(key, {})
            device, state = own_part(param).device, self.state[param] if given else {}
            for name, value in given.items():
                if name == "step":
                    state[name] = self._loaded_step(deepcopy(state[name]), device)
                elif isinstance(value, Tensor):
                    state[name] = value.to(device, copy=True)
            if "master" in given:
                self._saw(param)
                if not weights.is_rounded(param, own_part(state["master"])):
                    self._outdated[param] = weights.Content(param)
            elif "master" in old.get(param, {}):
                self.state[param].update({n: old[param][n] for n in OWN if n in old[param]})
                if param in seen:
                    self._seen[param] = seen[param]
                if param in outdated:
                    self._outdated[param] = outdated[param]

    def _loaded_step(self, step: Any, device: torch.device) -> Any:
        """The counter of a parameter's steps, from what ``torch.optim`` made of what was saved."""
        return step


@torch.no_grad()
def _with_current_masters(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """Replace masters in a state dict that lack what other code has written to the parameters."""
    groups = [group for group in optimizer.param_groups for _ in group["params"]]
    for group, (key, param) in zip(groups, parameters_by_key(optimizer, state_dict), strict=True):
        state = state_dict["state"].get(key, {})
        if "master" not in state:
            continue
        master = own_part(state["master"])
        if weights.quantized(param) is not None:
            current = not optimizer._is_stale(param)
        else:
            outdated = optimizer._outdated.get(param)
            current = weights.is_rounded(param, master) or (
                outdated is not None and bool(outdated.is_in(param))
            )
        if not current:
            master = master.clone()
            optimizer._read_writes(param, master, optimizer._rounds_stochastically(group))
            state_dict["state"][key] = {**state, "master": distributed_like(param, master)}


def parameters_by_key(
    optimizer: Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[Any, Tensor]]:
    """Yield each parameter of an optimizer with its key in a state dict."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return zip(keys, params, strict=True)


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
