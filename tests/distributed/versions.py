"""Tests that need a newer torch than the oldest one."""

from __future__ import annotations

from typing import Any

import pytest
import torch


def needs(owner: Any, name: str) -> pytest.MarkDecorator:
    """Skip a test if a class of torch does not have an attribute or a dataclass field."""
    fields = getattr(owner, "__dataclass_fields__", {})
    return pytest.mark.skipif(
        not hasattr(owner, name) and name not in fields,
        reason=f"torch {torch.__version__} has no {owner.__name__}.{name}",
    )
