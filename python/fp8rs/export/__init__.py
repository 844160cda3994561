"""Files of inference servers: sharded safetensors with a config, written and loaded.

Formats are rows of `fp8rs.export.formats.FORMATS`. If training computes on codes in the requested
format, these very bytes are exported.
"""

from .files import save_pretrained
from .loading import Loaded, load
from .tensors import tensors

__all__ = ["Loaded", "load", "save_pretrained", "tensors"]
