"""The operators ``torch.ops.fp8rs.*``; importing this registers them."""

from fp8rs.ops import blocks as blocks
from fp8rs.ops import tensorwise as tensorwise
