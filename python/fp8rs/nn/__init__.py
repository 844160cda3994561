"""Modules whose GEMMs run on FP8 operands."""

from .linear import Float8Linear, Linear

__all__ = ["Float8Linear", "Linear"]
