"""TransformerEngine's recipe objects, by duck typing: the fields that its releases have (2.20)."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import pytest
from torch import nn

import fp8rs
from fp8rs.convert.transformer_engine import from_te_recipe, is_te_recipe
from fp8rs.quantize.recipes import Recipe


class Largest(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E2M1 = Largest(6, 6)
    E4M3 = Largest(448, 448)
    E5M2 = Largest(57344, 57344)
    HYBRID = Largest(448, 57344)


@dataclasses.dataclass(frozen=True)
class MMParams:
    use_split_accumulator: bool = True


@dataclasses.dataclass(frozen=True)
class QParams:
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    random_hadamard_transform: bool = False
    stochastic_rounding: bool = False
    fp4_2d_quantization: bool = False


@dataclasses.dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: Any = "max"
    scaling_factor_compute_algo: Any = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclasses.dataclass
class Float8CurrentScaling:
    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    # No annotation, as in TE: of the class, no fields.
    fp8_quant_fwd_inp = QParams()
    fp8_quant_fwd_weight = QParams()
    fp8_quant_bwd_grad = QParams()
    fp8_gemm_fprop: MMParams = MMParams(False)
    fp8_gemm_dgrad: MMParams = MMParams(True)
    fp8_gemm_wgrad: MMParams = MMParams(True)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclasses.dataclass
class MXFP8BlockScaling:
    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False


@dataclasses.dataclass
class Float8BlockScaling:
    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    fp8_quant_fwd_inp = QParams(power_2_scale=True)
    fp8_quant_fwd_weight = QParams(power_2_scale=True)
    fp8_quant_bwd_grad = QParams(power_2_scale=True)
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = MMParams()
    fp8_gemm_dgrad: MMParams = MMParams()
    fp8_gemm_wgrad: MMParams = MMParams()
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None


@dataclasses.dataclass
class NVFP4BlockScaling:
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3


@dataclasses.dataclass
class CustomRecipe:
    qfactory: Any
    fp8_format: Format = Format.HYBRID


def having(recipe: Any, **attributes: Any) -> Any:
    """``recipe`` with attributes of its own, as TE's users set those that are no fields."""
    for name, value in attributes.items():
        setattr(recipe, name, value)
    return recipe


def quantized(**options: Any) -> dict[str, QParams]:
    return dict.fromkeys(
        ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"), QParams(**options)
    )


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (DelayedScaling(), fp8rs.DelayedScaling()),
        (
            DelayedScaling(
                margin=2,
                fp8_format=Format.E4M3,
                amax_history_len=16,
                amax_compute_algo="most_recent",
            ),
            fp8rs.DelayedScaling(
                margin=2, fp8_format="e4m3", amax_history_len=16, amax_compute_algo="most_recent"
            ),
        ),
        (Float8CurrentScaling(), fp8rs.Float8CurrentScaling(fp8_format="hybrid")),
        (
            having(
                Float8CurrentScaling(
                    use_power_2_scales=True,
                    fp8_format=Format.E4M3,
                    fp8_gemm_fprop=MMParams(True),
                    fp8_gemm_wgrad=MMParams(False),
                ),
                **quantized(power_2_scale=True, amax_epsilon=0.5),
            ),
            fp8rs.Float8CurrentScaling(
                power_2_scale=True, amax_epsilon=0.5, fast_accumulation=(False, False, True)
            ),
        ),
        (
            Float8BlockScaling(),
            fp8rs.Float8BlockScaling(power_2_scale=True, fast_accumulation=(False,) * 3),
        ),
        (
            having(
                Float8BlockScaling(use_f32_scales=True, fp8_format=Format.HYBRID), **quantized()
            ),
            fp8rs.Float8BlockScaling(fp8_format="hybrid", fast_accumulation=(False,) * 3),
        ),
        (MXFP8BlockScaling(), fp8rs.MXFP8BlockScaling(weight_block=(1, 32))),
        (
            MXFP8BlockScaling(fp8_format=Format.HYBRID, enable_2d_quantization=True),
            fp8rs.MXFP8BlockScaling(fp8_format="hybrid"),
        ),
    ],
)
def test_a_recipe_is_read_by_its_fields(theirs, ours):
    model = nn.Sequential(nn.Linear(32, 32))
    fp8rs.convert_to_float8_training(model, recipe=theirs)
    assert model[0].recipe == ours


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (DelayedScaling(fp8_dpa=True), "DelayedScaling.fp8_dpa=True has no counterpart: attention"),
        (Float8CurrentScaling(fp8_mha=True), "Float8CurrentScaling.fp8_mha=True .* attention"),
        (
            MXFP8BlockScaling(backward_override="dequantized"),
            "MXFP8BlockScaling.backward_override='dequantized' .* leave it None",
        ),
        (DelayedScaling(reduce_amax=False), "DelayedScaling.reduce_amax=False .* always reduced"),
        (DelayedScaling(amax_compute_algo=max), 'must be "max" or "most_recent", not a function'),
        (
            DelayedScaling(scaling_factor_compute_algo=max),
            "scaling_factor_compute_algo=.*margin",
        ),
        (DelayedScaling(fp8_format=Format.E5M2), "fp8_format must be Format.E4M3 or Format.HYBRID"),
        (
            having(DelayedScaling(), override_linear_precision=(False, False, True)),
            "override_linear_precision=.* all three GEMMs",
        ),
        (
            Float8CurrentScaling(use_power_2_scales=True),
            "use_power_2_scales contradicts power_2_scale=False",
        ),
        (Float8BlockScaling(use_f32_scales=True), "use_f32_scales contradicts power_2_scale=True"),
        (
            having(Float8CurrentScaling(), fp8_quant_bwd_grad=QParams(amax_epsilon=1.0)),
            "fp8_quant_bwd_grad.amax_epsilon differs from fp8_quant_fwd_inp's",
        ),
        (
            having(Float8CurrentScaling(), fp8_quant_bwd_grad=QParams(stochastic_rounding=True)),
            "fp8_quant_bwd_grad.stochastic_rounding has no counterpart",
        ),
        (Float8BlockScaling(w_block_scaling_dim=1), "w_block_scaling_dim=1 .* each 128x128"),
        (Float8BlockScaling(x_block_scaling_dim=2), "x_block_scaling_dim=2 .* each 1x128"),
        (Float8BlockScaling(grad_block_scaling_dim=2), "grad_block_scaling_dim=2 .* each 1x128"),
        (MXFP8BlockScaling(margin=1), "MXFP8BlockScaling.margin=1 .* no margin"),
        (NVFP4BlockScaling(), 'NVFP4BlockScaling: there are no 4-bit formats; .* recipe="mxfp8"'),
        (CustomRecipe(qfactory=max), "CustomRecipe: quantizers of one's own are not taken"),
    ],
)
def test_what_there_is_not_is_an_error_that_says_what_there_is(theirs, message):
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ValueError, match=message):
        fp8rs.convert_to_float8_training(model, recipe=theirs)
    assert type(model[0]) is nn.Linear


def test_a_field_of_a_later_release_must_have_its_default():
    later = dataclasses.make_dataclass(
        "MXFP8BlockScaling", [("swizzle", str, "none")], bases=(MXFP8BlockScaling,)
    )
    assert from_te_recipe(later()) == fp8rs.MXFP8BlockScaling(weight_block=(1, 32))
    with pytest.raises(
        ValueError, match=r"MXFP8BlockScaling\.swizzle='fast' is not known to fp8rs"
    ):
        from_te_recipe(later(swizzle="fast"))


def test_a_subclass_is_read_as_its_base():
    class Mine(DelayedScaling):
        pass

    assert from_te_recipe(Mine(margin=1)) == fp8rs.DelayedScaling(margin=1)


def test_our_own_recipes_are_not_theirs():
    for kind in Recipe.__subclasses__():
        assert not is_te_recipe(kind())
    assert not any(map(is_te_recipe, ["delayed", None, DelayedScaling, object()]))


def test_every_field_of_the_published_recipes_is_known():
    """With TransformerEngine itself, which no environment of the Makefile has: it loads CUDA.

    To run it, on a machine with CUDA: ``pip install transformer_engine[pytorch]``, and this file.
    """
    published = pytest.importorskip("transformer_engine.common.recipe")
    for name in ("DelayedScaling", "Float8CurrentScaling", "Float8BlockScaling"):
        assert isinstance(from_te_recipe(getattr(published, name)()), getattr(fp8rs, name))
    assert from_te_recipe(published.MXFP8BlockScaling()).weight_block == (1, 32)
