"""The oracle is independent of fp8rs and correct."""

import ast
from pathlib import Path

import pytest
import torch

import oracle
from oracle.elements import FORMATS, MAX, cast, decode, encode, values

FILES = sorted(Path(oracle.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_oracle_does_not_import_fp8rs(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert {name.partition(".")[0] for name in names} <= {
        *("__future__", "dataclasses", "math", "typing", "torch", "oracle")
    }


@pytest.mark.parametrize("fp8_dtype", FORMATS, ids=str)
def test_the_nearest_code_equals_torchs_cast_in_range(fp8_dtype):
    table = values(fp8_dtype).float()
    x = torch.cat([table, (table[1:] + table[:-1]) / 2, torch.tensor([1e30, MAX[fp8_dtype] * 1.1])])
    x = torch.cat([x, x.nextafter(2 * x + 1), x.nextafter(torch.zeros(()))])
    x = torch.cat([x, -x])
    assert torch.equal(encode(x, fp8_dtype), cast(x, fp8_dtype).view(torch.uint8))
    codes = torch.arange(256).to(torch.uint8)
    torch.testing.assert_close(
        decode(codes, fp8_dtype), codes.view(fp8_dtype).float(), rtol=0, atol=0, equal_nan=True
    )
