"""GEMMs on quantized planes, and which device has which."""
