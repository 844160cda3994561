"""What the converted layers of one model share, with FSDP2 or without.

- ``state``: the recipe, the layers, and the notifications of forwards and optimizer steps;
- ``handle``: the identity, the write counter and the scale of one FP8 parameter;
- ``shard_spec``: which part of a parameter this rank holds;
- ``linear_spec``: how a linear layer's operands are quantized and multiplied;
- ``input_cache``: the last quantized input of each thread.
"""
