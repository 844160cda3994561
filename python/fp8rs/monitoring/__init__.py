"""Runs that can be watched: what quantization does to each operand, and layers that do without."""

from .high_precision import high_precision
from .monitor import Monitor, monitor
from .records import Lossy

__all__ = ["Lossy", "Monitor", "high_precision", "monitor"]
