"""Writes what ml_dtypes makes of the inputs in tests/golden/README.md to standard output."""

import sys

import ml_dtypes
import numpy as np

FORMATS = (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)

every_code = np.arange(256, dtype=np.uint8)
every_bf16 = (np.arange(0x10000, dtype=np.uint32) << 16).view(np.float32)
with np.errstate(all="ignore"):
    parts = [every_code.view(dtype).astype(np.float32).astype("<f4").tobytes() for dtype in FORMATS]
    parts += [every_bf16.astype(dtype).tobytes() for dtype in FORMATS]
sys.stdout.buffer.write(b"".join(parts))
