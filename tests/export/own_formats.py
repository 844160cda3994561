"""The export format of each recipe that stores its weights byte for byte."""

import pytest

from distributed.models import RECIPES
from fp8rs.export.formats import FORMATS
from fp8rs.quantize.recipes import quant_spec, resolve_recipe

#: The format of each recipe whose weights a server reads.
OWN = {}
for _name, _recipe in RECIPES.items():
    _weight_spec = quant_spec(resolve_recipe(_recipe), "weight")
    for _format in FORMATS.values():
        if _format.takes(_weight_spec):
            OWN[_name] = _format.name
with_own_format = pytest.mark.parametrize("recipe", list(OWN))
