"""Checkpoints of models with FP8 layers, by torch.distributed.checkpoint (DCP).

Their files have plain tensors, under the names of the unconverted model: no fp8rs is needed to read
them.

- ``parts``: a quantized tensor as plain ones, and what DCP writes and reads of each;
- ``states``: a model and its optimizers as DCP asks for them;
- ``plans``: what is compared before anything is read or written;
- ``files``: directories that are there whole or not at all, and bytes that are checked;
- ``api``: saving and loading.

Not imported by ``import fp8rs``: torch.distributed.checkpoint takes seconds.
"""

from .api import CheckpointError, async_save, load, save
from .states import Model, Optimizer

__all__ = ["CheckpointError", "Model", "Optimizer", "async_save", "load", "save"]
