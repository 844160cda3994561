"""What fp8rs must give, in plain torch, written from the definitions: what tests compare with.

An oracle shares no code with what it judges. It imports nothing of fp8rs: no rounding, no scales,
and no layout, be it of blocks, of planes or of packed scales. Nor does it let torch cast to FP8
what is out of range: releases differ there.
"""
