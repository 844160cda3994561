"""Optimizers for models with FP8 weights."""

from fp8rs.optim.adamw import AdamW
from fp8rs.optim.master_weights import MasterWeights

__all__ = ["AdamW", "MasterWeights"]
