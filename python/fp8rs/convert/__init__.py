"""Convert models to FP8 training, from a recipe or a torchao config, and back."""

from fp8rs.convert.convert import convert_to_float8_training, optimizer_stepped
from fp8rs.convert.high_precision import convert_to_high_precision
from fp8rs.convert.quantized_init import quantized_init

__all__ = [
    "convert_to_float8_training",
    "convert_to_high_precision",
    "optimizer_stepped",
    "quantized_init",
]
