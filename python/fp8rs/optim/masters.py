"""The base class of optimizers that keep fp32 masters in their state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from fp8rs._torch import check_graph_capture, own_part
from fp8rs.model.handle import replaced_name
from fp8rs.optim import fp8_weights
from fp8rs.optim.optim_param import LastWrite, OptimParam, PlainWrite

#: The keys of a parameter's state that belong to its master, not to the update rule.
MASTER_STATE_KEYS = ("master", "scale")


class MasterWeightOptimizer(Optimizer):
    """Base class of the optimizers that keep fp32 masters in their state, under "master".

    With delayed scaling, the state also has the scale of the last codes, under "scale".

    Other code may write a parameter between steps. Whichever of parameter and master was written or
    loaded last wins, for each parameter:

    - An FP8 weight counts its writes. If the count differs from the one that the optimizer saw
      last, the master is read from the weight again.
    - A plain parameter is compared with its master at every step, on the device. Its version
      counter misses writes through ``.data`` and foreach operators on DTensors.
    - In both cases, the elements whose master still rounds to the stored value keep it.
    - In-place arithmetic on an FP8 weight runs on the master, and codes are rounded from the
      result. Arithmetic on codes would lose small changes.
    - Loading an optimizer state replaces the masters that it contains. They win over earlier
      writes. All other masters stay.
    """

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        #: The last write that the master of a parameter includes or overrides. Without an entry,
        #: the master is compared with the parameter at the next step. A plain parameter has an
        #: entry only if its master was loaded, differs from it, and no step was taken since.
        self._last_writes: dict[Tensor, LastWrite] = {}
        #: Whether the parameters were checked since they were added or loaded.
        self._checked = False
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._last_writes = {}
        self._checked = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters."""
        super().add_param_group(param_group)
        self._checked = False

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient.

        A compiled ``step`` runs eagerly, because it has nothing to fuse.

        Args:
            closure: reevaluates the loss, once, before the update. Its result is returned.

        Raises:
            ValueError: at the first step, a parameter was replaced by ``fully_shard`` or
                ``parallelize_module`` after the optimizer was created.
        """
        check_graph_capture(self)
        if not self._checked and not torch.compiler.is_compiling():
            check_not_replaced(self)
            self._checked = True
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    def _update(self) -> None:
        """Update every parameter that has a gradient. Implementations must not be traced."""
        raise NotImplementedError

    def _rounds_stochastically(self, group: dict[str, Any]) -> bool:
        """Return whether the codes of a group's FP8 weights are rounded stochastically."""
        return False

    # --- masters ---------------------------------------------------------------------------------

    def _master(
        self, optim_param: OptimParam, create: bool = True, stochastic: bool = False
    ) -> Tensor | None:
        """Return the master of a parameter, including writes of other code to the parameter.

        Args:
            optim_param: the parameter.
            create: create a missing master, if the parameter needs one.
            stochastic: whether the optimizer rounds codes stochastically.
        """
        param = optim_param.param
        state = self.state[param]
        if create and "master" not in state and optim_param.needs_master:
            state["master"] = optim_param.new_master()
            if optim_param.weight is not None:
                self._last_writes[param] = optim_param.last_write
            if optim_param.delayed is not None:
                state["scale"] = optim_param.plane.scale.clone()

        # From now on, exact values of the weight are those of its master, if it has one.
        master: Tensor | None = state.get("master")
        if optim_param.handle is not None:
            if master is None:
                optim_param.handle.forget_init()
            else:
                optim_param.handle.use_master(self, param)
        if master is None:
            return None

        # A loaded master may have no scale. Then no value is saturated, because no scale is near 0.
        if "scale" not in state and optim_param.delayed is not None:
            state["scale"] = torch.zeros((), dtype=torch.float32, device=optim_param.local.device)
        self._read_writes(optim_param, own_part(master), stochastic)

        if optim_param.weight is None and param in self._last_writes:
            # The parameter differs from a loaded master, which wins. Write it now, because the
            # update may be skipped, and the parameter would then look written since the load.
            del self._last_writes[param]
            optim_param.local.copy_(own_part(master))
        return master

    def _read_writes(self, optim_param: OptimParam, master: Tensor, stochastic: bool) -> None:
        """Update a master (a local tensor) by what other code has written to its parameter."""
        last_write = self._last_writes.get(optim_param.param)
        if optim_param.weight is None:
            assert last_write is None or isinstance(last_write, PlainWrite)
            optim_param.read_plain(master, last_write)
        elif last_write != optim_param.last_write:
            optim_param.read_codes(master, stochastic, self.state[optim_param.param].get("scale"))

    def local_master(self, parameter: Tensor) -> Tensor | None:
        """Return the master of this rank's part of a parameter, float32, or None."""
        master = self.state.get(parameter, {}).get("master")
        return None if master is None else own_part(master)

    def is_current(self, parameter: Tensor) -> bool:
        """Return whether an FP8 weight's master includes all writes to the weight."""
        return self._last_writes.get(parameter) == OptimParam(parameter).last_write

    def mark_current(self, parameter: Tensor) -> None:
        """Record that an FP8 weight's master includes all writes to the weight."""
        self._last_writes[parameter] = OptimParam(parameter).last_write

    def _mark_written(self, params: Sequence[OptimParam]) -> None:
        """Record that a step has written these parameters."""
        fp8_weights.mark_written(params)

        codes_scales = []
        master_scales = []
        for optim_param in params:
            state = self.state[optim_param.param]
            if optim_param.weight is None or "master" not in state:
                continue
            self._last_writes[optim_param.param] = optim_param.last_write
            if optim_param.delayed is not None:
                codes_scales.append(optim_param.plane.scale)
                master_scales.append(state["scale"])
        if master_scales:
            torch._foreach_copy_(master_scales, codes_scales)

    # --- state dicts -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as ``torch.optim`` does.

        If other code has written a parameter since the last step, the state has a copy of its
        master with the written values. Saving or loading the state therefore does not undo that
        write.
        """

        def make_masters_current(_: Optimizer, state_dict: dict[str, Any]) -> None:
            self._make_masters_current(state_dict)

        hook = self.register_state_dict_post_hook(make_masters_current, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    @torch.no_grad()
    def _make_masters_current(self, state_dict: dict[str, Any]) -> None:
        """Replace masters in a state dict that do not include writes of other code."""
        saved_groups = state_dict["param_groups"]
        for group, saved_group in zip(self.param_groups, saved_groups, strict=True):
            stochastic = self._rounds_stochastically(group)
            for param, key in zip(group["params"], saved_group["params"], strict=True):
                state = state_dict["state"].get(key, {})
                if "master" not in state:
                    continue

                optim_param = OptimParam(param)
                master = own_part(state["master"])
                if optim_param.weight is None:
                    is_current = optim_param.is_rounded(master)
                else:
                    is_current = self.is_current(param)
                if is_current:
                    continue

                # The optimizer reads the writes into its own master at the next step.
                master = master.clone()
                self._read_writes(optim_param, master, stochastic)
                state_dict["state"][key] = {**state, "master": optim_param.like(master)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state. Unlike ``torch.optim``, keep the dtypes that it was saved in.

        The masters in the state override earlier writes to the parameters. Masters that are not in
        the state stay. Later writes to the parameters are read into the masters at the next step.

        Raises:
            ValueError: the optimizer does not support an option in the state, a parameter's state
                lacks an entry that the optimizer needs, or a tensor in the state does not have the
                shape of its parameter. Nothing is loaded then.
        """
        state_before = dict(self.state)
        last_writes_before = self._last_writes
        loaded_state_dict = state_dict

        def check(_: Optimizer, state_dict: dict[str, Any]) -> None:
            # Users' hooks run before this one, and may have replaced the state dict.
            nonlocal loaded_state_dict
            loaded_state_dict = state_dict
            # torch raises if the numbers of groups or parameters differ.
            for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
                self.check_group(saved)
                for param, key in zip(group["params"], saved["params"], strict=False):
                    state = state_dict["state"].get(key, {})
                    self.check_state(state)
                    check_sizes(param, state)

        def finish_load(_: Optimizer) -> None:
            self._finish_load(loaded_state_dict, state_before, last_writes_before)

        pre_hook = self.register_load_state_dict_pre_hook(check)
        post_hook = self.register_load_state_dict_post_hook(finish_load, prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            pre_hook.remove()
            post_hook.remove()

    def check_group(self, saved: dict[str, Any]) -> None:
        """Raise ValueError if this optimizer cannot continue with a saved group's options."""

    def check_state(self, saved: dict[str, Any]) -> None:
        """Raise ValueError if this optimizer cannot continue with a parameter's saved state."""

    @torch.no_grad()
    def _finish_load(
        self,
        state_dict: dict[str, Any],
        state_before: dict[Tensor, Any],
        last_writes_before: dict[Tensor, LastWrite],
    ) -> None:
        """Replace the tensors that torch has converted by the saved ones. Keep missing masters.

        Args:
            state_dict: the state that is loaded.
            state_before: the state before loading.
            last_writes_before: the value of ``_last_writes`` before loading.
        """
        for key, param in parameters_by_key(self, state_dict):
            optim_param = OptimParam(param)
            saved = state_dict["state"].get(key, {})
            before = state_before.get(param, {})
            if saved:
                self._copy_saved(optim_param, saved)

            if "master" in saved:
                self._master_was_loaded(optim_param)
            elif "master" in before:
                # The state has no master for this parameter, so the current one stays valid.
                for name in MASTER_STATE_KEYS:
                    if name in before:
                        self.state[param][name] = before[name]
                if param in last_writes_before:
                    self._last_writes[param] = last_writes_before[param]

    def _master_was_loaded(self, optim_param: OptimParam) -> None:
        """Let a loaded master override all earlier writes to its parameter."""
        param = optim_param.param
        if optim_param.handle is not None:
            optim_param.handle.use_master(self, param)

        master = own_part(self.state[param]["master"])
        is_plain = optim_param.weight is None
        if is_plain and optim_param.is_rounded(master):
            return  # the parameter has no values to override
        self._last_writes[param] = optim_param.last_write

    def _copy_saved(self, optim_param: OptimParam, saved: dict[str, Any]) -> None:
        """Copy the saved state of one parameter, in the dtypes that it was saved in."""
        device = optim_param.local.device
        copy = partial(Tensor.to, device=device, copy=True)
        state = self.state[optim_param.param]
        for name, value in saved.items():
            if name == "step":
                state[name] = self._loaded_step(deepcopy(state[name]), device)
            else:  # a tensor, or a container of tensors
                state[name] = tree_map_only(Tensor, copy, value)

    def _loaded_step(self, step: Any, device: torch.device) -> Any:
        """Convert the step counter that ``torch.optim`` has loaded."""
        return step


def parameters_by_key(
    optimizer: Optimizer, state_dict: dict[str, Any]
) -> Iterator[tuple[Any, Tensor]]:
    """Yield each parameter of an optimizer with its key in a state dict."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return zip(keys, params, strict=True)


def check_not_replaced(optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer holds parameters that its model no longer has."""
    names = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = replaced_name(param)
            if name is not None:
                names.append(name)

    if names:
        raise ValueError(
            f"{type(optimizer).__name__} holds {len(names)} parameters from before fully_shard or "
            f"parallelize_module, the first of them {names[0]}. The model has other parameters "
            "now, so a step would not train it. Create the optimizer after fully_shard"
        )


def check_sizes(param: Tensor, state: dict[str, Any]) -> None:
    """Raise ValueError if a saved state does not have the shape of the local parameter.

    A mismatch means that the state belongs to another parameter or was saved on a different number
    of ranks.
    """
    param_shape = own_part(param).shape
    for name in ("exp_avg", "exp_avg_sq", "exp_avg_codes", "exp_avg_sq_codes", "master"):
        if name not in state:
            continue
        shape = own_part(state[name]).shape
        if shape != param_shape:
            raise ValueError(
                f"{name} in the state has shape {tuple(shape)} here,"
                f" its parameter {tuple(param_shape)}; they must be the same"
            )
