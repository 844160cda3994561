"""Optimizers for FP8 weights, and for plain ones beside them."""

from fp8rs.optim.adamw import AdamW
from fp8rs.optim.master_weights import MasterWeights

__all__ = ["AdamW", "MasterWeights"]
