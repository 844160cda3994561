"""AdamW for FP8 weights, with or without masters, and for plain parameters."""

from __future__ import annotations

from numbers import Real
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from fp8rs._torch import not_traced, own_part
from fp8rs.optim import weights
from fp8rs.optim.lists import Item, Options, Step
from fp8rs.optim.masters import WithMasters, distributed_like
from fp8rs.tensor.formats import INPUT_DTYPES

STATE_DTYPES = (torch.float32, torch.bfloat16)


class AdamW(WithMasters):
    """Decoupled weight decay (Loshchilov and Hutter, 2019), as ``torch.optim.AdamW`` computes it.

    Parameters may be FP8 weights (quantized tensors, or DTensors over them) and plain (float32,
    bfloat16, float16) in one call. FP8 codes are written by the kernel that updates: with scales
    known beforehand (delayed scaling), or found in the same pass (a row's, a block's); where a
    tensor has one scale of its own values, their maxima are found first, and those of all weights
    reduced over ranks at once. Nothing waits for the device, so that a step can be captured in a
    CUDA graph, and all parameters of a kind go in one launch. CPU and CUDA write the same bytes.

    The arithmetic is that of ``torch.ops.fp8rs.adamw_``, in float32 whatever the dtypes. Moments in
    bfloat16 are rounded to nearest where they are stored: with ``betas[1]`` above 0.998 the second
    one then cannot shrink (a step changes it by less than half a unit in the last place).

    Without masters the step starts from the codes. Rounding to nearest would lose all steps shorter
    than half the distance to the next code, so codes are rounded stochastically: right in the mean,
    with the noise of FP8 in every weight. The random numbers depend on ``seed``, the step, the
    parameter's number and an element's place in the whole weight, and so not on the number of
    ranks that it is cut over by rows; cut by columns, no two elements have one number. Plain
    parameters are rounded to nearest. Formats and shards whose codes other means make (1x128, 1x32,
    blocks that shards cut) take several passes.

    Args:
        params: parameters or groups of them.
        lr: the learning rate; a tensor of one element where it is to change under a CUDA graph.
        betas: how much of the moments is kept.
        eps: added to the denominator.
        weight_decay: times ``lr``, the part of each weight that a step takes away.
        maximize: go uphill.
        capturable: for ``torch.optim``'s checks; every step is.
        state_dtype: of the moments, torch.float32 or torch.bfloat16.
        master_weights: keep a float32 master of each parameter that is not float32, in the state
            under "master". It starts from the values that a weight was initialized with, where
            those were kept, else from the weight. Where others write the parameter between steps
            (an average is swapped in, a checkpoint is loaded), it becomes what they wrote, but
            for the elements that are still its rounding.
        stochastic_rounding: how codes are rounded; None is stochastically where there are no
            masters, and to nearest where there are.
        seed: of the random numbers, 64 bits. All ranks must have the same.

    A ``torch.amp.GradScaler`` hands over its scale and what it found: a step that it skips changes
    no byte. Nothing is unscaled in ``.grad``.

    Raises:
        TypeError, ValueError: an argument is none of those; at a step, a gradient does not fit its
            parameter. Nothing is written then.
    """

    _step_supports_amp_scaling = True

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        capturable: bool = False,
        state_dtype: torch.dtype = torch.float32,
        master_weights: bool = True,
        stochastic_rounding: bool | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "maximize": maximize,
                "capturable": capturable,
                "state_dtype": state_dtype,
                "master_weights": master_weights,
                "stochastic_rounding": stochastic_rounding,
                "seed": seed,
            },
        )
        self.defaults["state_dtype"] = name_of(state_dtype)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As ``torch.optim``'s; the group may have any of the constructor's options.

        Raises:
            TypeError, ValueError: as the constructor.
        """
        group = {**self.defaults, **param_group}
        check_options(group)
        super().add_param_group({**param_group, "state_dtype": name_of(group["state_dtype"])})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, value in self.defaults.items():
                if name != "differentiable":  # torch adds it to the defaults of every optimizer
                    group.setdefault(name, value)

    # Traced, a parameter's state was given to another parameter.
    @not_traced
    def _update(self) -> None:
        weights.prepare([p for group in self.param_groups for p in group["params"]])
        for group in self.param_groups:
            check_options(group)
        # All that a step is of is checked before the state of anything begins.
        given = [
            (group, index, param, *checked(param))
            for index, (group, param) in enumerate(
                (group, param) for group in self.param_groups for param in group["params"]
            )
            if param.grad is not None
        ]
        items: dict[torch.device, list[Item]] = {}
        options: dict[tuple[int, torch.device], Options] = {}
        for group, index, param, weight, grad in given:
            key = id(group), weight.device
            if key not in options:
                options[key] = self._options(group, weight.device)
            item = Item(
                param, weight, grad, *self._state(group, param, weight), index, options[key]
            )
            items.setdefault(weight.device, []).append(item)
        found_inf = getattr(self, "found_inf", None)
        for device, here in items.items():
            counters = [item.step for item in here]
            torch._foreach_add_(counters, 1)
            Step(here).run()
            if found_inf is not None:  # what was skipped was no step
                skipped = found_inf.to(device, non_blocking=True).view(())
                torch._foreach_sub_(counters, [skipped] * len(counters))
        self._wrote([item.param for here in items.values() for item in here])

    def _options(self, group: dict[str, Any], device: torch.device) -> Options:
        lr = group["lr"]
        tensor = None
        if isinstance(lr, Tensor):
            if lr.device.type == "cpu" and not group["capturable"]:
                lr = float(lr)
            else:
                tensor = lr.to(device=device, dtype=torch.float32, non_blocking=True)
                lr = 0.0
        stochastic, seed = self._rounds_stochastically(group), group["seed"]
        scaler = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        return {
            "lr": lr,
            "lr_tensor": tensor,
            "beta1": group["betas"][0],
            "beta2": group["betas"][1],
            **{name: group[name] for name in ("eps", "weight_decay", "maximize")},
            "seed": (seed if seed < 2**63 else seed - 2**64) if stochastic else None,
            **{
                name: None if value is None else value.to(device, non_blocking=True)
                for name, value in scaler.items()
            },
        }

    def _rounds_stochastically(self, group: dict[str, Any]) -> bool:
        stochastic = group["stochastic_rounding"]
        return bool(not group["master_weights"] if stochastic is None else stochastic)

    def _state(
        self, group: dict[str, Any], param: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """A parameter's moments, counter of steps and master, made where there are none yet."""
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state_like(param, weight, getattr(torch, group["state_dtype"]))
        stochastic = self._rounds_stochastically(group)
        master = self._master(param, group["master_weights"], stochastic)
        exp_avg, exp_avg_sq = (own_part(state[name]) for name in ("exp_avg", "exp_avg_sq"))
        return exp_avg, exp_avg_sq, state["step"], None if master is None else own_part(master)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As ``torch.optim``'s, but moments and masters keep the dtypes that they were saved in.

        Masters are taken as they are, whatever the parameters are at the moment; what is written to
        these afterwards they follow. The state of a ``torch.optim.AdamW`` is taken too.

        Raises:
            TypeError, ValueError: an option is none of the constructor's, the state is of another
                rule (AMSGrad, Adam's own weight decay), or does not fit its parameter. Nothing is
                loaded then.
        """
        super().load_state_dict(state_dict)

    def _check_group(self, saved: dict[str, Any]) -> None:
        check_options({**self.defaults, **saved})
        check_rule(saved)

    def _loaded_step(self, step: Any, device: torch.device) -> Tensor:
        # Some optimizers count in an int.
        return torch.as_tensor(step, dtype=torch.float32, device=device)


def name_of(dtype: torch.dtype | str) -> str:
    """A dtype's name: tools that gather state dicts take no dtypes."""
    return str(dtype).removeprefix("torch.")


def check_options(group: dict[str, Any]) -> None:
    """Raise for what no group can have."""
    lr, betas, seed = group["lr"], group["betas"], group["seed"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError(f"lr is a tensor of shape {tuple(lr.shape)}; it must have one element")
    for name in ("lr", "eps", "weight_decay"):
        value = group[name]
        if name == "lr" and isinstance(value, Tensor):
            continue  # nothing is read of a tensor on a device
        if not is_number(value):
            raise TypeError(f"{name} is {value!r}; it must be a number")
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value}; it must be finite and at least 0")
    if not isinstance(betas, (tuple, list)) or not all(map(is_number, betas)):
        raise TypeError(f"betas is {betas!r}; it must be two numbers, at least 0 and below 1")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas is {betas}; it must be two numbers, at least 0 and below 1")
    for name in ("maximize", "capturable", "master_weights"):
        if not isinstance(group[name], bool):
            raise TypeError(f"{name} is {group[name]!r}; it must be a bool")
    if not isinstance(group["stochastic_rounding"], (bool, NoneType)):
        raise TypeError(
            f"stochastic_rounding is {group['stochastic_rounding']!r}; it must be a bool or None"
        )
    if name_of(group["state_dtype"]) not in map(name_of, STATE_DTYPES):
        raise TypeError(
            f"state_dtype is {group['state_dtype']}; it must be torch.float32 or torch.bfloat16"
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed is {seed!r}; it must be an int of 64 bits")
    if not -(2**63) <= seed < 2**64:
        raise ValueError(f"seed is {seed}; it must be of 64 bits")


def is_number(value: Any) -> bool:
    """Whether ``value`` is a number of Python's or NumPy's."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_rule(group: dict[str, Any]) -> None:
    """Raise for a group of ``torch.optim`` that is updated in another way than here."""
    if group.get("amsgrad"):
        raise ValueError("the state is of amsgrad=True; AMSGrad's maxima have no place here")
    if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
        raise ValueError(
            f"the state is of Adam with weight_decay={group['weight_decay']}, which adds it to the "
            "gradient; here it is decoupled. Save it with weight_decay 0, and choose one anew"
        )


def checked(param: Tensor) -> tuple[Tensor, Tensor]:
    """The local parts of a parameter and its gradient; raises where they do not fit."""
    grad = param.grad
    assert grad is not None
    weight = own_part(param)
    if grad.layout != torch.strided:
        raise TypeError(f"a gradient is of layout {grad.layout}; it must be strided")
    if weight.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"a parameter has dtype {weight.dtype}; it must be float32, bfloat16 or float16"
        )
    whole: Any = grad
    if hasattr(whole, "placements"):
        like: Any = param
        if not hasattr(like, "placements"):
            raise ValueError(
                f"a gradient has placements {whole.placements}, its parameter is no DTensor"
            )
        if whole.placements != like.placements:  # an embedding's that is split by rows
            whole = whole.redistribute(placements=like.placements)
        grad = whole.to_local()  # which waits for it
    if grad.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"a gradient has dtype {grad.dtype}; it must be float32, bfloat16 or float16"
        )
    if grad.shape != weight.shape or grad.device != weight.device:
        raise ValueError(
            f"a gradient has shape {tuple(grad.shape)} on {grad.device}, its parameter"
            f" {tuple(weight.shape)} on {weight.device}; they must be the same"
        )
    return weight, grad


def state_like(param: Any, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros laid out as a parameter's local part is; a DTensor where the parameter is one."""
    if weights.quantized(param) is not None:
        zeros = torch.zeros(weight.shape, dtype=dtype, device=weight.device)
    else:
        zeros = torch.zeros_like(weight, dtype=dtype, memory_format=torch.preserve_format)
    return distributed_like(param, zeros)
