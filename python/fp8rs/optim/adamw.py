"""AdamW for FP8 weights, with or without masters, and for plain parameters."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any, cast

import torch
from torch import Tensor
from typing_extensions import override

from fp8rs._torch import not_traced, own_part
from fp8rs.optim import weights
from fp8rs.optim.masters import MASTER_STATE_KEYS, MasterWeightOptimizer
from fp8rs.optim.param import Param
from fp8rs.optim.step import Options, ParamUpdate, Step
from fp8rs.quantize.formats import INPUT_DTYPES


class AdamW(MasterWeightOptimizer):
    """Decoupled weight decay (Loshchilov and Hutter, 2019), as ``torch.optim.AdamW`` computes it.

    Parameters may be FP8 weights (quantized tensors, or DTensors over them) and plain float32,
    bfloat16 or float16 tensors in one optimizer. The kernel that updates a weight also writes its
    codes. With delayed scaling, the scales are known before the step. With a scale per row or
    block, they are computed in the same pass. With one current scale per tensor, a first pass
    computes the amaxes of all weights, which one collective per mesh reduces. A step does not
    synchronize with the device, can be captured in a CUDA graph, and updates all parameters of a
    kind in one launch. CPU and CUDA write equal bytes.

    ``torch.ops.fp8rs.adamw_`` defines the arithmetic, in float32 for all dtypes. bfloat16 moments
    are rounded to nearest when they are stored. With ``betas[1]`` above 0.998 the second moment
    then cannot shrink, because a step changes it by less than half a unit in the last place.

    Without masters, a step starts from the codes. Rounding to nearest would lose all steps shorter
    than half the distance to the next code. Codes are therefore rounded stochastically, which is
    unbiased but adds FP8 rounding noise to every weight. The random numbers depend on ``seed``, the
    step, the parameter's index and an element's index in the whole weight. They do not depend on
    the number of ranks that shard its rows. If its columns are sharded, no two elements share a
    number. Plain parameters are rounded to nearest. A step with a learning rate of 0 (not a tensor)
    changes no codes and no scales. Formats and shards whose codes the kernel does not write (1x128,
    1x32, blocks that span ranks) take several passes.

    Args:
        params: parameters or groups of them.
        lr: the learning rate; a tensor of one element if it changes under a CUDA graph.
        betas: decay rates of the two moments.
        eps: added to the denominator.
        weight_decay: a step subtracts the fraction ``lr * weight_decay`` of each weight.
        maximize: maximize the objective.
        capturable: accepted for the checks of ``torch.optim``. Every step is capturable.
        state_dtype: the dtype of the moments, torch.float32 or torch.bfloat16.
        master_weights: keep a float32 master of each parameter that is not float32, in the state
            under "master". It starts from the values that a weight was initialized with, if they
            were kept, else from the weight. If other code writes the parameter between steps (it
            swaps in an average, or loads a checkpoint), the master takes the written values. An
            element keeps its master if the written value is still the rounded master. In-place
            arithmetic on an FP8 weight changes its master.
        stochastic_rounding: whether codes are rounded stochastically, or to nearest. None rounds
            stochastically without masters and to nearest with them.
        seed: the seed of the random numbers, 64 bits. All ranks must have the same seed.

    ``load_state_dict`` also loads states of ``torch.optim.AdamW``, except with AMSGrad. Options
    that a saved group lacks, such as ``state_dtype``, keep the values of the optimizer's group.

    With a ``torch.amp.GradScaler``, the step itself unscales gradients and is skipped if one of
    them is not finite. A skipped step changes no byte. ``.grad`` stays scaled.

    Raises:
        ValueError: an argument is not as described.
        TypeError: at a step, a gradient has an unsupported dtype or layout. Nothing is written.
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
        """Add a group, which may have any option of the constructor.

        Raises:
            ValueError: an option is invalid.
        """
        group = {**self.defaults, **param_group}
        check_options(group)
        super().add_param_group({**param_group, "state_dtype": name_of(group["state_dtype"])})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict calls this with the loaded groups. A copy or a pickle has no earlier ones.
        earlier = getattr(self, "param_groups", [])
        super().__setstate__(state)
        for group, before in zip(self.param_groups, earlier, strict=False):
            for name in OPTIONS:
                group.setdefault(name, before[name])

    # When it was traced, a parameter's state was assigned to another parameter.
    @not_traced
    def _update(self) -> None:
        params = [(group, Param(param)) for group in self.param_groups for param in group["params"]]
        weights.prepare([p for _, p in params])
        for group in self.param_groups:
            check_options(group)
        # Check all gradients before any state is created.
        given = [
            (group, index, p, local_grad(p))
            for index, (group, p) in enumerate(params)
            if p.param.grad is not None
        ]
        items: dict[torch.device, list[ParamUpdate]] = {}
        options: dict[tuple[int, torch.device], Options] = {}
        for group, index, p, grad in given:
            device = p.part.device
            key = id(group), device
            if key not in options:
                options[key] = self._options(group, device)
            item = ParamUpdate(p, grad, *self._state(group, p), index, options[key])
            items.setdefault(device, []).append(item)
        for here in items.values():
            counters = [item.step for item in here]
            torch._foreach_add_(counters, 1)
            Step(here).run()
            found_inf = here[0].options["found_inf"]
            if found_inf is not None:  # a skipped step is not counted
                torch._foreach_sub_(counters, [found_inf.view(())] * len(counters))
        self._wrote([i.p for here in items.values() for i in here if not i.keeps_codes])

    def _options(self, group: dict[str, Any], device: torch.device) -> Options:
        lr = group["lr"]
        tensor = None
        if isinstance(lr, Tensor):
            if lr.device.type == "cpu" and not group["capturable"]:
                lr = float(lr)
            else:
                tensor = copy_to(device, lr).float()
                lr = 0.0
        options = {name: group[name] for name in ("eps", "weight_decay", "maximize")}
        options["beta1"], options["beta2"] = group["betas"]
        for name in ("grad_scale", "found_inf"):
            value = getattr(self, name, None)
            options[name] = None if value is None else copy_to(device, value)
        seed = group["seed"] if self._rounds_stochastically(group) else None
        if seed is not None and seed >= 2**63:
            seed -= 2**64
        return {**options, "lr": lr, "lr_tensor": tensor, "seed": seed}

    def _rounds_stochastically(self, group: dict[str, Any]) -> bool:
        stochastic = group["stochastic_rounding"]
        return bool(not group["master_weights"] if stochastic is None else stochastic)

    def _state(
        self, group: dict[str, Any], p: Param
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, bool]:
        """Return a parameter's moments, step counter and master, and whether the master is new.

        Create those that are missing.
        """
        state = self.state[p.param]
        new = "master" not in state
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.part.device)
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = state_like(p, getattr(torch, group["state_dtype"]))
        master = self._master(p, group["master_weights"], self._rounds_stochastically(group))
        exp_avg, exp_avg_sq = (own_part(state[name]) for name in ("exp_avg", "exp_avg_sq"))
        local = None if master is None else own_part(master)
        return exp_avg, exp_avg_sq, state["step"], local, new

    @override
    def check_group(self, saved: dict[str, Any]) -> None:
        check_options({**self.defaults, **saved})
        check_rule(saved)

    @override
    def check_state(self, saved: dict[str, Any]) -> None:
        # A state of masters alone is valid. The moments then start from zeros.
        own = {"step", "exp_avg", "exp_avg_sq"}
        if saved.keys() - MASTER_STATE_KEYS and not saved.keys() >= own:
            raise ValueError(
                f"state_dict has {', '.join(map(str, saved))} for a parameter; it must have step, "
                "exp_avg and exp_avg_sq. Load a state of fp8rs.optim.AdamW or torch.optim.AdamW"
            )

    def _loaded_step(self, step: Any, device: torch.device) -> Tensor:
        # Some optimizers store the step as an int.
        return torch.as_tensor(step, dtype=torch.float32, device=device)


def copy_to(device: torch.device, value: Tensor) -> Tensor:
    """Return a tensor on a device. A copy to the CPU has finished, because the step reads it."""
    return value.to(device, non_blocking=device.type != "cpu")


def name_of(dtype: torch.dtype | str) -> str:
    """Return the name of a dtype. Tools that gather state dicts do not accept dtypes."""
    return str(dtype).removeprefix("torch.")


def is_rate(value: Any) -> bool:
    """Return whether ``value`` is a finite Python or NumPy number of at least 0."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and 0 <= cast(float, value) < float("inf")


def is_bool(value: Any) -> bool:
    """Return whether ``value`` is a bool."""
    return isinstance(value, bool)


#: For each option of a group, whether a value is valid, and what it must be.
OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "lr": (
        # Reading a tensor would synchronize with the device.
        lambda x: x.numel() == 1 if isinstance(x, Tensor) else is_rate(x),
        "a finite number of at least 0, or a tensor of one element",
    ),
    "eps": (is_rate, "a finite number of at least 0"),
    "weight_decay": (is_rate, "a finite number of at least 0"),
    "betas": (
        lambda x: (
            isinstance(x, (tuple, list)) and len(x) == 2 and all(is_rate(b) and b < 1 for b in x)
        ),
        "two numbers of at least 0 and below 1",
    ),
    "maximize": (is_bool, "a bool"),
    "capturable": (is_bool, "a bool"),
    "master_weights": (is_bool, "a bool"),
    "stochastic_rounding": (lambda x: x is None or is_bool(x), "a bool or None"),
    "state_dtype": (
        lambda x: name_of(x) in ("float32", "bfloat16"),
        "torch.float32 or torch.bfloat16",
    ),
    "seed": (
        lambda x: isinstance(x, int) and not is_bool(x) and -(2**63) <= x < 2**64,
        "an int of 64 bits",
    ),
}


def check_options(group: dict[str, Any]) -> None:
    """Raise ValueError if an option of a group is invalid."""
    for name, (is_valid, expected) in OPTIONS.items():
        if not is_valid(value := group[name]):
            raise ValueError(f"{name} is {value!r}; it must be {expected}")


def check_rule(group: dict[str, Any]) -> None:
    """Raise ValueError if a group was saved by an optimizer with another update rule."""
    if group.get("amsgrad"):
        raise ValueError("the state is of amsgrad=True; AMSGrad is not supported")
    if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
        raise ValueError(
            f"the state is of Adam with weight_decay={group['weight_decay']}, which adds it to the "
            "gradient; here it is decoupled. Save it with weight_decay 0, and choose one again"
        )


def local_grad(p: Param) -> Tensor:
    """Return the local part of a parameter's gradient.

    Raises:
        TypeError: the gradient has an unsupported layout, or the gradient or the parameter has an
            unsupported dtype.
    """
    grad, part = p.param.grad, p.part
    assert grad is not None
    if grad.layout != torch.strided:
        raise TypeError(f"a gradient is of layout {grad.layout}; it must be strided")
    if part.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"a parameter has dtype {part.dtype}; it must be float32, bfloat16 or float16"
        )
    whole: Any = grad
    if hasattr(whole, "placements"):
        placements = cast(Any, p.param).placements
        if whole.placements != placements:  # the gradient of a row-wise parallel embedding
            whole = whole.redistribute(placements=placements)
        grad = whole.to_local()  # waits for the redistribution
    if grad.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"a gradient has dtype {grad.dtype}; it must be float32, bfloat16 or float16"
        )
    return grad


def state_like(p: Param, dtype: torch.dtype) -> Tensor:
    """Return zeros for a parameter, with the layout of its local part, distributed as it is."""
    if p.weight is not None:
        zeros = torch.zeros(p.part.shape, dtype=dtype, device=p.part.device)
    else:
        zeros = torch.zeros_like(p.part, dtype=dtype, memory_format=torch.preserve_format)
    return p.like(zeros)
