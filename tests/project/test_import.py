"""What ``import fp8rs`` brings along."""

import subprocess
import sys

import pytest

import fp8rs

HEAVY = [
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "triton",
]


@pytest.mark.parametrize("also", ["", "fp8rs.nn.Linear; fp8rs.optim.AdamW"])
def test_an_import_is_light(also):
    """Compilers and sharding take seconds to import: they are, by those who use them."""
    script = f"import sys, torch, fp8rs; {also}\nprint([m for m in {HEAVY} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout.strip() == "[]"


def test_a_listing_shows_the_public_names_and_nothing_else():
    assert dir(fp8rs) == sorted(fp8rs.__all__)
    assert all(getattr(fp8rs, name) is not None for name in fp8rs.__all__)
    with pytest.raises(AttributeError, match="no attribute 'reports'"):
        fp8rs.reports  # noqa: B018
