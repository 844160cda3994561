"""Inputs that the operator tests share, and a function that calls every operator."""

import pytest
import torch

import fp8rs
from fp8rs.gemm.operands import contracted_multiple
from fp8rs.nn import function
from fp8rs.quantize import recipes
from fp8rs.quantize.recipes import resolve_recipe
from oracle.elements import FORMATS, WIDE

ops = torch.ops.fp8rs

#: The recipes under test, including one whose weights need separate rowwise and columnwise planes.
RECIPES = {
    "current": "current",
    "delayed": "delayed",
    "rowwise": "rowwise",
    "block": "block",
    "mxfp8": "mxfp8",
    "mxfp8 of 1x32": fp8rs.MXFP8BlockScaling(weight_block=(1, 32)),
    "rowwise_with_gw_hp": "rowwise_with_gw_hp",
}
# The others come last, because the order decides which combinations of parameters run.
for _name, _make in recipes.RECIPES.items():
    if _make() not in map(resolve_recipe, RECIPES.values()):
        RECIPES[_name] = _name

#: Those with a scale for each row or block.
BLOCK_RECIPES = {}
for _name, _recipe in RECIPES.items():
    if not resolve_recipe(_recipe).block_format("weight").per_tensor:
        BLOCK_RECIPES[_name] = resolve_recipe(_recipe)

#: Those whose weights have a plane in each direction, because blocks lie along the rows. FSDP2
#: shards batches of such weights along dimension 0 only.
TWO_PLANES = []
for _name, _recipe in BLOCK_RECIPES.items():
    _format = _recipe.block_format("weight")
    if not _format.square and not _format.per_row:
        TWO_PLANES.append(_name)


def each_recipe(*short, of=RECIPES):
    """Parametrize over a table of recipes. On CPU, the others run with `--long` only.

    Use it for slow tests whose result hardly depends on the recipe.
    """
    return pytest.mark.parametrize(
        "recipe",
        [pytest.param(name, marks=() if name in short else pytest.mark.long_on_cpu) for name in of],
    )


#: Parametrize over the names of `RECIPES`, in slow tests. On the CPU, two recipes run in the second
#: tier only, because other recipes reach the same code. A gathered `rowwise` weight has one plane
#: and fp32 scales, as a `block` weight has. An `mxfp8` weight has square blocks, as a `block`
#: weight has, and the dtype of scales of `mxfp8 of 1x32`.
each_kind_of_recipe = pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(name, marks=pytest.mark.second_tier if name in ("rowwise", "mxfp8") else ())
        for name in RECIPES
    ],
)

each_format = pytest.mark.parametrize("fp8_dtype", FORMATS, ids=["e4m3", "e5m2"])
each_dtype = pytest.mark.parametrize("dtype", WIDE, ids=["fp32", "bf16", "fp16"])
each_direction = pytest.mark.parametrize(
    "rowwise, columnwise",
    [(True, False), (False, True), (True, True)],
    ids=["rowwise", "columnwise", "both"],
)

#: Shapes for which a kernel may take a different path: one element, odd sizes, sizes around vector
#: and tile widths, empty dimensions, 0-d to 4-d.
SHAPES = [
    (),
    (0,),
    (1,),
    (67,),
    (1, 1),
    (0, 8),
    (8, 0),
    (16, 16),
    (7, 13),
    (33, 65),
    (1, 300),
    (300, 1),
    (129, 257),
    (3, 5, 7),
    (2, 0, 4),
    (2, 3, 4, 5),
]

#: Memory layouts by name. Each function makes a strided tensor from an allocator.
LAYOUTS = {
    "transposed": lambda make: make(65, 33).t(),
    "every second column": lambda make: make(33, 130)[:, ::2],
    "every second row": lambda make: make(66, 65)[::2],
    "columns of a wider matrix": lambda make: make(33, 100)[:, 17:82],
    "unaligned": lambda make: make(33 * 65 + 1)[1:].view(33, 65),
    "one row expanded": lambda make: make(1, 65).expand(33, 65),
    "one column expanded": lambda make: make(33, 1).expand(33, 65),
    "one element expanded": lambda make: make(1, 1).expand(33, 65),
    "every third of a vector": lambda make: make(200)[::3],
    "batch that collapses": lambda make: make(4, 9, 40)[:, :, 3:20],
    "batch that does not collapse": lambda make: make(4, 9, 40)[:, 2:7],
    "permuted": lambda make: make(3, 5, 7, 2).permute(2, 0, 3, 1),
    "expanded batch": lambda make: make(1, 5, 7).expand(3, 5, 7),
}


def data(device, *shape, dtype=torch.float32, seed=0):
    """Return normal values of many magnitudes, with zeros of both signs and values out of range."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x *= torch.exp2(torch.randint(-8, 12, shape, generator=generator).float())
    pick = torch.rand(shape, generator=generator)
    x = torch.where(pick < 0.02, 0.0, x)
    x = torch.where((pick > 0.02) & (pick < 0.04), -0.0, x)
    return x.to(device, dtype)


def skip_without_block_gemms(device):
    """Skip on a GPU without GEMMs for 1x128 scales."""
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("1x128 scales need Hopper")


def pad_tokens(monkeypatch, device_type):
    """Pad the tokens of wgrad as on a device of the given type."""
    like = torch.device(device_type)
    monkeypatch.setattr(
        function, "contracted_multiple", lambda format, device: contracted_multiple(format, like)
    )


def scalar(value, device):
    return torch.tensor(value, dtype=torch.float32, device=device)


def all_codes(fp8_dtype, device, *shape):
    count = torch.Size(shape).numel()
    return (torch.arange(count) % 256).to(torch.uint8).view(fp8_dtype).view(shape).to(device)


def calls(x, fp8_dtype):
    """Call every operator on ``x`` and return the results."""
    device = x.device
    scale = scalar(0.37, device)
    amax = scalar(1.0, device)
    row, col = ops.quantize(x, scale, fp8_dtype, True, True)
    outs = [torch.empty_like(x, dtype=fp8_dtype, memory_format=torch.contiguous_format)]
    amaxes = torch.zeros(1, device=device)
    ops.multi_quantize([x], scale.view(1), outs)
    return [
        row,
        col,
        *ops.quantize_current(x, fp8_dtype, True, True),
        *ops.quantize_delayed(x, scale, amax, fp8_dtype, True, True),
        amax,
        *outs,
        ops.multi_quantize_delayed([x], scale.view(1), amaxes, [torch.empty_like(outs[0])]),
        amaxes,
        ops.amax(x),
        ops.multi_amax([x, x[:1]]),
        ops.scale_from_amax(x.float().abs(), fp8_dtype, True, 0.1, 1),
        ops.transpose(row),
        *[ops.dequantize(row, scale, [-1, -1], wide) for wide in WIDE],
    ]
