"""The operators ``torch.ops.fp8rs.*``. Importing this package registers them.

``define`` registers an operator. ``tensorwise``, ``blocks``, ``groups``, ``fused``, ``combine``,
``rotation``, ``adamw`` and ``rows`` have the operators, and ``shapes`` allocates their outputs.
``inductor`` decomposes an operator for Inductor.
"""

from fp8rs.ops import adamw as adamw
from fp8rs.ops import blocks as blocks
from fp8rs.ops import combine as combine
from fp8rs.ops import fused as fused
from fp8rs.ops import groups as groups
from fp8rs.ops import rotation as rotation
from fp8rs.ops import rows as rows
from fp8rs.ops import tensorwise as tensorwise
