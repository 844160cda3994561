"""Conversion of models, from recipes and from other libraries' configs."""

from fp8rs.convert.convert import convert_to_float8_training, optimizer_stepped

__all__ = ["convert_to_float8_training", "optimizer_stepped"]
