"""How an operand is quantized; see :mod:`fp8rs.tensor.spec`, which tensors share."""

from fp8rs.tensor.spec import Planes as Planes
from fp8rs.tensor.spec import QuantSpec as QuantSpec
from fp8rs.tensor.spec import default_spec as default_spec
from fp8rs.tensor.spec import quantize_planes as quantize_planes
from fp8rs.tensor.spec import reduce_amax as reduce_amax
