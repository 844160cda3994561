"""torchao's float8 configs, written down so that tests do not need torchao."""

import dataclasses
import enum

import torch


class ScalingType(enum.Enum):
    DYNAMIC = "dynamic"
    DELAYED = "delayed"
    DISABLED = "disabled"


class ScalingGranularity(enum.Enum):
    TENSORWISE = "tensorwise"
    AXISWISE = "axiswise"


@dataclasses.dataclass(frozen=True)
class CastConfig:
    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    use_fast_accum: bool = False


@dataclasses.dataclass(frozen=True)
class Float8LinearConfig:
    cast_config_input: CastConfig = CastConfig()
    cast_config_weight: CastConfig = CastConfig()
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output_for_grad_weight: CastConfig | None = None
    gemm_config_output: GemmConfig = GemmConfig(True)
    gemm_config_grad_input: GemmConfig = GemmConfig()
    gemm_config_grad_weight: GemmConfig = GemmConfig()
    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    round_scales_to_power_of_2: bool = False


AXISWISE = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
E4M3_AXISWISE = CastConfig(
    scaling_granularity=ScalingGranularity.AXISWISE, target_dtype=torch.float8_e4m3fn
)
NAMED = {
    # The results of torchao's Float8LinearConfig.from_recipe_name.
    "tensorwise": Float8LinearConfig(),
    "rowwise": Float8LinearConfig(
        cast_config_input=E4M3_AXISWISE,
        cast_config_weight=E4M3_AXISWISE,
        cast_config_grad_output=E4M3_AXISWISE,
        round_scales_to_power_of_2=True,
    ),
    "rowwise_with_gw_hp": Float8LinearConfig(
        cast_config_input=AXISWISE,
        cast_config_weight=AXISWISE,
        cast_config_grad_output=E4M3_AXISWISE,
        cast_config_input_for_grad_weight=CastConfig(ScalingType.DISABLED),
        cast_config_grad_output_for_grad_weight=CastConfig(ScalingType.DISABLED),
        cast_config_weight_for_grad_input=CastConfig(target_dtype=torch.float8_e4m3fn),
        round_scales_to_power_of_2=True,
    ),
}
