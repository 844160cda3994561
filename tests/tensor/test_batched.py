"""Batched weights (E, N, K): each matrix has the bytes that it has as a 2-D tensor."""

import copy
import io

import pytest
import torch

from fp8rs.quantize import formats
from fp8rs.quantize.planes import Plane
from fp8rs.quantize.spec import QuantSpec
from fp8rs.tensor.quantized import Float8Tensor, QuantizedTensor
from fp8rs.tensor.quantizer import Quantizer
from internals import storage_of
from oracle.compare import same

E4M3 = torch.float8_e4m3fn

#: (E, N, K): whole blocks, rows and columns that blocks do not divide, one matrix, no rows, no
#: matrices, and a gated pair of matrices.
SHAPES = [(3, 128, 256), (3, 45, 129), (1, 33, 40), (2, 0, 16), (0, 5, 7), (2, 2, 20, 64)]

each_format = pytest.mark.parametrize("format", formats.FORMATS.values(), ids=lambda f: f.name)
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
each_plane = pytest.mark.parametrize(
    "planes", [(True, False), (False, True), (True, True)], ids=["rowwise", "columnwise", "both"]
)


def values(device, *shape, seed=0):
    """bf16 values whose magnitude differs between matrices."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    scale = torch.arange(1, shape[0] + 1).view(-1, *[1] * (len(shape) - 1))
    return (x * scale).bfloat16().to(device)


def quantizer(format, planes=(True, True), batched=True):
    spec = QuantSpec(format, E4M3, batched=batched)
    return Quantizer(spec, rowwise=planes[0], columnwise=planes[1])


def make(device, format, shape, planes=(True, True), seed=0):
    x = values(device, *shape, seed=seed)
    return quantizer(format, planes)(x), x


def planes_of(t):
    planes = {"rowwise": t.rowwise, "columnwise": t.columnwise}
    return {name: plane for name, plane in planes.items() if plane is not None}


def each_equals(t, x, planes=(True, True)):
    """Whether each matrix of ``t`` has the bytes of a matrix of ``x`` that is quantized alone."""
    single = quantizer(t.format, planes, batched=False)
    for i, matrix in enumerate(x):
        expected = planes_of(single(matrix))
        for name, plane in planes_of(t).items():
            if not same(plane.data[i], expected[name].data):
                return False
            if not same(plane.scale[i], expected[name].scale):
                return False
    return True


@each_format
@each_shape
@each_plane
def test_each_matrix_has_the_bytes_of_a_2d_tensor(device, format, shape, planes):
    t, x = make(device, format, shape, planes)
    assert each_equals(t, x, planes)
    rows, cols = storage_of(t).matrix[1:]
    assert storage_of(t).matrix[0] == shape[0]
    if t.rowwise is not None:
        assert t.rowwise.data.shape == shape
        assert t.rowwise.scale.shape == format.scale_shape(rows, cols, shape[:1])
    if t.columnwise is not None:
        assert t.columnwise.data.shape == (shape[0], cols, rows)
    type(t)(*t.planes, shape=shape, dtype=t.dtype)  # passes its own checks


@each_format
@each_shape
@each_plane
def test_dequantizing_gives_each_matrix(device, format, shape, planes):
    t, x = make(device, format, shape, planes)
    got = t.dequantize()
    assert got.shape == shape and got.dtype == x.dtype
    single = quantizer(format, planes, batched=False)
    for i, matrix in enumerate(x):
        assert same(got[i], single(matrix).dequantize())
        assert same(t[i].dequantize(), got[i])
    assert all(same(a.dequantize(), b) for a, b in zip(t.unbind(0), got, strict=True))


@each_format
@each_plane
def test_the_transpose_can_be_read_only(device, format, planes):
    t, x = make(device, format, (3, 45, 129), planes)
    transposed = t.transpose(-1, -2)
    assert transposed.shape == (3, 129, 45)
    assert transposed.planes == (None, None)
    assert same(transposed.dequantize(), t.dequantize().mT)
    assert same(transposed.mT.dequantize(), t.dequantize())
    assert same(t[1].t().dequantize(), t.dequantize()[1].t())
    with pytest.raises(NotImplementedError, match="does not consist of whole matrices"):
        transposed.copy_(torch.ones(3, 129, 45, device=device))
    assert each_equals(t, x, planes)


RANGES = {
    "slice": lambda t: t[1:3],
    "narrow": lambda t: t.narrow(0, 1, 2),
    "split": lambda t: t.split([1, 2, 1])[1],
    "chunk of a range": lambda t: t[1:4].chunk(2)[0],
    "as_strided": lambda t: torch.as_strided(t, (2, *t.shape[1:]), t.stride(), t.stride(0)),
    "detached": lambda t: t[1:3].detach(),
    "flat": lambda t: t.view(-1)[t.stride(0) : 3 * t.stride(0)].view(2, *t.shape[1:]),
}


@each_format
@each_plane
@pytest.mark.parametrize("way", RANGES)
def test_writes_to_a_range_of_matrices_land(device, format, planes, way):
    t, x = make(device, format, (4, 45, 129), planes)
    part = RANGES[way](t)
    assert same(part.dequantize(), t.dequantize()[1:3])
    new = values(device, 2, 45, 129, seed=1)
    part.copy_(new)
    x[1:3] = new
    assert each_equals(t, x, planes) and each_equals(part, new, planes)
    part.zero_()
    x[1:3] = 0
    assert each_equals(t, x, planes)
    other, _ = make(device, format, (4, 45, 129), planes, seed=2)
    part.copy_(other[2:])
    for plane, source in zip(planes_of(t).values(), planes_of(other).values(), strict=True):
        assert same(plane.data[1:3], source.data[2:]) and same(plane.scale[1:3], source.scale[2:])


@each_format
@each_plane
def test_a_write_to_one_matrix_leaves_the_others(device, format, planes):
    t, x = make(device, format, (3, 45, 129), planes)
    new = values(device, 45, 129, seed=1)
    t[1].copy_(new)
    x[1] = new
    assert each_equals(t, x, planes)
    t.view(-1).copy_(x.flip(0).reshape(-1))
    assert each_equals(t, x.flip(0), planes)


@each_format
def test_flat_views_copy_codes(device, format):
    t, _ = make(device, format, (3, 45, 129))
    other, x = make(device, format, (3, 45, 129), seed=1)
    t.view(-1).copy_(other.view(-1))
    assert each_equals(t, x)
    n = t.stride(0)
    t.view(-1)[n:].copy_(other.view(-1)[: 2 * n])
    assert each_equals(t, x[[0, 0, 1]])


@each_format
def test_arithmetic_in_place_keeps_unchanged_blocks(device, format):
    t, _ = make(device, format, (3, 45, 129))
    before = copy.deepcopy(t)
    factor = torch.ones(3, 1, 1, device=device, dtype=t.dtype)
    factor[1] = 4
    t.mul_(factor)
    for name, plane in planes_of(t).items():
        old = getattr(before, name)
        for i in (0, 2):
            assert same(plane.data[i], old.data[i]) and same(plane.scale[i], old.scale[i])
    assert same(t.dequantize()[1], before.dequantize()[1] * 4)


VIEWS = {
    "rows of each matrix": lambda t: t[:, :32],
    "columns of each matrix": lambda t: t[:, :, 1],
    "rows of one matrix": lambda t: t[1, 3:5],
    "an element": lambda t: t[1, 2, 3],
    "a range that cuts matrices": lambda t: t.view(-1)[100:300],
    "matrices side by side": lambda t: t.permute(1, 0, 2),
    "every second matrix": lambda t: t[::2],
}


@each_format
@pytest.mark.parametrize("way", VIEWS)
def test_other_views_are_read_only(device, format, way):
    t, x = make(device, format, (3, 45, 129))
    view = VIEWS[way](t)
    assert isinstance(view, QuantizedTensor)
    assert same(view.dequantize(), VIEWS[way](t.dequantize()).contiguous())
    with pytest.raises(NotImplementedError, match=r"does not consist of whole matrices"):
        view.copy_(torch.ones(view.shape, device=device))
    with pytest.raises(NotImplementedError, match=r"does not consist of whole matrices"):
        view.mul_(2)
    assert each_equals(t, x)


@each_format
def test_copies_have_the_same_bytes(device, format):
    t, x = make(device, format, (3, 45, 129))
    buffer = io.BytesIO()
    torch.save(t, buffer)
    buffer.seek(0)
    for new in (
        t.clone(),
        t.detach(),
        copy.deepcopy(t),
        t.to(torch.float32),
        t.to("cpu"),
        torch.load(buffer, weights_only=True),
        quantizer(format).make_empty(t.shape, dtype=t.dtype, device=device).copy_(t),
    ):
        assert each_equals(new, x)
    empty = quantizer(format).make_empty((3, 45, 129), device=device)
    assert quantizer(format).update_quantized(x, empty) is empty
    assert each_equals(empty, x)
    assert type(t.new_zeros(2, 3)) is torch.Tensor


@each_format
def test_operators_dequantize(device, format):
    t, _ = make(device, format, (3, 45, 129))
    other = torch.ones(3, 129, 8, device=device, dtype=t.dtype)
    assert same(torch.bmm(t, other), torch.bmm(t.dequantize(), other))
    assert same(t + 1, t.dequantize() + 1)


def test_leading_dimensions_of_activations_are_rows(device):
    x = values(device, 3, 45, 129)
    for format in formats.FORMATS.values():
        t = quantizer(format, batched=False)(x)
        rows = quantizer(format, batched=False)(x.view(-1, 129))
        assert not t.rowwise.batched and storage_of(t).matrix == (135, 129)
        assert same(t.rowwise.scale, rows.rowwise.scale)


def test_planes_of_a_batch_and_of_a_matrix_are_not_mixed(device):
    t, _ = make(device, formats.TENSOR, (3, 45, 129))
    matrix = quantizer(formats.TENSOR, batched=False)(t.dequantize())
    with pytest.raises(ValueError, match=r"columnwise has data of shape \(129, 135\)"):
        Float8Tensor(t.rowwise, matrix.columnwise, shape=t.shape, dtype=t.dtype)
    scale = torch.ones(2, device=device)
    with pytest.raises(ValueError, match=r"scales of shape \(2,\).*codes of shape \(3, 45, 1"):
        Float8Tensor(Plane(t.rowwise.data, scale), shape=t.shape, dtype=t.dtype)


def test_a_compiler_traces_reads_and_writes(device):
    t, x = make(device, formats.MX_32X32, (3, 64, 96))

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(t, x):
        t.copy_(x)
        return t.transpose(-1, -2).dequantize() * 2

    out = step(t, x + 1)
    assert each_equals(t, x + 1)
    assert same(out, t.dequantize().mT.contiguous() * 2)
