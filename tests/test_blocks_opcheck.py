"""torch's own checks of the block operators: schemas, fake kernels, compilation."""

import torch

from test_blocks import E4M3, E8M0, data, every_format, ops


@every_format
def test_opcheck(device, block, scale_dtype):
    x = data(device, 70, 90, dtype=torch.bfloat16)
    arguments = (x, E4M3, list(block), scale_dtype, True, True)
    torch.library.opcheck(ops.quantize_blocks.default, arguments)
    torch.library.opcheck(ops.block_amax.default, (x, list(block), 3))
    if scale_dtype is E8M0:
        # The schema test multiplies inputs, which torch cannot do with codes and scales.
        utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        keywords = {"packed": True, "rounding": "floor"}
        torch.library.opcheck(ops.quantize_blocks.default, arguments, keywords)
        codes, scale, _, _ = ops.quantize_blocks(x, E4M3, block, E8M0)
        for axis in (0, 1):
            torch.library.opcheck(
                ops.rebase.default, (codes, scale, list(block), axis), test_utils=utils
            )
        torch.library.opcheck(ops.pack_scales.default, (scale, 70, block[0]), test_utils=utils)
        packed = ops.pack_scales(scale, 70, block[0])
        torch.library.opcheck(
            ops.unpack_scales.default, (packed, 70, 3, block[0]), test_utils=utils
        )
