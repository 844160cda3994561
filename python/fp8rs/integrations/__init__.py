"""What libraries that people train with need beside ``convert_to_float8_training``: a module each.

``import fp8rs`` imports none of these modules, and each imports its library where it uses it: none
is a dependency. Most clients need nothing of this, because a converted model is trained as any
other; docs/clients says how for each.
"""
