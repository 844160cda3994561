"""The operators ``torch.ops.fp8rs.*``. Importing this package registers them.

``tensorwise``, ``blocks``, ``adamw`` and ``rows`` define the operators with the decorators of
``define``. ``room`` computes shapes and allocates outputs. ``inductor`` has a decomposition for
Inductor and does not register operators.
"""

from fp8rs.ops import adamw as adamw
from fp8rs.ops import blocks as blocks
from fp8rs.ops import rows as rows
from fp8rs.ops import tensorwise as tensorwise
