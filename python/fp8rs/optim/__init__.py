"""Optimizers for models with FP8 weights.

- ``adamw``: AdamW, its options and its state;
- ``step``: groups the parameters of one step of AdamW into calls of an operator;
- ``moments``: moments of AdamW in 8 bits;
- ``master_weights``: runs any other optimizer on masters;
- ``masters``: the base class of both optimizers, which keeps masters in the state;
- ``optim_param``: one parameter at one step;
- ``fp8_weights``: operations on lists of FP8 weights;
- ``missing_masters``: warns of optimizers that keep no masters.

[Note: masters]

*Codes.* The FP8 numbers in which an FP8 weight is stored, together with their scales. Moments in 8
bits are codes too, with a range for each block in place of a scale.

*Master.* A float32 copy of a parameter in the optimizer's state. A step updates the master and
rounds it to the codes of the weight. The next step starts from the master again, so that small
steps add up. A master of a plain bfloat16 or float16 parameter is rounded to this dtype.

*Local part.* The part of a parameter, of its state and of its gradient that this rank holds, as a
plain tensor or a `QuantizedTensor`.

*Last write.* Other code may write a parameter between two steps, for example to load it. The next
step then updates the master by the written values. It recognizes a write to an FP8 weight by a
count of writes, and a write to a plain parameter by its values.
"""

from fp8rs.optim.adamw import AdamW
from fp8rs.optim.master_weights import MasterWeights

__all__ = ["AdamW", "MasterWeights"]
