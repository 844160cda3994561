"""AdamW for FP8 weights, with or without masters, and for plain parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from fp8rs._torch import is_distributed, not_traced, own_part
from fp8rs.optim import fp8_weights, moments
from fp8rs.optim.masters import MASTER_STATE_KEYS, MasterWeightOptimizer, parameters_by_key
from fp8rs.optim.optim_param import LastWrite, OptimParam
from fp8rs.optim.step import Options, ParamUpdate, Step
from fp8rs.quantize.formats import INPUT_DTYPES

#: The state_dtype that stores moments in 8 bits.
FP8 = "fp8"


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

    With ``state_dtype="fp8"``, the moments of FP8 layers take one byte per element and two float32
    numbers per block of 128 elements of a row. Blocks are those of the whole parameter, so the
    values do not depend on how it is sharded. Parameters whose rows, or the rows of whose shards,
    are not a multiple of 128 elements keep float32 moments.

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
        state_dtype: the dtype of the moments, torch.float32, torch.bfloat16, or "fp8" for 8-bit
            codes of the parameters that ``state_filter`` selects and float32 for all others.
        state_filter: returns whether a parameter's moments are codes with ``state_dtype="fp8"``. It
            is called when a parameter's state is created or loaded. None selects the weights of FP8
            layers (and FP8 weights without a layer) that have at least 4096 elements on all ranks
            together: no embeddings, norms, biases, and no heads in high precision.
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
    that a saved group lacks, such as ``state_dtype``, keep the values of the optimizer's group. If
    either group has 8-bit moments, the optimizer's ``state_dtype`` stays too. Loaded moments are
    converted to the group's ``state_dtype``. `float32_state_dict` saves and loads 8-bit moments as
    float32.

    With a ``torch.amp.GradScaler``, the step itself unscales gradients and is skipped if one of
    them is not finite. A skipped step changes no byte. ``.grad`` stays scaled.

    Raises:
        ValueError: an argument is not as described.
        TypeError: at a step, a gradient has an unsupported dtype or layout. Nothing is written.
    """

    _step_supports_amp_scaling = True

    _state_filter: moments.StateFilter | None = None
    #: Whether state dicts have float32 moments in place of codes.
    _saves_float32 = False

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
        state_dtype: torch.dtype | str = torch.float32,
        state_filter: moments.StateFilter | None = None,
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
        self._state_filter = state_filter

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which may have any option of the constructor.

        Raises:
            ValueError: an option is invalid.
        """
        group = {**self.defaults, **param_group}
        check_options(group)
        super().add_param_group({**param_group, "state_dtype": name_of(group["state_dtype"])})

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch's `load_state_dict` calls this with the loaded groups.
        current_groups = self.__dict__.get("param_groups")
        super().__setstate__(state)
        if current_groups is None:
            return  # a copied or unpickled optimizer, whose groups have all options

        for loaded_group, current_group in zip(self.param_groups, current_groups, strict=True):
            for name in OPTIONS:
                loaded_group.setdefault(name, current_group[name])
            # The current group decides about 8-bit moments. `_finish_load` converts loaded ones.
            current_dtype = current_group["state_dtype"]
            if current_dtype == FP8 or loaded_group["state_dtype"] == FP8:
                loaded_group["state_dtype"] = current_dtype

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_state_filter": self._state_filter}

    # When it was traced, a parameter's state was assigned to another parameter.
    @not_traced
    def _update(self) -> None:
        # All parameters, and the group of each. A parameter's index selects its random numbers, so
        # parameters without a gradient count too.
        params: list[OptimParam] = []
        groups: list[dict[str, Any]] = []
        for group in self.param_groups:
            for param in group["params"]:
                params.append(OptimParam(param))
                groups.append(group)
        fp8_weights.reshard(params)

        # Check all options and gradients before any state is created.
        for group in self.param_groups:
            check_options(group)
        grads: dict[int, Tensor] = {}  # by the parameter's index
        for index, optim_param in enumerate(params):
            if optim_param.param.grad is not None:
                grads[index] = local_grad(optim_param)
        self._create_moments(groups, params, grads)

        # A device steps all its parameters at once. Those of one group share its options.
        updates_by_device: dict[torch.device, list[ParamUpdate]] = {}
        options_by_group: dict[tuple[int, torch.device], Options] = {}
        for index, grad in grads.items():
            optim_param = params[index]
            group = groups[index]
            device = optim_param.local.device
            key = (id(group), device)
            if key not in options_by_group:
                options_by_group[key] = self._options(group, device)
            update = self._param_update(group, optim_param, grad, index, options_by_group[key])
            updates_by_device.setdefault(device, []).append(update)

        written: list[OptimParam] = []
        for updates in updates_by_device.values():
            step_counters = [update.step for update in updates]
            torch._foreach_add_(step_counters, 1)
            Step(updates).run()

            # If a gradient scaler has found a gradient that is not finite, `found_inf` is 1. The
            # operator has then skipped the step, which does not count.
            found_inf = updates[0].options["found_inf"]
            if found_inf is not None:
                torch._foreach_sub_(step_counters, [found_inf.view(())] * len(step_counters))

            for update in updates:
                if not update.keeps_codes:
                    written.append(update.param)
        self._mark_written(written)

    def _options(self, group: dict[str, Any], device: torch.device) -> Options:
        """Return the operator's keyword arguments for a group's parameters on a device."""
        lr = group["lr"]
        lr_tensor = None
        if isinstance(lr, Tensor):
            if lr.device.type == "cpu" and not group["capturable"]:
                lr = float(lr)
            else:
                lr_tensor = copy_to(device, lr).float()
                lr = 0.0

        seed = group["seed"] if self._rounds_stochastically(group) else None
        if seed is not None and seed >= 2**63:
            seed -= 2**64

        # A gradient scaler sets these attributes for the duration of a step.
        grad_scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        beta1, beta2 = group["betas"]
        return {
            "lr": lr,
            "lr_tensor": lr_tensor,
            "beta1": beta1,
            "beta2": beta2,
            "eps": group["eps"],
            "weight_decay": group["weight_decay"],
            "maximize": group["maximize"],
            "grad_scale": None if grad_scale is None else copy_to(device, grad_scale),
            "found_inf": None if found_inf is None else copy_to(device, found_inf),
            "seed": seed,
        }

    def _rounds_stochastically(self, group: dict[str, Any]) -> bool:
        stochastic = group["stochastic_rounding"]
        if stochastic is None:
            return not group["master_weights"]
        return bool(stochastic)

    def _param_update(
        self,
        group: dict[str, Any],
        optim_param: OptimParam,
        grad: Tensor,
        index: int,
        options: Options,
    ) -> ParamUpdate:
        """Return the update of a parameter. Create its master if it is missing."""
        state = self.state[optim_param.param]
        is_new_master = "master" not in state
        master = self._master(
            optim_param, group["master_weights"], self._rounds_stochastically(group)
        )

        is_8bit = has_8bit_moments(state)
        suffix = moments.CODES if is_8bit else ""
        update = ParamUpdate(
            param=optim_param,
            grad=grad,
            exp_avg=own_part(state["exp_avg" + suffix]),
            exp_avg_sq=own_part(state["exp_avg_sq" + suffix]),
            step=state["step"],
            master=None if master is None else own_part(master),
            is_new_master=is_new_master,
            index=index,
            options=options,
        )
        if is_8bit:
            update.exp_avg_range = own_part(state["exp_avg" + moments.RANGE])
            update.exp_avg_sq_range = own_part(state["exp_avg_sq" + moments.RANGE])
        return update

    # --- moments ---------------------------------------------------------------------------------

    def _create_moments(
        self,
        groups: Sequence[dict[str, Any]],
        params: Sequence[OptimParam],
        grads: dict[int, Tensor],
    ) -> None:
        """Create the moments and step counters of parameters whose state has none.

        Args:
            groups: the group of each parameter.
            params: all parameters.
            grads: the gradients, by the parameter's index.
        """
        new = [index for index in grads if "step" not in self.state[params[index].param]]
        if not new:
            return
        state_filter = self._filter()
        for index in new:
            optim_param = params[index]
            local = optim_param.local
            state = self.state[optim_param.param]
            state["step"] = torch.zeros((), dtype=torch.float32, device=local.device)
            if stores_8bit_moments(groups[index], optim_param, state_filter):
                state.update(moments.new_codes(optim_param))
                continue
            dtype = high_precision_dtype(groups[index])
            state["exp_avg"] = state_like(optim_param, dtype)
            state["exp_avg_sq"] = state_like(optim_param, dtype)

        fp8_params = [index for index in grads if groups[index]["state_dtype"] == FP8]
        # An optimizer may have vectors only, such as norms, whose moments are small.
        has_matrices = any(params[index].param.ndim >= 2 for index in fp8_params)
        if has_matrices and not any(has_8bit_moments(state) for state in self.state.values()):
            warnings.warn(
                f'state_dtype is "fp8", but all {len(fp8_params)} parameters keep float32 moments: '
                "none is the weight of an FP8 layer with at least 4096 elements and rows of a "
                "multiple of 128. Pass a state_filter to select others, for example "
                "state_filter=lambda p: p.ndim == 2",
                stacklevel=2,
            )

    def _filter(self) -> moments.StateFilter:
        """Return the filter of the parameters whose moments are codes."""
        return moments.default_filter() if self._state_filter is None else self._state_filter

    @contextmanager
    def float32_state_dict(self) -> Iterator[None]:
        """In this context, state dicts have float32 moments in place of 8-bit codes.

            with optimizer.float32_state_dict():
                torch.save(optimizer.state_dict(), path)

        They are copies under the names of ``torch.optim.AdamW``, "exp_avg" and "exp_avg_sq".
        ``load_state_dict`` converts them, so checkpoints with high-precision moments are loaded
        in this context by tools that load into the tensors of ``state_dict()``, such as DCP.
        """
        before = self._saves_float32
        self._saves_float32 = True
        try:
            yield
        finally:
            self._saves_float32 = before

    def state_dict(self) -> dict[str, Any]:
        """Return the state, as ``torch.optim`` does. See `float32_state_dict`."""
        if not self._saves_float32:
            return super().state_dict()
        hook = self.register_state_dict_post_hook(decode_moments, prepend=True)
        try:
            return super().state_dict()
        finally:
            hook.remove()

    @override
    def _finish_load(
        self,
        state_dict: dict[str, Any],
        state_before: dict[Tensor, Any],
        last_writes_before: dict[Tensor, LastWrite],
    ) -> None:
        super()._finish_load(state_dict, state_before, last_writes_before)

        # Convert the moments to the form that each group stores.
        state_filter = self._filter()
        for group in self.param_groups:
            dtype = high_precision_dtype(group)
            for param in group["params"]:
                state = self.state.get(param, {})
                if "step" not in state:  # masters alone, or no state
                    continue

                optim_param = OptimParam(param)
                if stores_8bit_moments(group, optim_param, state_filter):
                    if not has_8bit_moments(state):
                        moments.to_codes(optim_param, state)
                    continue

                if has_8bit_moments(state):
                    moments.to_high_precision(optim_param, state)
                for name in moments.MOMENT_KEYS:
                    state[name] = state[name].to(dtype)

    # --- checks ----------------------------------------------------------------------------------

    @override
    def check_group(self, saved: dict[str, Any]) -> None:
        check_options({**self.defaults, **saved})
        check_rule(saved)

    @override
    def check_state(self, saved: dict[str, Any]) -> None:
        # A state of masters alone is valid. The moments then start from zeros.
        names = moments.CODE_KEYS if has_8bit_moments(saved) else moments.MOMENT_KEYS
        adamw_keys = {"step", *names}
        if saved.keys() - MASTER_STATE_KEYS and not saved.keys() >= adamw_keys:
            raise ValueError(
                f"state_dict has {', '.join(map(str, saved))} for a parameter; it must have step, "
                "exp_avg and exp_avg_sq. Load a state of fp8rs.optim.AdamW or torch.optim.AdamW"
            )

    def _loaded_step(self, step: Any, device: torch.device) -> Tensor:
        # Some optimizers store the step as an int.
        return torch.as_tensor(step, dtype=torch.float32, device=device)


def has_8bit_moments(state: dict[str, Any]) -> bool:
    """Return whether the moments in a parameter's state are stored in 8 bits."""
    return "exp_avg" + moments.CODES in state


def stores_8bit_moments(
    group: dict[str, Any], optim_param: OptimParam, state_filter: moments.StateFilter
) -> bool:
    """Return whether an optimizer stores a parameter's moments in 8 bits."""
    if group["state_dtype"] != FP8 or not moments.has_whole_blocks(optim_param.param):
        return False
    return state_filter(optim_param.param)


def high_precision_dtype(group: dict[str, Any]) -> torch.dtype:
    """Return the dtype of moments that are not codes."""
    name = group["state_dtype"]
    return torch.float32 if name == FP8 else cast(torch.dtype, getattr(torch, name))


@torch.no_grad()
def decode_moments(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Replace codes in a state dict by float32 moments."""
    for key, param in parameters_by_key(optimizer, state_dict):
        state = state_dict["state"].get(key, {})
        if has_8bit_moments(state):
            state = dict(state)
            moments.to_high_precision(OptimParam(param), state)
            state_dict["state"][key] = state


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


def is_lr(value: Any) -> bool:
    """Return whether ``value`` is a rate or a tensor of one element."""
    # Reading a tensor would synchronize with the device.
    return value.numel() == 1 if isinstance(value, Tensor) else is_rate(value)


def are_betas(value: Any) -> bool:
    """Return whether ``value`` is two rates below 1."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return all(is_rate(beta) and beta < 1 for beta in value)


def is_seed(value: Any) -> bool:
    """Return whether ``value`` is an int of 64 bits, signed or not."""
    return isinstance(value, int) and not is_bool(value) and -(2**63) <= value < 2**64


class OptionRule(NamedTuple):
    """Which values an option of a group may have.

    Attributes:
        is_valid: returns whether the option may have a value.
        expected: the valid values, for messages.
    """

    is_valid: Callable[[Any], bool]
    expected: str


#: The options of a group.
OPTIONS = {
    "lr": OptionRule(is_lr, "a finite number of at least 0, or a tensor of one element"),
    "eps": OptionRule(is_rate, "a finite number of at least 0"),
    "weight_decay": OptionRule(is_rate, "a finite number of at least 0"),
    "betas": OptionRule(are_betas, "two numbers of at least 0 and below 1"),
    "maximize": OptionRule(is_bool, "a bool"),
    "capturable": OptionRule(is_bool, "a bool"),
    "master_weights": OptionRule(is_bool, "a bool"),
    "stochastic_rounding": OptionRule(
        lambda value: value is None or is_bool(value), "a bool or None"
    ),
    "state_dtype": OptionRule(
        lambda value: name_of(value) in ("float32", "bfloat16", FP8),
        'torch.float32, torch.bfloat16 or "fp8"',
    ),
    "seed": OptionRule(is_seed, "an int of 64 bits"),
}


def check_options(group: dict[str, Any]) -> None:
    """Raise ValueError if an option of a group is invalid."""
    for name, (is_valid, expected) in OPTIONS.items():
        value = group[name]
        if not is_valid(value):
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


def local_grad(optim_param: OptimParam) -> Tensor:
    """Return the local part of a parameter's gradient.

    Raises:
        TypeError: the gradient has an unsupported layout, or the gradient or the parameter has an
            unsupported dtype.
    """
    grad: Any = optim_param.param.grad  # a tensor or a DTensor
    if grad.layout != torch.strided:
        raise TypeError(f"a gradient is of layout {grad.layout}; it must be strided")

    dtype = optim_param.local.dtype
    if dtype not in INPUT_DTYPES:
        raise TypeError(f"a parameter has dtype {dtype}; it must be float32, bfloat16 or float16")

    if is_distributed(grad):
        placements = cast(Any, optim_param.param).placements
        if grad.placements != placements:  # the gradient of a row-wise parallel embedding
            grad = grad.redistribute(placements=placements)
        grad = grad.to_local()  # waits for the redistribution
    if grad.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"a gradient has dtype {grad.dtype}; it must be float32, bfloat16 or float16"
        )
    return cast(Tensor, grad)


def state_like(optim_param: OptimParam, dtype: torch.dtype) -> Tensor:
    """Return zeros for a parameter, with the layout of its local part, distributed as it is."""
    if optim_param.weight is not None:
        zeros = torch.zeros(optim_param.local.shape, dtype=dtype, device=optim_param.local.device)
    else:
        zeros = torch.zeros_like(
            optim_param.local, dtype=dtype, memory_format=torch.preserve_format
        )
    return optim_param.like(zeros)
