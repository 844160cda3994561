"""Saves a value to memory and loads it again."""

import io
import pickle
from typing import Any

import torch


def reloaded(value: Any, *, weights_only: bool = True, save: Any = torch.save) -> Any:
    """Save a value with torch.save or pickle.dump, and return what a load gives."""
    buffer = io.BytesIO()
    save(value, buffer)
    buffer.seek(0)
    if save is pickle.dump:
        return pickle.load(buffer)
    return torch.load(buffer, weights_only=weights_only)
