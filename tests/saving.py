"""Round trips through the bytes of a file."""

import io
import pickle
from typing import Any

import torch


def reloaded(value: Any, *, weights_only: bool = True, save: Any = torch.save) -> Any:
    """What is loaded again of a value that torch.save or pickle.dump has saved."""
    buffer = io.BytesIO()
    save(value, buffer)
    buffer.seek(0)
    if save is pickle.dump:
        return pickle.load(buffer)
    return torch.load(buffer, weights_only=weights_only)
