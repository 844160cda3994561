"""The operators ``torch.ops.fp8rs.*``; importing this registers them.

``define`` says how, ``room`` what they read and make room for, ``tensorwise``, ``blocks``,
``groups``, ``adamw`` and ``rows`` which. ``inductor`` has what Inductor makes of one of them, and registers
nothing.
"""

from fp8rs.ops import adamw as adamw
from fp8rs.ops import blocks as blocks
from fp8rs.ops import groups as groups
from fp8rs.ops import rows as rows
from fp8rs.ops import tensorwise as tensorwise
