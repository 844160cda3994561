"""Debug training: statistics of the quantized operands, and layers in high precision."""

from .heat_map import plot
from .high_precision import high_precision
from .monitor import Monitor, monitor
from .records import Lossy

__all__ = ["Lossy", "Monitor", "high_precision", "monitor", "plot"]
