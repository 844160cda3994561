"""Amaxes and scales of delayed scaling, for a whole model in three packed fp32 buffers.

Every quantized tensor of a model (its weights, inputs and output gradients) has a *slot*. Kernels
maximise the finite amax of what they cast into ``amax[slot]``; once a step :meth:`roll` reduces
all slots at once, pushes them into the history and computes the scales of the next step.

A slot whose history holds nothing yet takes its scale from the data at hand, reduced over the
same ranks: never 1. Whether a slot needs that is a Python bool; it is read from the reduced
amaxes one roll late, so that the read does not wait, and is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8rs.quantize.quantizers import Float8Quantizer, reduce_amax_
from fp8rs.quantize.recipes import DelayedScaling


class AmaxHistory:
    """The packed delayed-scaling state of one model.

    Args:
        recipe: margin, history length and algorithm.
        dtypes: the element type of each slot.
        device: where the buffers are.

    Attributes:
        amax: (slots,) fp32: maxima of the finite amaxes seen since the last roll.
        scale: (slots,) fp32: what is quantized with, where ``known``.
        history: (amax_history_len, slots) fp32, a ring.
        known: (slots,) bool: the history holds something, so ``scale`` is from data.
        ready: the host's view of ``known``, one roll behind it.
    """

    def __init__(
        self,
        recipe: DelayedScaling,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
    ) -> None:
        self.recipe = recipe
        self.dtypes = list(dtypes)
        slots = len(self.dtypes)
        # A model may be evaluated first, in inference mode, and trained later.
        with torch.inference_mode(False):
            self.amax = torch.zeros(slots, device=device)
            self.scale = torch.ones(slots, device=device)
            self.history = torch.zeros(recipe.amax_history_len, slots, device=device)
            self.known = torch.zeros(slots, dtype=torch.bool, device=device)
            self._bind()
        self.ready = [False] * slots
        #: Slots that training has asked for while they were not ready. Only for these is ``known``
        #: read: a sibling that adopts another's slot, or a layer that is never called, leaves its
        #: own empty for good.
        self._awaited: set[int] = set()
        #: Something was recorded since the last roll.
        self.dirty = False
        self._row = -1
        self._pending: tuple[Tensor, torch.cuda.Event | None] | None = None
        self._rolled: torch.cuda.Event | None = None

    def _bind(self) -> None:
        """Make what refers to the buffers: one pair of quantizers a slot, made once."""
        self._unrecorded = torch.zeros((), device=self.amax.device)
        self._recording = [
            Float8Quantizer(self.scale[i], self.amax[i], dtype)
            for i, dtype in enumerate(self.dtypes)
        ]
        self._reading = [
            Float8Quantizer(self.scale[i], self._unrecorded, dtype)
            for i, dtype in enumerate(self.dtypes)
        ]

    def to(self, device: torch.device) -> None:
        """Move the buffers, as the model moved."""
        with torch.inference_mode(False):
            for name in ("amax", "scale", "history", "known"):
                setattr(self, name, getattr(self, name).to(device))
            self._bind()

    def quantizer(self, slot: int, x: Tensor, record: bool, group: Any) -> Float8Quantizer:
        """The quantizer for ``x`` in ``slot``.

        Args:
            slot: index.
            x: what will be quantized; read here only while the slot has no history.
            record: whether the amax enters the history. Without it nothing is reduced either:
                an evaluation may run on one rank alone.
            group: gives the process group that a first scale is reduced over, or None.
        """
        if self.ready[slot]:
            self.dirty |= record
            return (self._recording if record else self._reading)[slot]
        if record:
            self._awaited.add(slot)
        first = torch.ops.fp8rs.amax(x)
        ranks = group() if record else None
        if ranks is not None:
            reduce_amax_(first, ranks)
        scale = self._or_first(slice(slot, slot + 1), first.view(1), self.dtypes[slot])
        self.dirty |= record
        amax = self.amax[slot] if record else self._unrecorded
        return Float8Quantizer(scale, amax, self.dtypes[slot])

    def first_scales(
        self, indices: Iterable[int], slots: slice | Tensor, amax: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Scales (n,) for slots that may have no history: from ``amax`` (n,) where they have none.

        ``indices`` and ``slots`` say the same, the first to the host and the second to the device:
        neither waits to ask the other. ``amax`` is that of the data about to be quantized, reduced
        already; ``dtype`` the slots' element type.
        """
        self._awaited.update(indices)
        return self._or_first(slots, amax, dtype)

    def _or_first(self, slots: slice | Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
        first = self._scales(amax, dtype)
        return torch.where(self.known[slots], self.scale[slots], first)

    def _scales(self, amax: Tensor, dtype: torch.dtype) -> Tensor:
        r = self.recipe
        scales: Tensor = torch.ops.fp8rs.scale_from_amax(
            amax, dtype, r.power_2_scale, r.amax_epsilon, r.margin
        )
        return scales

    @torch.no_grad()
    def roll(self, reduce: Callable[[Tensor], None]) -> None:
        """End a step: reduce, push into the history, compute the next scales.

        Args:
            reduce: called once with ``amax`` (slots,), to reduce it over ranks in place.
        """
        self._read_ready()
        reduce(self.amax)
        self._row = (self._row + 1) % self.recipe.amax_history_len
        self.history[self._row].copy_(self.amax)
        self.amax.zero_()
        if self.recipe.amax_compute_algo == "max":
            latest = self.history.amax(0)
        else:
            latest = self.history[self._row]
        fresh = torch.cat(
            [self._scales(latest[part], self.dtypes[part.start]) for part in self._runs()]
        )
        # A slot that saw nothing keeps its scale: 0 says that there is no information.
        seen = latest > 0
        self.scale.copy_(torch.where(seen, fresh, self.scale))
        self.known.logical_or_(seen)
        self.dirty = False
        if any(not self.ready[slot] for slot in self._awaited):
            self._pending = self._fetch(self.known)
        if self.scale.is_cuda:
            self._rolled = torch.cuda.Event()
            self._rolled.record()

    def wait_for_roll(self) -> None:
        """Have the current stream see the last roll: FSDP gathers on streams of its own."""
        if self._rolled is not None:
            torch.cuda.current_stream().wait_event(self._rolled)

    def _runs(self) -> list[slice]:
        """Slots in runs of one element type."""
        runs: list[slice] = []
        start = 0
        for i in range(1, len(self.dtypes) + 1):
            if i == len(self.dtypes) or self.dtypes[i] != self.dtypes[start]:
                runs.append(slice(start, i))
                start = i
        return runs

    def _fetch(self, known: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if not known.is_cuda:
            return known.clone(), None
        host = known.to("cpu", non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event

    def _read_ready(self) -> None:
        if self._pending is not None:
            host, event = self._pending
            self._pending = None
            if event is not None:
                event.synchronize()  # a step old: nothing to wait for
            self.ready = host.tolist()
            self._awaited = {slot for slot in self._awaited if not self.ready[slot]}

    def __deepcopy__(self, memo: dict[int, Any]) -> AmaxHistory:
        new = AmaxHistory(self.recipe, self.dtypes, self.amax.device)
        for name in ("amax", "scale", "history", "known"):
            getattr(new, name).copy_(getattr(self, name))
        self._read_ready()
        new.ready, new.dirty, new._row = list(self.ready), self.dirty, self._row
        new._awaited = set(self._awaited)
        return new

    def __getstate__(self) -> dict[str, Any]:
        self._read_ready()
        state = self.__dict__.copy()
        for name in ("_recording", "_reading", "_unrecorded"):
            del state[name]
        state["_rolled"] = None  # events do not pickle
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._bind()
