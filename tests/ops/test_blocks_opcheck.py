"""torch's opcheck on the block operators: schemas, fake kernels, compilation."""

import torch
from torch.library import opcheck

from ops.block_formats import E4M3, E8M0, FORMATS, data, every_format, ops
from ops.operator_checks import BLOCK_NAMES, EVERYTHING, WITHOUT_SCHEMA, check_writes, tensors


def samples(device, block, scale_dtype):
    """Yield (operator's name, arguments, keywords) for every operator of this format."""
    x = data(device, 70, 90, dtype=torch.bfloat16)
    arguments = (x, E4M3, list(block), scale_dtype, True, True)
    yield "quantize_blocks", arguments, {}
    yield "block_amax", (x, list(block), 3), {}
    if block == (1, -1):
        yield "quantize_blocks", arguments, {"divide": True}
    if scale_dtype is not E8M0:
        return
    yield "quantize_blocks", arguments, {"packed": True, "rounding": "floor"}
    codes, scale, _, _ = ops.quantize_blocks(x, E4M3, block, E8M0)
    for axis in (0, 1):
        yield "rebase", (codes, scale, list(block), axis), {}
    yield "pack_scales", (scale, 70, block[0]), {}


@every_format
def test_opcheck(device, block, scale_dtype):
    for name, arguments, keywords in samples(device, block, scale_dtype):
        # The schema test multiplies its inputs, which is not implemented for codes and scales.
        fp8 = any(t.dtype.itemsize == 1 for t in tensors(arguments))
        utils = WITHOUT_SCHEMA if fp8 else EVERYTHING
        opcheck(getattr(ops, name).default, arguments, keywords, test_utils=utils)


@every_format
def test_only_declared_arguments_are_written(device, block, scale_dtype):
    for name, arguments, keywords in samples(device, block, scale_dtype):
        check_writes(name, arguments, keywords)


def test_every_operator_has_samples():
    names = {name for form in FORMATS for name, _, _ in samples("cpu", *form)}
    assert names == set(BLOCK_NAMES)
