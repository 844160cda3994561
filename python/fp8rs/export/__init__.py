"""Write and load checkpoints of inference servers: sharded safetensors with a config.json.

`fp8rs.export.formats.FORMATS` has the formats. If the recipe's weights have the requested format,
the codes and scales of training are exported unchanged.
"""

from .files import save_pretrained
from .loading import Loaded, load
from .serving import LayerDifferences, compare_layers, serving_config
from .tensors import tensors

__all__ = [
    "LayerDifferences",
    "Loaded",
    "compare_layers",
    "load",
    "save_pretrained",
    "serving_config",
    "tensors",
]
