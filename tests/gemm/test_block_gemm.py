"""The operands of rowwise and blockwise CUDA GEMMs, with torch._scaled_mm simulated on the CPU.

The simulation checks operands against the documentation of cuBLAS and torch, and multiplies their
values. This covers padding, strides, packing and the choice of operands for GPUs that are not
available. Tests on GPUs check the hardware.
"""

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import fp8rs
from fp8rs.gemm import devices, kernels, operands
from fp8rs.gemm.table import GEMMS, scaled_mm
from fp8rs.nn import function
from fp8rs.quantize import formats
from internals import forget_layer_specs
from oracle.blocks import expand, swizzle
from oracle.compare import relative
from oracle.elements import E4M3
from oracle.linear import blocks_of, linear
from tensor_formats import quantizer_of

HOPPER, BLACKWELL = (9, 0), (10, 0)


def stand_in(a, b, *, scale_a, scale_b, bias, out_dtype, use_fast_accum):
    """Simulate torch._scaled_mm, which selects a mode by the shapes and dtypes of the scales."""
    k, n = b.shape
    assert a.is_contiguous()
    assert b.t().is_contiguous()
    assert k % 16 == 0
    assert n % 16 == 0
    left = _values(a, scale_a)
    right = _values(b.t(), scale_b if scale_b.dim() < 2 else scale_b.t())
    if scale_a.dim() == 2 and scale_a.shape[1] == 1 and scale_b.shape[0] == 1:
        assert out_dtype == torch.bfloat16, "the row-wise mode"
    elif scale_a.numel() > 1:
        assert not use_fast_accum
        assert bias is None
    out = left @ right.t()
    assert bias is None or (bias.dtype == out_dtype and bias.shape == (n,))
    return (out if bias is None else out + bias).to(out_dtype)


def _values(codes, scale):
    rows, cols = codes.shape
    if scale.dtype == torch.float8_e8m0fnu:
        assert scale.dim() == 1
        assert cols % 32 == 0
        blocks = cols // 32
        # Invert the packing: pack the indices and look up each scale.
        positions = swizzle(torch.arange(rows * blocks).view(rows, blocks) + 1, torch.int32)
        unswizzled = torch.zeros(rows * blocks + 1, dtype=torch.uint8)
        unswizzled[positions.long()] = scale.view(torch.uint8)
        assert scale.numel() == positions.numel()
        exponents = unswizzled[1:].view(rows, blocks).double() - 127
        return (codes.double() * expand(torch.pow(2.0, exponents), (1, 32), (rows, cols))).float()
    if scale.numel() == 1:
        return codes.float() * scale
    assert scale.dtype == torch.float32
    if scale.shape == (rows, 1):
        return codes.float() * scale
    blocks = cols // 128
    assert cols % 128 == 0
    if scale.shape == (rows, blocks):
        assert scale.stride() == (1, rows)
        return codes.float() * expand(scale, (1, 128), (rows, cols))
    assert scale.shape == (-(-rows // 128), blocks)
    assert blocks % 4 == 0
    assert scale.is_contiguous()
    return codes.float() * expand(scale, (128, 128), (rows, cols))


@pytest.fixture
def on(monkeypatch):
    """Make the CPU look like a GPU of a given compute capability."""

    def pretend(capability):
        forget_layer_specs()
        monkeypatch.setattr(torch, "_scaled_mm", stand_in)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a GPU")
        for module in (devices, operands):
            monkeypatch.setattr(module, "capability", lambda index: capability)
        rebases = operands.rebases
        for module in (operands, kernels):
            monkeypatch.setattr(
                module, "rebases", lambda _, emulate: rebases(torch.device("cuda", 0), emulate)
            )

    yield pretend
    forget_layer_specs()


def quantized(x, format, power_2=False):
    quantizer = quantizer_of(format.name, columnwise=False, power_2_scale=power_2)
    return quantizer(x).rowwise


PAIRS = [
    (formats.ROW, formats.ROW, HOPPER),
    (formats.ROW, formats.MX_32X32, HOPPER),
    (formats.ROW, formats.MX_1X32, HOPPER),
    (formats.MX_1X32, formats.MX_32X32, HOPPER),
    (formats.BLOCK_1X128, formats.BLOCK_128X128, HOPPER),
    (formats.BLOCK_1X128, formats.BLOCK_1X128, HOPPER),
    (formats.MX_1X32, formats.MX_32X32, BLACKWELL),
    (formats.MX_1X32, formats.MX_1X32, BLACKWELL),
]


@pytest.mark.parametrize(("a", "b", "capability"), PAIRS)
@pytest.mark.parametrize("shape", [(128, 128, 512), (16, 16, 16), (37, 130, 77), (1, 5, 1300)])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_bias", [True, False])
def test_operands(on, a, b, capability, shape, out_dtype, with_bias):
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(m, k, generator=generator)
    w = torch.randn(n, k, generator=generator)
    left = quantized(x, a, power_2=b.microscaled)
    right = quantized(w, b)
    bias = torch.randn(n, generator=generator) if with_bias else None
    want = scaled_mm(left, right, bias=bias, out_dtype=torch.float32)
    on(capability)
    got = GEMMS["cuda", a, b].kernel(left, right, bias, out_dtype, True)
    assert (got.shape, got.dtype) == ((m, n), out_dtype)
    assert got.is_contiguous()
    rebased = capability < BLACKWELL and (a.microscaled or b.microscaled)
    assert relative(got, want) < (0.004 if out_dtype != torch.float32 or rebased else 1e-6)


@pytest.mark.parametrize("name", ["rowwise", "block", "mxfp8"])
def test_choice_of_operands(on, name):
    """On Hopper, MXFP8 activations have one power-of-two scale per row."""
    recipe = fp8rs.quantize.recipes.resolve_recipe(name)
    input_format = recipe.block_format("input")
    cpu = torch.device("cpu")
    assert operands.operand_format(input_format, cpu, False) == input_format
    on(HOPPER)
    expected = formats.ROW if name == "mxfp8" else input_format
    assert operands.operand_format(input_format, cpu, False) == expected
    on(BLACKWELL)
    assert operands.operand_format(input_format, cpu, False) == input_format


def test_hopper_linear_equals_the_simulation(on, monkeypatch):
    """All three GEMMs of MXFP8 run on rebased operands."""

    def as_cuda(a, b, *, out_dtype, bias=None, use_fast_accum=False, emulate=False):
        kernel = GEMMS["cuda", a.format, b.format].kernel
        return kernel(a, b, bias, out_dtype, use_fast_accum)

    torch.manual_seed(0)
    layer = fp8rs.nn.Linear(72, 48, recipe="mxfp8")
    x = torch.randn(50, 72)
    dy = torch.randn(50, 48)
    on(HOPPER)
    monkeypatch.setattr(function, "scaled_mm", as_cuda)
    monkeypatch.setattr("oracle.linear.rebases", lambda blocks, device: True)
    results = []
    for call in (
        layer,
        lambda x: linear(x, layer.weight, layer.bias, blocks_of(layer.recipe)),
    ):
        leaf = x.clone().requires_grad_()
        y = call(leaf)
        results.append([y, *torch.autograd.grad(y, [leaf, layer.weight, layer.bias], dy)])
    for got, want in zip(*results, strict=True):
        assert relative(got, want) < 1e-5


def test_one_plane_serves_dgrad(on):
    """Row scales become a column scale, squares are rebased, and 1x32 blocks need a plane."""
    w = torch.randn(48, 72)
    row = quantized(w, formats.ROW)
    operand = operands.dgrad_operand(row, False)
    assert torch.equal(operand.data.view(torch.uint8), row.data.view(torch.uint8).t())
    assert torch.equal(operand.scale, torch.ones(72, 1))
    assert torch.equal(operands.dgrad_column_scale(row.format, row.scale), row.scale.t())
    square = quantized(w, formats.MX_32X32)
    assert operands.dgrad_operand(square, False).format == formats.MX_32X32
    assert operands.dgrad_column_scale(square.format, square.scale) is None
    with pytest.raises(ValueError, match="not square"):
        operands.dgrad_operand(quantized(w, formats.MX_1X32), False)
    on(HOPPER)
    rebased = operands.dgrad_operand(square, False)
    assert rebased.format == formats.ROW
    assert relative(rebased.dequantize(torch.float32), w.t()) < 0.05


def test_blocks_of_128_need_hopper(on):
    on(BLACKWELL)
    for b in (formats.BLOCK_1X128, formats.BLOCK_128X128):
        with pytest.raises(fp8rs.UnsupportedError, match="mxfp8"):
            devices.check_cuda.__wrapped__(0, GEMMS["cuda", formats.BLOCK_1X128, b].recipe)


def test_aligned_sizes_are_not_padded():
    """Symbolic sizes stay simple too. Otherwise they would grow from layer to layer."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    codes = mode.from_tensor(torch.zeros(272, 40, dtype=torch.uint8))
    with mode, enable_python_dispatcher():
        codes = codes.view(E4M3)
        for padded, cols in (
            (kernels.padded(codes, 16, 128), 128),
            (kernels.padded(codes, 16, 16), 48),
        ):
            assert padded.shape[0].node.expr == codes.shape[0].node.expr
            assert padded.shape[1] == cols
        assert kernels.padded(codes, 8, 8).shape[1].node.expr == codes.shape[1].node.expr
