"""What inference servers read: tensors by their names, and sharded safetensors with a config.

Formats are rows of `fp8rs.export.formats.FORMATS`. Where the codes that training computes on
are in the format asked for, these very bytes are exported.
"""

from .files import save_pretrained
from .tensors import tensors

__all__ = ["save_pretrained", "tensors"]
