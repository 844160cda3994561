"""Modules whose GEMMs run on FP8 operands."""

from .linear import Linear

__all__ = ["Linear"]
