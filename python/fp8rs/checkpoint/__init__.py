"""Checkpoints of models with FP8 layers, saved by torch.distributed.checkpoint (DCP).

Files contain plain tensors under the names of the unconverted model. They can be read without
fp8rs.

- ``parts``: the plain tensors of a quantized tensor, and the chunks that DCP writes and reads.
- ``states``: ``Stateful`` objects for a model and its optimizers.
- ``plans``: checks of names, shapes, dtypes and values before anything is read or written.
- ``files``: readers and writers for directories and stores, and checks of bytes.
- ``api``: saving and loading.

``import fp8rs`` does not import this package, because torch.distributed.checkpoint takes seconds.
"""

from .api import CheckpointError, async_save, load, save
from .states import Model, Optimizer

__all__ = ["CheckpointError", "Model", "Optimizer", "async_save", "load", "save"]
