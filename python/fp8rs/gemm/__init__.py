"""GEMMs on quantized planes, and the devices that support them."""
