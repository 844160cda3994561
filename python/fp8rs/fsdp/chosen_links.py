"""What `fp8rs.fsdp.set_links` chose for a model: kept with its modules, for `fp8rs.report` too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fp8rs._torch import in_backward, not_traced

from .symmetric import Halves


@dataclass(frozen=True)
class Link:
    """How one module that ``fully_shard`` was called on communicates.

    Attributes:
        unit: the module's name; "" is the root.
        ranks: how many shard it.
        gather: "symmetric" or "torch".
        gather_because: why it is not the better one; "" where it is, or was asked for.
        reduction: "symmetric", "bf16" or "torch".
        reduction_because: the same for it.
    """

    unit: str
    ranks: int
    gather: str
    gather_because: str
    reduction: str
    reduction_because: str

    @property
    def is_torchs(self) -> bool:
        """Whether nothing of FSDP2's was replaced."""
        return self.gather == self.reduction == "torch"


@dataclass
class Links:
    """What `set_links` chose. ``str()`` of it is a table.

    Attributes:
        units: of each module that has parameters of its own.
        reductions: how many ran, by the dtype that went over the wire: what did not go in bfloat16
            was float32 when it came.
        reduced: bytes that this rank handed to them, by the same.
    """

    units: tuple[Link, ...] = ()
    reductions: Counter[str] = field(default_factory=Counter)
    reduced: Counter[str] = field(default_factory=Counter)
    _gathers: dict[Any, Halves] = field(default_factory=dict, repr=False)
    _sums: dict[Any, Halves] = field(default_factory=dict, repr=False)
    _forwards: int = 0

    @property
    def gathered(self) -> int:
        """Bytes that this rank held after gathers through symmetric memory, summed."""
        return sum(halves.moved for halves in self._gathers.values())

    @property
    def gather_bytes(self) -> int:
        """Bytes of symmetric memory on this rank that gathers go through, once they have."""
        return sum(halves.nbytes for halves in self._gathers.values())

    @property
    def reduction_bytes(self) -> int:
        """The same for reductions. They take the place of FSDP2's float32 input, as large."""
        return sum(halves.nbytes for halves in self._sums.values())

    def __str__(self) -> str:
        counts = ", ".join(f"{n} in {dtype}" for dtype, n in sorted(self.reductions.items()))
        lines = [
            *rows(self.units),
            f"symmetric memory: {self.gather_bytes:,} B for gathers, {self.reduction_bytes:,} B "
            "for reductions",
            f"reductions so far: {counts or 'none'}",
        ]
        return "\n".join(lines)

    def _planned(self) -> int:
        """Bytes of symmetric memory on this rank, made or to be made at first use."""
        return sum(halves.planned for of in (self._gathers, self._sums) for halves in of.values())

    def _reduces(self, sent: torch.Tensor) -> None:
        dtype = str(sent.dtype).removeprefix("torch.")
        self.reductions[dtype] += 1
        self.reduced[dtype] += sent.nbytes

    @not_traced
    def _begin_forward(self, module: nn.Module, args: Any) -> None:
        """A forward begins that a backward may follow. (In a backward one is a checkpoint's.)"""
        if torch.is_grad_enabled() and not in_backward():
            self._forwards += 1


#: By the modules that communicate.
LINKS: WeakKeyDictionary[nn.Module, tuple[Link, Links]] = WeakKeyDictionary()


def links_of(model: nn.Module) -> tuple[tuple[Link, ...], int]:
    """The links of a model's modules, by their names in it, and bytes of their symmetric memory."""
    found = {name: LINKS[module] for name, module in model.named_modules() if module in LINKS}
    of = {id(links): links for _, links in found.values()}
    units = tuple(replace(link, unit=name) for name, (link, _) in found.items())
    return units, sum(links._planned() for links in of.values())


def rows(units: Iterable[Link]) -> Iterator[str]:
    """A table's lines. Modules that communicate alike are one row."""
    alike: dict[Link, list[str]] = {}
    for link in units:
        alike.setdefault(replace(link, unit=""), []).append(named(link.unit))
    for link, names in alike.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        yield f"{', '.join(names[:3])}{more}: {link.ranks} rank{'s' if link.ranks > 1 else ''}"
        yield f"  gathers: {link.gather}" + _why(link.gather_because)
        yield f"  reductions: {link.reduction}" + _why(link.reduction_because)


def named(unit: str) -> str:
    """A module's name in a text."""
    return unit or "the root"


def _why(because: str) -> str:
    return f" ({because})" if because else ""
