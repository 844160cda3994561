"""Recipes: how the operands of a linear layer's three GEMMs are quantized.

A recipe is frozen and holds neither state nor a process group. Functions that take a recipe also
take its short name (`resolve_recipe`).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn
from typing_extensions import Self, override

from fp8rs.quantize import formats
from fp8rs.quantize.formats import BlockFormat
from fp8rs.quantize.spec import QuantSpec

Role = Literal["input", "weight", "grad"]
Gemm = Literal["forward", "dgrad", "wgrad"]

#: The GEMMs of a layer.
GEMMS: tuple[Gemm, ...] = get_args(Gemm)

#: The short names of `RECIPES`, for type checkers.
RecipeName = Literal[
    "delayed", "current", "tensorwise", "rowwise", "rowwise_with_gw_hp", "block", "mxfp8"
]


def check_bool(name: str, value: Any) -> bool:
    """Return ``value`` if it is a bool, else raise TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, not {value!r}")
    return value


def check_int(name: str, value: Any, least: int, most: int | None = None) -> None:
    """Raise TypeError if ``value`` is not an int, or ValueError if it is out of range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if value < least or (most is not None and value > most):
        allowed = f"at least {least}" if most is None else f"within {least} and {most}"
        raise ValueError(f"{name} must be {allowed}, not {value}")


def check_module(name: str, value: Any) -> None:
    """Raise TypeError if ``value`` is not a torch.nn.Module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"{name} must be a torch.nn.Module, not {type(value).__name__}")


def check_choice(name: str, value: object, options: Collection[object]) -> None:
    """Raise ValueError if ``value`` is not one of the options."""
    if value not in options:
        raise ValueError(f"{name} must be {' or '.join(map(repr, options))}, not {value!r}")


def check_gemms(name: str, value: Any) -> tuple[Gemm, ...]:
    """Return the GEMMs that ``value`` names, in the order of `GEMMS`. A str is one name.

    Raises:
        TypeError: ``value`` is not a collection of names.
        ValueError: a name is not one of `GEMMS`.
    """
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, Collection):
        raise TypeError(f"{name} must be names of GEMMs ({', '.join(GEMMS)}), not {value!r}")
    for gemm in names:
        if gemm not in GEMMS:
            raise ValueError(f"{name} must be among {', '.join(GEMMS)}, not {gemm!r}")
    return tuple(gemm for gemm in GEMMS if gemm in names)


def check_amax_epsilon(epsilon: Any, name: str = "amax_epsilon") -> float:
    """Return ``epsilon`` as a float if it can bound an amax, else raise TypeError or ValueError."""
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)):
        raise TypeError(f"{name} must be a float, not {epsilon!r}")
    if not 0.0 <= epsilon <= torch.finfo(torch.float32).max:
        raise ValueError(f"{name} must be finite in float32 and not negative, not {epsilon!r}")
    return float(epsilon)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base class of recipes.

    Args:
        fp8_format: "e4m3" for every operand, or "hybrid": E4M3 forward and E5M2 gradients.
        fast_accumulation: whether CUDA may accumulate with reduced precision in the forward, dgrad
            and wgrad GEMM.
        power_2_scale: round scales up to powers of two.
        amax_epsilon: lower bound of the amax that a scale is computed from.
        save_input: save a layer's input for the backward, which quantizes it again (True), or its
            FP8 codes (False). With None, eager layers save codes, and compiled layers save the
            input, because the compiler can recompute most inputs from tensors that it saves anyway.
        emulate: run the GEMMs on dequantized operands, as on CPUs. Quantizing still requires an
            NVIDIA GPU of compute capability 8.9.
        high_precision_gemms: the GEMMs that run in high precision, of "forward", "dgrad" and
            "wgrad", but not all three. With "wgrad", layers save their input for the backward. This
            does not change how weights are stored, gathered or exported.
    """

    name: ClassVar[str] = ""
    #: Whether scales are computed from a history of amaxes.
    delayed: ClassVar[bool] = False

    fp8_format: Literal["e4m3", "hybrid"] = "e4m3"
    fast_accumulation: tuple[bool, bool, bool] = (True, False, False)
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    save_input: bool | None = None
    emulate: bool = False
    high_precision_gemms: tuple[Gemm, ...] = ()

    def __post_init__(self) -> None:
        check_choice("fp8_format", self.fp8_format, ("e4m3", "hybrid"))
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
        if self.save_input is not None:
            check_bool("save_input", self.save_input)
        object.__setattr__(self, "amax_epsilon", check_amax_epsilon(self.amax_epsilon))
        self._check_high_precision_gemms()

    def _check_high_precision_gemms(self) -> None:
        """Sort ``high_precision_gemms``, and check that no other field contradicts it."""
        gemms = check_gemms("high_precision_gemms", self.high_precision_gemms)
        object.__setattr__(self, "high_precision_gemms", gemms)
        if gemms == GEMMS:
            raise ValueError(
                "high_precision_gemms names all three GEMMs, which leaves none in FP8. Keep layers "
                "in high precision with filter_fqns or module_filter_fn of "
                "convert_to_float8_training"
            )
        if "wgrad" in gemms and self.save_input is False:
            raise ValueError(
                "save_input=False contradicts high_precision_gemms with 'wgrad': that GEMM reads "
                "the input, and its codes are not enough. Omit save_input"
            )

    def role_amax_epsilon(self, role: Role) -> float:
        """Return the lower bound of the amax of an operand."""
        return self.amax_epsilon

    def divides(self, role: Role) -> bool:
        """Whether an operand is divided by its scales, not multiplied by the reciprocals."""
        return False

    @property
    def input_options(self) -> tuple[str, ...]:
        """The names of the fields in use that apply to inputs, and not to gradients."""
        return ()

    def fp8_dtype(self, role: Role) -> torch.dtype:
        """Return the element type of an operand."""
        if role == "grad" and self.fp8_format == "hybrid":
            return formats.E5M2
        return formats.E4M3

    def block_format(self, role: Role) -> BlockFormat:
        """Return the format of an operand."""
        return formats.TENSOR

    @property
    def wgrad_input_format(self) -> BlockFormat:
        """The format of the transposed input in wgrad."""
        return self.block_format("input")


def _check_block(recipe: Recipe, name: str, *blocks: tuple[int, int]) -> None:
    """Convert a list to a tuple, and raise ValueError if it is not one of these blocks."""
    block = getattr(recipe, name)
    block = tuple(block) if isinstance(block, list) else block
    check_choice(name, block, blocks)
    object.__setattr__(recipe, name, block)


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Recipe):
    """One scale per tensor, computed from the tensor's amax."""

    name: ClassVar[str] = "current"


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(Recipe):
    """One scale per tensor, computed from amaxes of earlier steps.

    The first scale is computed from the first data.

    Args:
        margin: the scale is multiplied by 2**margin, which leaves that much headroom.
        amax_history_len: the number of steps in the history.
        amax_compute_algo: "max" for the maximum of the history, or "most_recent".

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
        check_int("margin", self.margin, -64, 64)
        check_int("amax_history_len", self.amax_history_len, 1)
        check_choice("amax_compute_algo", self.amax_compute_algo, ("max", "most_recent"))


@dataclass(frozen=True, kw_only=True)
class Float8RowwiseScaling(Recipe):
    """One scale per row of each operand, along the contracted dimension.

    The weight has one plane, whose codes both the forward and dgrad use. In dgrad, the gradient is
    multiplied by the weight's row scales before it is quantized.

    torchao's "rowwise" recipe rounds scales to powers of two. This one does so only with
    ``power_2_scale=True``.

    ``recipe="rowwise_with_gw_hp"`` is this recipe with ``high_precision_gemms=("wgrad",)``.

    Args:
        input_amax_epsilon: lower bound of the amax of inputs. Weights and gradients have
            ``amax_epsilon`` only: a bound that suits activations would turn small gradients to 0.
        divide_input: divide inputs by their scales in the forward, as inference servers do.
            Otherwise they are multiplied by the reciprocals, as the other operands are. Casts of
            inputs take longer.
    """

    name: ClassVar[str] = "rowwise"

    input_amax_epsilon: float = 0.0
    divide_input: bool = False

    @classmethod
    def for_serving(cls, **options: Any) -> Self:
        """Return the recipe whose forward has the codes of an FP8_DYNAMIC server.

        The server, such as vLLM with a compressed-tensors model, scales weights per output channel
        and activations per token. The scale of a token is max(amax / 448, 1 / (448 * 512)), and
        activations are divided by it. Gradients are quantized as with the default recipe.

        Args:
            options: fields of the recipe. They replace those of the preset.
        """
        return cls(**{"input_amax_epsilon": 1 / 512, "divide_input": True, **options})

    def __post_init__(self) -> None:
        super().__post_init__()
        epsilon = check_amax_epsilon(self.input_amax_epsilon, "input_amax_epsilon")
        object.__setattr__(self, "input_amax_epsilon", epsilon)
        check_bool("divide_input", self.divide_input)

    @override
    def role_amax_epsilon(self, role: Role) -> float:
        if role == "input":
            return max(self.amax_epsilon, self.input_amax_epsilon)
        return self.amax_epsilon

    @property
    @override
    def input_options(self) -> tuple[str, ...]:
        names = ("input_amax_epsilon", "divide_input")
        return tuple(name for name in names if getattr(self, name))

    @override
    def divides(self, role: Role) -> bool:
        return role == "input" and self.divide_input

    @override
    def block_format(self, role: Role) -> BlockFormat:
        return formats.ROW


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Recipe):
    """One scale per 1x128 block of activations and gradients, and per 128x128 block of weights.

    Args:
        wgrad_input_block: block of the transposed input in wgrad: (1, 128) or (128, 128). The GEMM
            of the latter is faster on Hopper, and its scales are coarser. Forward and dgrad are not
            affected.

    (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 3.3.)
    """

    name: ClassVar[str] = "block"

    wgrad_input_block: tuple[int, int] = (1, 128)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_block(self, "wgrad_input_block", (1, 128), (128, 128))
        if "wgrad" in self.high_precision_gemms and self.wgrad_input_block != (1, 128):
            raise ValueError(
                f"wgrad_input_block={self.wgrad_input_block} contradicts high_precision_gemms with "
                "'wgrad': that GEMM reads the input in high precision. Omit wgrad_input_block"
            )

    @override
    def block_format(self, role: Role) -> BlockFormat:
        return formats.BLOCK_128X128 if role == "weight" else formats.BLOCK_1X128

    @property
    @override
    def wgrad_input_format(self) -> BlockFormat:
        return formats.format_of(self.wgrad_input_block, torch.float32)


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8: one power-of-two scale per 1x32 block of activations and gradients.

    Hopper has no block-scaled GEMM. There, weights are converted to one power-of-two scale per row,
    and activations and gradients are quantized to such scales directly, rounded up.

    Args:
        weight_block: (32, 32), with one plane for the forward and dgrad, or (1, 32), for which both
            planes are stored and gathered.
        scale_rounding: "ceil", with which no element saturates, or "floor", the rule of the OCP
            specification.

    (OCP Microscaling Formats specification 1.0. NVIDIA's MXFP8 recipe rounds up.)
    """

    name: ClassVar[str] = "mxfp8"

    weight_block: tuple[int, int] = (32, 32)
    scale_rounding: Literal["ceil", "floor"] = "ceil"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_block(self, "weight_block", (32, 32), (1, 32))
        check_choice("scale_rounding", self.scale_rounding, ("ceil", "floor"))
        if self.amax_epsilon:
            raise ValueError("amax_epsilon must be 0 for MXFP8, whose scales have no lower bound")

    @override
    def block_format(self, role: Role) -> BlockFormat:
        block = self.weight_block if role == "weight" else (1, 32)
        return formats.format_of(block, torch.float8_e8m0fnu)


#: Recipes by short name. Some names are of a class with other fields.
RECIPES: dict[str, Callable[[], Recipe]] = {
    "delayed": DelayedScaling,
    "current": Float8CurrentScaling,
    "tensorwise": Float8CurrentScaling,
    "rowwise": Float8RowwiseScaling,
    "rowwise_with_gw_hp": partial(Float8RowwiseScaling, high_precision_gemms=("wgrad",)),
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
}


def resolve_recipe(recipe: Recipe | str | Any) -> Recipe:
    """Return a recipe from its short name. A recipe is returned unchanged.

    Raises:
        ValueError: an unknown name. The message lists the known names and suggests the closest.
        TypeError: neither a name nor a recipe, or another library's recipe.
    """
    if isinstance(recipe, Recipe):
        return recipe
    names = ", ".join(repr(name) for name in RECIPES)
    if isinstance(recipe, str):
        try:
            return RECIPES[recipe]()
        except KeyError:
            message = f"recipe {recipe!r} is not known; the names are {names}"
            raise ValueError(message + _suggestion(recipe)) from None
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise TypeError(f"recipe is the class {recipe.__name__}: give {recipe.__name__}()")
    kind = type(recipe)  # named with its module, because other libraries use the same class names
    remedy = ". Pass it as config" if kind.__name__ == "Float8LinearConfig" else ""
    raise TypeError(
        f"recipe must be a recipe of fp8rs or one of {names}, not "
        f"{kind.__module__}.{kind.__qualname__}{remedy}"
    )


def _suggestion(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), RECIPES, n=1)
    return f". Did you mean {close[0]!r}?" if close else ""


def describe(recipe: Recipe) -> str:
    """Return the recipe's name and the fields that differ from the defaults."""
    default = type(recipe)()
    changed = [
        f"{f.name}={getattr(recipe, f.name)!r}"
        for f in fields(recipe)
        if getattr(recipe, f.name) != getattr(default, f.name)
    ]
    return ", ".join([recipe.name, *changed])


def quant_spec(
    recipe: Recipe,
    role: Role,
    group: str | None = None,
    format: BlockFormat | None = None,
) -> QuantSpec:
    """Return how a recipe quantizes an operand.

    Args:
        recipe: the recipe.
        role: the operand.
        group: the name of the group over which per-tensor amaxes are reduced, or None.
        format: a format to use instead of the recipe's.

    Returns:
        The spec. A weight of three dimensions is a batch of matrices. An input or gradient is one
        matrix, whose leading dimensions are rows.
    """
    format = recipe.block_format(role) if format is None else format
    # A recipe with E8M0 scales uses power-of-two scales in other formats too.
    power_2_scale = recipe.power_2_scale or recipe.block_format("weight").microscaled
    return QuantSpec(
        format,
        recipe.fp8_dtype(role),
        power_2_scale=power_2_scale and not format.microscaled,
        amax_epsilon=recipe.role_amax_epsilon(role),
        divide=recipe.divides(role) and format.per_row,
        scale_rounding=getattr(recipe, "scale_rounding", "ceil"),
        margin=recipe.margin if isinstance(recipe, DelayedScaling) else 0,
        group=group if format.per_tensor else None,
        batched=role == "weight",
    )
