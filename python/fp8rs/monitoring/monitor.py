"""Log statistics of each quantized operand of each converted layer, at regular steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8rs._torch import is_distributed, keep_address, own_part
from fp8rs.model.linear_spec import ROLES
from fp8rs.nn import observe
from fp8rs.nn.debug import set_debug
from fp8rs.nn.linear import Float8Linear
from fp8rs.nn.observe import OperandStats
from fp8rs.quantize.recipes import DelayedScaling, Recipe, check_int

from .experts import plane_of
from .layers import fp8_operands
from .records import Lossy, Record, append, name_of, worst


class Monitor:
    """Logs statistics of quantized operands. `monitor` creates it.

    Attributes:
        every: the number of steps from one logged step to the next.
        latest: the statistics that were logged last. Empty before the first.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        *,
        file: str | Path | None,
        first_step: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        check_int("every", every, 1)
        check_int("first_step", first_step, 0)
        self.every = every
        self.latest: dict[str, float] = {}
        self._step = first_step
        self._layers, self._weights = fp8_operands(model)
        self._group = group
        self._file = None if file is None else Path(file)

        operands = len(self._layers) * len(ROLES)
        #: The statistics of each operand of each layer, and of each weight of experts.
        self._all_slots = torch.empty(
            operands + len(self._weights),
            observe.STATISTICS,
            dtype=torch.float64,
            device=_device(model),
        )
        # (layers, roles, statistics) and (weights, statistics)
        self._slots = self._all_slots[:operands].view(-1, len(ROLES), observe.STATISTICS)
        self._weight_slots = self._all_slots[operands:]
        self._operand_stats = [OperandStats(keep_address(slots)) for slots in self._slots]
        self._watching = False
        self._set(self._is_due)

    @property
    def _is_due(self) -> bool:
        return self._step % self.every == 0

    def step(self) -> dict[str, float]:
        """End a training step. Call it after the optimizer's step, on every rank.

        Returns:
            The statistics of a logged step by name, equal on all ranks. {} for other steps.
        """
        statistics: dict[str, float] = {}
        if self._watching:
            statistics = self._collect()
            self.latest = statistics
            is_first_rank = self._ranks == 1 or dist.get_rank(self._group) == 0
            if self._file is not None and is_first_rank:
                append(self._file, Record(self._step, statistics))
        self._step += 1
        if self._watching or self._is_due:
            self._set(self._is_due)
        return statistics

    def worst(self, n: int = 10) -> list[Lossy]:
        """Return the ``n`` layers with the smallest SQNR in the last logged step, smallest first.

        A layer counts with its operand of smallest SQNR. Layers with NaN or infinities come first.
        """
        return worst(self.latest, n)

    def close(self) -> None:
        """Stop collecting statistics."""
        self._set(False)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- a logged step ---------------------------------------------------------------------------

    def _set(self, watching: bool) -> None:
        """Start or stop collecting statistics, from the next step."""
        self._watching = watching
        layers = list(self._layers.values())
        if not watching:
            for layer in layers:
                set_debug(layer, stats=None)
            return

        observe.clear_(self._all_slots)
        self._note_histories()
        self._observe_experts()
        for index, layer in enumerate(layers):
            stats = _with_shard(self._operand_stats[index], layer)
            self._operand_stats[index] = stats
            set_debug(layer, stats=stats)

    def _note_histories(self) -> None:
        """With delayed scaling, store the amax that each scale was computed from, or 0."""
        for slots, layer in zip(self._slots, self._layers.values(), strict=True):
            recipe = layer.recipe
            if isinstance(recipe, DelayedScaling):
                history = own_part(layer._buffers["fp8_amax_history"])
                if recipe.amax_compute_algo == "max":
                    slots[:, observe.HISTORY] = history.amax(0)
                else:
                    slots[:, observe.HISTORY] = history[0]

    @torch.no_grad()
    def _observe_experts(self) -> None:
        """Add the statistics of weights of experts, which the next forward quantizes.

        Each rank quantizes its own shard. Only if it has rows of every expert (Shard(1)), this
        needs a collective.
        """
        for slot, (module, key) in zip(self._weight_slots, self._weights.values(), strict=True):
            values, plane = plane_of(module, key, slot.device)
            if plane is not None:
                observe.add_batch(slot, values, plane)

    @property
    def _ranks(self) -> int:
        if not dist.is_available() or not dist.is_initialized():
            return 1
        return dist.get_world_size(self._group)

    def _collect(self) -> dict[str, float]:
        """Return the statistics of all ranks, with one collective and one copy to the host."""
        # (ranks, operands, statistics)
        slots = self._all_slots.unsqueeze(0)
        if self._ranks > 1:
            # An all-gather, because sums and maxima would need two all-reduces.
            slots = self._all_slots.new_empty(self._ranks, *self._all_slots.shape)
            dist.all_gather_into_tensor(slots.flatten(0, 1), self._all_slots, group=self._group)
        sums = slots[..., : observe.SUMMED].sum(0)
        maxima = slots[..., observe.SUMMED :].amax(0)
        rows = iter(torch.cat([sums, maxima], -1).cpu().tolist())

        # The rows are in the order of the slots.
        statistics: dict[str, float] = {}
        for name, layer in self._layers.items():
            for role in ROLES:
                for key, value in _statistics(next(rows), layer.recipe, False).items():
                    statistics[name_of(name, role, key)] = value
        for name, (module, _) in self._weights.items():
            for key, value in _statistics(next(rows), module._fp8_state.recipe, True).items():
                statistics[name_of(name, "weight", key)] = value
        return statistics


def monitor(
    model: nn.Module,
    every: int = 100,
    *,
    file: str | Path | None = None,
    first_step: int = 0,
    group: dist.ProcessGroup | None = None,
) -> Monitor:
    """Log statistics of the quantized operands of a converted model, every ``every`` steps.

        monitor = fp8rs.monitor(model, every=100)
        for batch in data:
            loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            statistics = monitor.step()  # {} except in every hundredth step

    Call this when the model is on its device, sharded and loaded. Steps whose number is a multiple
    of ``every`` are logged. In a logged step, each operand of each layer is compared with its
    codes, summed over micro-batches. One collective gathers the sums from all ranks, and one copy
    moves them to the host. Other steps have no overhead. Compiled layers have a second graph for
    logged steps, which is compiled once.

    Statistics are floats named ``fp8/LAYER/OPERAND/STATISTIC``. The operand is "input", "weight" or
    "grad" (the output's gradient). The statistics are

    - "amax": the largest absolute value.
    - "scale": the largest scale. If an operand has several, "scale_min" is the smallest.
    - "saturated": the fraction of elements that were too large for the format.
    - "underflow": the fraction of elements that are not 0 and became 0.
    - "sqnr_db": the signal-to-quantization-noise ratio in dB. It is infinite without noise.
    - "amax_to_history", with delayed scaling: the ratio of amax to the amax that the scale was
      computed from, or 1 if there was none. Above 2**margin, values saturate.

    An operand has no statistics if it was not quantized in the step, because its GEMMs are in high
    precision or the layer got no tokens. If no rank has high-precision values of an operand, it has
    only amax and scales. This applies to FP8 weights and to operands that tensor parallelism
    gathers in FP8.

    For a converted weight of experts, LAYER is the parameter's name and the operand is "weight".
    Its statistics are of all experts together, and of the values that the step begins with. Inputs
    and gradients of experts have no statistics.

    Args:
        model: a converted model, or a part of one.
        every: the number of steps from one logged step to the next.
        file: a path to which the first rank appends a line of JSON per logged step.
            `fp8rs.monitoring.plot` plots such files.
        first_step: the number of the first step, for resumed training.
        group: the ranks that train the same layers, by default all ranks. With pipeline
            parallelism, pass the ranks of one stage.

    Raises:
        TypeError: ``model`` is not a module, or ``every`` or ``first_step`` is not an int.
        ValueError: ``model`` has no FP8 layer, or a number is too small.
    """
    return Monitor(model, every, file=file, first_step=first_step, group=group)


# --- one operand ---------------------------------------------------------------------------------


def _statistics(slot: list[float], recipe: Recipe, batched: bool) -> dict[str, float]:
    """Return the statistics of one operand by name. A batched weight has several scales."""
    if not slot[observe.SEEN]:
        return {}
    amax = slot[observe.AMAX]
    scale = slot[observe.SCALE]
    statistics = {"amax": amax, "scale": scale}
    if batched or not recipe.block_format("input").per_tensor:
        statistics["scale_min"] = min(scale, -slot[observe.MINUS_SMALLEST_SCALE])
    elements = slot[observe.ELEMENTS]
    if elements:
        statistics["saturated"] = slot[observe.SATURATED] / elements
        statistics["underflow"] = slot[observe.UNDERFLOWN] / elements
        statistics["sqnr_db"] = _decibels(slot[observe.SIGNAL], slot[observe.NOISE])
    if recipe.delayed and not batched:
        history = slot[observe.HISTORY]
        statistics["amax_to_history"] = amax / history if history else 1.0
    return statistics


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio > 0 else ratio  # NaN


def _device(model: nn.Module) -> torch.device:
    """Return the device of the model's computation. FSDP2 may offload parameters to the CPU."""
    weight: Any = next(model.parameters())
    device: torch.device = weight.device
    if not is_distributed(weight):
        return device
    device_type = weight.device_mesh.device_type
    if device.type == device_type:
        return device
    return torch.device(device_type, torch.get_device_module(device_type).current_device())


def _with_shard(stats: OperandStats, layer: Float8Linear) -> OperandStats:
    """Return ``stats`` with this rank's high-precision shard, if the weight is gathered in FP8."""
    (name,) = layer._fp8_params
    parameter: Any = layer._parameters.get(name)
    if not is_distributed(parameter):
        return stats  # not sharded, or unsharded now with the same shard
    from fp8rs.fsdp.master_weight import MasterWeight
    from fp8rs.model.handle import local_of

    local = local_of(parameter)
    if not isinstance(local, MasterWeight):
        return stats
    shard_spec = local._handle.shard_spec
    origin = [0, 0]
    origin[shard_spec.shard_dim] = shard_spec.shard_offset
    return OperandStats(stats.slots, local.high_precision, *origin)
