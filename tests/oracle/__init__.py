"""Reference implementations in plain torch, written from the definitions.

They share no code with fp8rs: they implement rounding, scales and the layouts of blocks, planes and
packed scales themselves. They do not cast values that are out of range to FP8 with torch, because
torch releases differ there.
"""
