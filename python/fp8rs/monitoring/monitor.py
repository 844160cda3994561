"""What quantization does to each operand of each converted layer, every so many steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8rs._torch import is_distributed, keep_address, own_part
from fp8rs.nn import observe
from fp8rs.nn.debug import set_debug
from fp8rs.nn.linear import Float8Linear
from fp8rs.nn.observe import OperandStats
from fp8rs.nn.spec import ROLES
from fp8rs.quantize.recipes import DelayedScaling

from .layers import layers_of
from .records import Lossy, Record, append, name_of, worst


class Monitor:
    """Statistics of what training quantizes; `monitor` makes it.

    Attributes:
        every: one step of so many is logged.
        latest: what was logged last; empty before that.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        *,
        file: str | Path | None,
        first_step: int,
        group: Any,
    ) -> None:
        for name, value, least in (("every", every, 1), ("first_step", first_step, 0)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{name} must be an int, not {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        self.every = every
        self.latest: dict[str, float] = {}
        self._step = first_step
        self._layers = layers_of(model)
        self._group = group
        self._file = None if file is None else Path(file)
        self._slots = torch.empty(
            len(self._layers),
            len(ROLES),
            observe.KEPT,
            dtype=torch.float64,
            device=_device(self._layers),
        )
        self._operand_stats = [OperandStats(keep_address(slots)) for slots in self._slots]
        self._watching = False
        self._set(self._is_due)

    @property
    def _is_due(self) -> bool:
        return self._step % self.every == 0

    def step(self) -> dict[str, float]:
        """A step of training is over: call it after the optimizer's, on every rank.

        Returns:
            The statistics of a step that is logged, by name, equal on all ranks; {} after others.
        """
        found: dict[str, float] = {}
        if self._watching:
            found = self.latest = self._collect()
            if self._file is not None and (self._ranks == 1 or dist.get_rank(self._group) == 0):
                append(self._file, Record(self._step, found))
        self._step += 1
        if self._watching or self._is_due:
            self._set(self._is_due)
        return found

    def worst(self, n: int = 10) -> list[Lossy]:
        """The ``n`` layers that lost most in the step that was logged last, the worst first.

        Each by its operand with the smallest SQNR; before all others, what has NaN or infinities.
        """
        return worst(self.latest, n)

    def close(self) -> None:
        """Watch no more."""
        self._set(False)

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- a step that is logged -------------------------------------------------------------------

    def _set(self, watching: bool) -> None:
        """Have the layers watched in the step that comes, or not."""
        self._watching = watching
        if watching:
            observe.clear_(self._slots)
            self._note_histories()
            self._operand_stats = [
                _with_shard(stats, layer)
                for stats, layer in zip(self._operand_stats, self._layers.values(), strict=True)
            ]
        for stats, layer in zip(self._operand_stats, self._layers.values(), strict=True):
            set_debug(layer, stats=stats if watching else None)

    def _note_histories(self) -> None:
        """Of delayed scaling: the amax that each scale of the step comes from; 0 for none."""
        for slots, layer in zip(self._slots, self._layers.values(), strict=True):
            recipe = layer.recipe
            if isinstance(recipe, DelayedScaling):
                history = own_part(layer._buffers["fp8_amax_history"])
                whole = recipe.amax_compute_algo == "max"
                slots[:, observe.HISTORY] = history.amax(0) if whole else history[0]

    @property
    def _ranks(self) -> int:
        if not dist.is_available() or not dist.is_initialized():
            return 1
        return dist.get_world_size(self._group)

    def _collect(self) -> dict[str, float]:
        """All statistics, of all ranks: one collective, and one copy to the host."""
        found = self._slots.unsqueeze(0)
        if self._ranks > 1:
            # Not reduced on the way: what is summed and what is not would be two collectives.
            found = self._slots.new_empty(self._ranks, *self._slots.shape)
            dist.all_gather_into_tensor(found.flatten(0, 1), self._slots, group=self._group)
        sums, maxima = found[..., : observe.SUMMED].sum(0), found[..., observe.SUMMED :].amax(0)
        rows = torch.cat([sums, maxima], -1).cpu().tolist()
        return {
            name_of(name, role, statistic): value
            for (name, layer), of in zip(self._layers.items(), rows, strict=True)
            for role, kept in zip(ROLES, of, strict=True)
            for statistic, value in _statistics(kept, layer).items()
        }


def monitor(
    model: nn.Module,
    every: int = 100,
    *,
    file: str | Path | None = None,
    first_step: int = 0,
    group: Any = None,
) -> Monitor:
    """Watch what quantization does to a converted model, one step of ``every``.

        monitor = fp8rs.monitor(model, every=100)
        for batch in data:
            loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            statistics = monitor.step()  # {} but for each hundredth step

    Make it when the model is as it will train: on its device, sharded, its checkpoint loaded. The
    first step is logged, and each whose number is a multiple of ``every``. In these each operand of
    each layer is compared with the codes that its GEMMs multiply, micro-batches together, and the
    sums are gathered from all ranks in one collective and copied to the host once. In all other
    steps nothing is done, and layers compute as if there were no monitor. Compiled layers have a
    second graph for steps that are logged; it is compiled once.

    The statistics are floats under the names ``fp8/LAYER/OPERAND/STATISTIC``. The operand is
    "input", "weight" or "grad" (the output's gradient), the statistic

    - "amax": the largest absolute value;
    - "scale": the largest scale; and "scale_min", the smallest, where there are several;
    - "saturated": the share of elements that were too large for the format;
    - "underflow": the share of elements, not 0 themselves, that became 0;
    - "sqnr_db": the signal-to-quantization-noise ratio in dB, infinite where nothing was lost;
    - "amax_to_history", with delayed scaling: amax, as a multiple of the one that the scale came
      from; 1 where there was none yet. Above 2**margin values saturate.

    An operand that was not quantized in the step (its GEMMs are in high precision, no token came to
    the layer) has none. One of which no rank has the values, FP8 weights and what tensor
    parallelism gathers in FP8, has amax and scales alone.

    Args:
        model: a converted model, or a part of one.
        every: one step of so many is logged.
        file: a path, to which a line of JSON is appended for each step that is logged, by the
            first rank: what ``python -m fp8rs monitor`` draws.
        first_step: the number of the first step, of a run that is resumed.
        group: the ranks that train the same layers; all by default. With pipeline parallelism,
            those of a stage.

    Raises:
        TypeError: ``model`` is no module, or ``every`` or ``first_step`` no int.
        ValueError: ``model`` has no FP8 layer, or a number is too small.
    """
    return Monitor(model, every, file=file, first_step=first_step, group=group)


# --- one operand ---------------------------------------------------------------------------------


def _statistics(kept: list[float], layer: Float8Linear) -> dict[str, float]:
    """The statistics of one operand, by their names."""
    if not kept[observe.SEEN]:
        return {}
    amax, scale = kept[observe.AMAX], kept[observe.SCALE]
    found = {"amax": amax, "scale": scale}
    if not layer.recipe.block_format("input").per_tensor:
        found["scale_min"] = min(scale, -kept[observe.MINUS_SMALLEST_SCALE])
    if elements := kept[observe.ELEMENTS]:
        found["saturated"] = kept[observe.SATURATED] / elements
        found["underflow"] = kept[observe.UNDERFLOWN] / elements
        found["sqnr_db"] = _decibels(kept[observe.SIGNAL], kept[observe.NOISE])
    if layer.recipe.delayed:
        history = kept[observe.HISTORY]
        found["amax_to_history"] = amax / history if history else 1.0
    return found


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    ratio = signal / noise
    return 10 * math.log10(ratio) if ratio > 0 else ratio  # NaN


def _device(layers: dict[str, Float8Linear]) -> torch.device:
    """Where the layers compute: FSDP2 may keep their parameters on the CPU."""
    weight: Any = next(iter(layers.values())).weight
    device: torch.device = weight.device
    if is_distributed(weight) and device.type != (kind := weight.device_mesh.device_type):
        return torch.device(kind, torch.get_device_module(kind).current_device())
    return device


def _with_shard(stats: OperandStats, layer: Float8Linear) -> OperandStats:
    """With what this rank has of a weight that is gathered in FP8, in high precision."""
    parameter: Any = layer._parameters.get("weight")
    if not is_distributed(parameter):
        return stats  # whole; or gathered at the moment, which changes no shard
    from fp8rs.fsdp.master_weight import MasterWeight
    from fp8rs.fsdp.param import local_of

    local = local_of(parameter)
    if not isinstance(local, MasterWeight):
        return stats
    placement = local._handle.spec
    origin = [0, 0]
    origin[placement.dim] = placement.offset
    return OperandStats(stats.slots, local.high_precision, *origin)
