"""The modules that ``import fp8rs`` imports."""

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
def test_an_import_is_fast(also):
    """Compilers and sharding take seconds to import, so they are imported when they are used."""
    script = f"import sys, torch, fp8rs; {also}\nprint([m for m in {HEAVY} if m in sys.modules])"
    out = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert out.stdout.strip() == "[]"


def test_dir_lists_the_public_names_only():
    assert dir(fp8rs) == sorted(fp8rs.__all__)
    assert all(getattr(fp8rs, name) is not None for name in fp8rs.__all__)
    with pytest.raises(AttributeError, match="no attribute 'reports'"):
        fp8rs.reports  # noqa: B018
