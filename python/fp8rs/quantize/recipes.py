"""Recipes: how the three GEMMs of a linear layer are quantized. Frozen, and owned by a model.

A recipe names formats and rules; it holds no state and no process group. Wherever one is taken,
so is its short name (:func:`resolve_recipe`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import torch

from fp8rs.tensor import formats
from fp8rs.tensor.formats import BlockFormat

Role = Literal["input", "weight", "grad"]

#: The short names, for type checkers; `RECIPES` has what they stand for.
RecipeName = Literal["delayed", "current", "tensorwise", "rowwise", "block", "mxfp8"]


def check_bool(name: str, value: Any) -> bool:
    """``value`` if it is a bool; TypeError naming the argument otherwise."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {value!r}")
    return value


def check_amax_epsilon(epsilon: Any) -> float:
    """``epsilon`` as a float; TypeError or ValueError where no amax can have it as its bound."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)):
        raise TypeError(f"amax_epsilon must be a float, not {epsilon!r}")
    if not 0.0 <= epsilon <= torch.finfo(torch.float32).max:
        raise ValueError(
            f"amax_epsilon must be finite in float32 and not negative, not {epsilon!r}"
        )
    return float(epsilon)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What all recipes share.

    Args:
        fp8_format: "e4m3" for every operand, or "hybrid": E4M3 forward and E5M2 gradients.
        fast_accumulation: for the forward, dgrad and wgrad GEMM, whether CUDA may accumulate
            with reduced precision.
        power_2_scale: round scales up to powers of two.
        amax_epsilon: lower bound of the amax that a scale is computed from.
        save_input: save a layer's input for its backward, which quantizes it again (True), or its
            FP8 codes (False). None: codes in eager layers, and the input in compiled ones, where
            the compiler can make most inputs again of what it keeps anyway.
        emulate: run the GEMMs on dequantized operands, as the CPU always does. Quantizing takes
            an NVIDIA GPU of compute capability 8.9 all the same.
    """

    name: ClassVar[str] = ""
    #: Whether scales come from earlier steps' amaxes, so that a model keeps a history.
    delayed: ClassVar[bool] = False

    fp8_format: Literal["e4m3", "hybrid"] = "e4m3"
    fast_accumulation: tuple[bool, bool, bool] = (True, False, False)
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    save_input: bool | None = None
    emulate: bool = False

    def __post_init__(self) -> None:
        if self.fp8_format not in ("e4m3", "hybrid"):
            raise ValueError(f'fp8_format must be "e4m3" or "hybrid", not {self.fp8_format!r}')
        accumulation = self.fast_accumulation
        if (
            not isinstance(accumulation, (tuple, list))
            or len(accumulation) != 3
            or not all(isinstance(a, bool) for a in accumulation)
        ):
            raise ValueError(
                "fast_accumulation must be three bools (forward, dgrad, wgrad), "
                f"not {accumulation!r}"
            )
        object.__setattr__(self, "fast_accumulation", tuple(accumulation))
        check_bool("power_2_scale", self.power_2_scale)
        check_bool("emulate", self.emulate)
        if self.save_input is not None and not isinstance(self.save_input, bool):
            raise TypeError(f"save_input must be a bool or None, not {self.save_input!r}")
        object.__setattr__(self, "amax_epsilon", check_amax_epsilon(self.amax_epsilon))

    def fp8_dtype(self, role: Role) -> torch.dtype:
        """The element type of an operand."""
        if role == "grad" and self.fp8_format == "hybrid":
            return formats.E5M2
        return formats.E4M3

    def block_format(self, role: Role) -> BlockFormat:
        """The format that an operand is quantized in."""
        return formats.TENSOR

    @property
    def wgrad_input_format(self) -> BlockFormat:
        """The format of the input's transpose, which wgrad multiplies."""
        return self.block_format("input")


def _check_block(recipe: Recipe, name: str, *known: tuple[int, int]) -> None:
    """ValueError unless a field is one of these blocks; a list becomes a tuple."""
    block = getattr(recipe, name)
    if not isinstance(block, (tuple, list)) or tuple(block) not in known:
        choices = " or ".join(str(one) for one in known)
        raise ValueError(f"{name} must be {choices}, not {block!r}")
    object.__setattr__(recipe, name, tuple(block))


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """One scale a tensor, from the tensor's own amax."""

    name: ClassVar[str] = "current"


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale a tensor, from the amaxes of earlier steps; the first one from the first data.

    Args:
        margin: the scale is multiplied by 2**margin, which leaves that much headroom.
        amax_history_len: how many steps of amaxes are kept.
        amax_compute_algo: "max" over the history, or the "most_recent" entry.

    (Micikevicius et al., "FP8 Formats for Deep Learning", 2022.)
    """

    name: ClassVar[str] = "delayed"
    delayed: ClassVar[bool] = True

    fp8_format: Literal["e4m3", "hybrid"] = "hybrid"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: Literal["max", "most_recent"] = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.margin, bool) or not isinstance(self.margin, int):
            raise TypeError(f"margin must be an int, not {self.margin!r}")
        if not -64 <= self.margin <= 64:
            raise ValueError(f"margin must be within -64 and 64, not {self.margin}")
        length = self.amax_history_len
        if isinstance(length, bool) or not isinstance(length, int):
            raise TypeError(f"amax_history_len must be an int, not {length!r}")
        if length < 1:
            raise ValueError(f"amax_history_len must be at least 1, not {length}")
        if self.amax_compute_algo not in ("max", "most_recent"):
            raise ValueError(
                f'amax_compute_algo must be "max" or "most_recent", not {self.amax_compute_algo!r}'
            )


@dataclass(frozen=True, kw_only=True)
class Float8RowwiseScaling(Recipe):
    """One scale a row of each operand, along the dim that is contracted over.

    The weight has one plane: in dgrad its row scales multiply the gradient before that is
    quantized, so that the weight's codes serve both passes.

    torchao's recipe of the name "rowwise" rounds scales to powers of two. Here they are rounded
    with ``power_2_scale=True`` only.
    """

    name: ClassVar[str] = "rowwise"

    def block_format(self, role: Role) -> BlockFormat:
        return formats.ROW


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """One scale for each 1x128 of activations and gradients, and each 128x128 of weights.

    Args:
        wgrad_input_block: of the input's transpose in wgrad: (1, 128), or (128, 128), whose GEMM
            is faster on Hopper, with coarser scales. Forward and dgrad stay as they are.

    (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.)
    """

    name: ClassVar[str] = "block"

    wgrad_input_block: tuple[int, int] = (1, 128)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_block(self, "wgrad_input_block", (1, 128), (128, 128))

    def block_format(self, role: Role) -> BlockFormat:
        return formats.BLOCK_128X128 if role == "weight" else formats.BLOCK_1X128

    @property
    def wgrad_input_format(self) -> BlockFormat:
        square = self.wgrad_input_block == (128, 128)
        return formats.BLOCK_128X128 if square else formats.BLOCK_1X128


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: power-of-two scales for each 1x32 of activations and gradients.

    Args:
        weight_block: (32, 32), whose one plane serves both passes, or (1, 32), for which both
            planes are kept and gathered.
        scale_rounding: "ceil", with which no element saturates, or "floor", the rule of the OCP
            specification.

    Hopper has no block-scaled GEMM: there weights are rewritten for one power-of-two scale a row,
    and activations and gradients quantized straight to such scales, rounded up.
    (OCP Microscaling Formats specification 1.0; NVIDIA's MXFP8 recipe rounds up.)
    """

    name: ClassVar[str] = "mxfp8"

    weight_block: tuple[int, int] = (32, 32)
    scale_rounding: Literal["ceil", "floor"] = "ceil"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_block(self, "weight_block", (32, 32), (1, 32))
        if self.scale_rounding not in ("ceil", "floor"):
            raise ValueError(
                f'scale_rounding must be "ceil" or "floor", not {self.scale_rounding!r}'
            )
        if self.amax_epsilon:
            raise ValueError("amax_epsilon must be 0: MXFP8's scales have no lower bound to set")

    def block_format(self, role: Role) -> BlockFormat:
        if role == "weight" and self.weight_block == (32, 32):
            return formats.MX_32X32
        return formats.MX_1X32


#: Short names, and what they stand for.
RECIPES: dict[str, Callable[[], Recipe]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "tensorwise": Float8CurrentScaling,
    "rowwise": Float8RowwiseScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
}

#: Recipe names of other libraries that have no equal here, and what to do instead.
_ABSENT = {
    "rowwise_with_gw_hp": "torchao's recipe of this name computes weight gradients in high "
    "precision, which no recipe does here. The closest is 'rowwise'",
}


def resolve_recipe(recipe: Recipe | str | Any) -> Recipe:
    """Return a recipe, given one or its short name.

    Raises:
        ValueError: an unknown name. The message lists the known names and suggests the closest.
        TypeError: neither a name nor a recipe, or another library's recipe.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, str):
        try:
            return RECIPES[recipe]()
        except KeyError:
            known = ", ".join(repr(name) for name in RECIPES)
            message = f"recipe {recipe!r} is not known; the names are {known}"
            raise ValueError(message + _suggestion(recipe)) from None
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise TypeError(f"recipe is the class {recipe.__name__}: give {recipe.__name__}()")
    kind = type(recipe)  # with its module: others have recipes of the same names
    raise TypeError(
        "recipe must be a recipe of fp8rs or its short name, not "
        f"{kind.__module__}.{kind.__qualname__}"
    )


def _suggestion(name: str) -> str:
    if name in _ABSENT:
        return f". {_ABSENT[name]}"
    close = difflib.get_close_matches(name.lower(), RECIPES, n=1)
    return f". Did you mean {close[0]!r}?" if close else ""


def describe(recipe: Recipe) -> str:
    """The recipe's name and those fields that differ from the defaults, for reprs."""
    default = type(recipe)()
    changed = [
        f"{f.name}={getattr(recipe, f.name)!r}"
        for f in fields(recipe)
        if getattr(recipe, f.name) != getattr(default, f.name)
    ]
    return ", ".join([recipe.name, *changed])
