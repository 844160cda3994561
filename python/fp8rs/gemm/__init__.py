"""GEMMs on quantized planes, and which device has which."""

from fp8rs.gemm import blocks as _blocks  # noqa: F401  (fills GEMMS)
from fp8rs.gemm.table import GEMMS, scaled_mm

__all__ = ["GEMMS", "scaled_mm"]
