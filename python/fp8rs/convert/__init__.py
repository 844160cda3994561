"""Convert models to FP8 training, from a recipe or a torchao config."""

from fp8rs.convert.convert import convert_to_float8_training, optimizer_stepped
from fp8rs.convert.quantized_init import quantized_init

__all__ = ["convert_to_float8_training", "optimizer_stepped", "quantized_init"]
