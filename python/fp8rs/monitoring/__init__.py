"""Debug training: statistics of the quantized operands, and layers in high precision."""

from .heat_map import plot
from .high_precision import high_precision
from .mismatch import Mismatch, mismatch
from .monitor import Monitor, monitor
from .records import Lossy

__all__ = ["Lossy", "Mismatch", "Monitor", "high_precision", "mismatch", "monitor", "plot"]
