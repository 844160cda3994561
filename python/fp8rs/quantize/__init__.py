"""How high-precision values become FP8 planes.

- ``formats``: block shapes and scale dtypes, one row for each format;
- ``planes``: codes with their scales;
- ``spec``: `QuantSpec`, the options of one quantization;
- ``cast``: `quantize_planes` and `requantize_plane`, which run it;
- ``recipes``: the specs of weights, inputs and gradients that are trained together.
"""
