"""Quantizers with a scale for each row or block: bytes, usages, missing planes."""

import pytest
import torch

import fp8rs
from fp8rs.quantize.formats import FORMATS, format_of
from oracle import blocks as reference
from tensor_formats import bits, quantizer_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

#: (format, options of its spec, the options of the oracle)
KINDS = {
    "1x128 of 2": ("1x128", {"power_2_scale": True}, {"power_2_scale": True}),
    "1x32 floor": ("1x32", {"scale_rounding": "floor"}, {"rounding": "floor"}),
}
for _name, _format in FORMATS.items():
    if not _format.per_tensor:
        KINDS[_name] = (_name, {}, {"rounding": "ceil"} if _format.microscaled else {})
every_kind = pytest.mark.parametrize("kind", list(KINDS))
every_type = pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])
every_usage = pytest.mark.parametrize(
    ("rowwise", "columnwise"), [(True, True), (True, False), (False, True)]
)


def data(device, *shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.randn(shape[-1:], generator=generator)
    return x.to(device, dtype)


def make(kind, fp8_dtype=E4M3, **usage):
    format, options, _ = KINDS[kind]
    return quantizer_of(format, fp8_dtype, **options, **usage)


@every_kind
@every_type
@every_usage
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 256), (40, 70), (3, 5, 33), (9,), (1, 1)])
def test_bytes_equal_the_oracle(device, kind, fp8_dtype, rowwise, columnwise, dtype, shape):
    x = data(device, *shape, dtype=dtype)
    quantizer = make(kind, fp8_dtype, rowwise=rowwise, columnwise=columnwise)
    t = quantizer(x)
    assert (t.shape, t.dtype, t.device.type) == (x.shape, dtype, device.type)
    assert (t.rowwise is not None, t.columnwise is not None) == (rowwise, columnwise)
    matrix = x.reshape(-1, shape[-1])
    for plane, values in ((t.rowwise, matrix), (t.columnwise, matrix.t())):
        if plane is None:
            continue
        block = quantizer.format.block
        options = KINDS[kind][2]
        codes, scale = reference.quantize(values.contiguous(), fp8_dtype, block, **options)
        assert torch.equal(bits(plane.matrix), bits(codes))
        assert torch.equal(plane.scale.float(), scale)
        assert plane.scale.shape == quantizer.format.scale_shape(*values.shape)
        assert plane.scale.dtype == quantizer.format.scale_dtype
        expected = codes.float() * reference.expand(scale, block, tuple(values.shape))
        expected = expected.to(dtype)
    if columnwise:
        # This is the orientation of the last plane.
        expected = expected.t()
    if rowwise != columnwise or quantizer.format.square:
        assert torch.equal(t.dequantize().reshape(matrix.shape), expected)


@every_kind
def test_results_have_the_class_of_the_format(device, kind):
    quantizer = make(kind)
    t = quantizer(data(device, 40, 70))
    mx = quantizer.format.microscaled
    assert type(t) is (fp8rs.MXFP8Tensor if mx else fp8rs.Float8Tensor)
    assert str(quantizer.format.block) in repr(quantizer)
    assert quantizer.format.name in repr(t)


@every_kind
@every_usage
def test_updates_are_in_place(device, kind, rowwise, columnwise):
    quantizer = make(kind, rowwise=rowwise, columnwise=columnwise)
    x = data(device, 40, 70)
    y = data(device, 40, 70, seed=1)
    want = quantizer(y)
    for t in (quantizer(x), quantizer.make_empty((40, 70), device=device)):
        quantizer.update_quantized(y, t)
        same(t, want)
    t = quantizer(x)
    # These are the default options.
    if KINDS[kind][2] in ({}, {"rounding": "ceil"}):
        bare = type(t)(t.rowwise, t.columnwise, shape=t.shape, dtype=t.dtype)
        same(bare.quantize_(y), want)
        quantizer.update_quantized(x, t)
    same(t.quantize_(y), want)


def same(t, want):
    for got, plane in ((t.rowwise, want.rowwise), (t.columnwise, want.columnwise)):
        assert (got is None) == (plane is None)
        if plane is not None:
            assert torch.equal(bits(got.data), bits(plane.data))
            assert torch.equal(bits(got.scale), bits(plane.scale))


@every_kind
@every_usage
def test_missing_planes(device, kind, rowwise, columnwise):
    """If blocks are square, a missing plane is made exactly from the other one.

    Otherwise the error names it.
    """
    quantizer = make(kind, rowwise=rowwise, columnwise=columnwise)
    two_planes = make(kind)(data(device, 40, 70))
    for missing, there in (("rowwise", rowwise), ("columnwise", columnwise)):
        t = quantizer(data(device, 40, 70))
        if not there:
            with pytest.raises(ValueError, match=f"a test needs the {missing} plane"):
                t.plane(missing, "a test")
        if there or quantizer.format.square:
            t.update_usage(**{missing: True})
            plane = getattr(t, missing)
            want = getattr(two_planes, missing)
            assert torch.equal(bits(plane.data), bits(want.data))
            assert torch.equal(bits(plane.scale), bits(want.scale))
        else:
            named = rf"update_usage\({missing}=True\) needs the {missing} plane.*not square"
            with pytest.raises(ValueError, match=named):
                t.update_usage(**{missing: True})


@every_kind
def test_results_move_and_copy(device, kind):
    t = make(kind)(data(device, 40, 70))
    for copy in (t.clone(), t.to(device), t.detach(), t.to(torch.bfloat16), t.cpu()):
        assert type(copy) is type(t)
        assert torch.equal(bits(copy.rowwise.data).cpu(), bits(t.rowwise.data).cpu())
        assert torch.equal(bits(copy.columnwise.scale).cpu(), bits(t.columnwise.scale).cpu())
    other = make(kind)(data(device, 40, 70, seed=1))
    other.copy_(t)
    same(other, t)


@pytest.mark.parametrize(
    ("call", "error", "names"),
    [
        (lambda: format_of((2, 128), torch.float32), ValueError, r"block.*\(1, 128\)"),
        (lambda: format_of((1, 32), torch.float32), ValueError, r"block.*\(128, 128\)"),
        (lambda: format_of(128, torch.float32), ValueError, "block"),
        (lambda: format_of((1, 128), torch.float8_e8m0fnu), ValueError, r"block.*\(32, 32\)"),
        (lambda: fp8rs.MXFP8BlockScaling(scale_rounding="up"), ValueError, "scale_rounding"),
        (lambda: quantizer_of("1x32", torch.uint8), TypeError, "fp8_dtype"),
        (
            lambda: fp8rs.Quantizer("mxfp8", rowwise=False, columnwise=False),
            ValueError,
            "one plane",
        ),
    ],
)
def test_errors_name_the_argument(call, error, names):
    with pytest.raises(error, match=names):
        call()
