"""Views of quantized tensors in every format: their values, and writes through them.

Views of consecutive elements can be written. Writes through other views raise an error. A write to
a view whose blocks belong to it alone changes nothing else. If the view shares a scale with other
elements, these keep their values: the scale is kept or changes by a power of two
(`test_in_place`). Codes are copied without change if their blocks match.
"""

import pytest
import torch

from fp8rs.tensor.quantized import QuantizedTensor
from internals import VIEW_HANDLERS, WRITE_HANDLERS, refuse
from tensor_formats import (
    FORMATS,
    PLANES,
    SHAPE,
    SQUARE,
    bits,
    data,
    every_format,
    every_plane,
    make,
    same_bytes,
    same_values,
    scales,
    values,
)

ROWS, COLS = SHAPE

#: Ways to take a part, as a function and the rows and columns that it selects.
PARTS = {
    "rows": (lambda x: x[:128], (0, 128), (0, COLS)),
    "the last rows": (lambda x: x[128:], (128, ROWS), (0, COLS)),
    "rows that end in a block": (lambda x: x[128:136], (128, 136), (0, COLS)),
    "narrow": (lambda x: x.narrow(0, 0, 128), (0, 128), (0, COLS)),
    "split": (lambda x: x.split(128)[1], (128, ROWS), (0, COLS)),
    "split with sizes": (lambda x: x.split([128, 72])[0], (0, 128), (0, COLS)),
    "as_strided": (
        lambda x: torch.as_strided(x, (72, COLS), (COLS, 1), 128 * COLS),
        (128, ROWS),
        (0, COLS),
    ),
    "detached": (lambda x: x[128:].detach(), (128, ROWS), (0, COLS)),
    "a part of a row": (lambda x: x[130:131, 5:69], (130, 131), (5, 69)),
    "a view of a part": (lambda x: x[:128].view(4, 32, COLS), (0, 128), (0, COLS)),
    "a part of a view": (lambda x: x.view(25, 8, COLS)[16:], (128, ROWS), (0, COLS)),
}
#: Ways to view all elements in another shape. Some of them change the matrix.
SHAPES = {
    "view": lambda x: x.view(2, 100, COLS),
    "two transposes": lambda x: x.t().t(),
    "detach": lambda x: x.detach(),
    "flat": lambda x: x.view(-1),
    "another matrix": lambda x: x.view(100, 2 * COLS),
    "flat and back": lambda x: x.view(-1).view(SHAPE),
}
CHANGED = ("flat", "another matrix")


def alone(t: QuantizedTensor, rows: tuple[int, int], cols: tuple[int, int]) -> bool:
    """Return whether a part of a matrix shares no block of any plane with the rest."""
    for name in values(t):
        block = getattr(t, name).format.block
        extents = (rows, cols) if name == "rowwise" else (cols, rows)
        for (start, stop), size, extent in zip(
            extents, block, SHAPE if name == "rowwise" else SHAPE[::-1], strict=True
        ):
            if size == -1 and (start, stop) != (0, extent):
                return False
            if size != -1 and (start % size or (stop % size and stop != extent)):
                return False
    return block != (-1, -1)


def double_scales(t: QuantizedTensor) -> None:
    scales = {id(p.scale): p.scale for p in (t.rowwise, t.columnwise) if p is not None}
    for scale in scales.values():
        scale.copy_((scale.float() * 2).to(scale.dtype))


def agree(t: QuantizedTensor, format: str) -> None:
    """Assert that both planes have equal codes, in formats with square blocks."""
    if format in SQUARE and len(values(t)) == 2:
        assert torch.equal(bits(t.rowwise.data), bits(t.columnwise.data.t()))
        assert torch.equal(t.dequantize(), values(t)["columnwise"])


@every_format
@every_plane
@pytest.mark.parametrize("way", list(PARTS))
@pytest.mark.parametrize("source", ["plain", "quantized"])
def test_a_write_to_a_part_keeps_the_other_values(device, format, planes, way, source):
    take, rows, cols = PARTS[way]
    t = make(format, planes, device)
    before = values(t)
    part = take(t)
    assert isinstance(part, QuantizedTensor)
    src = data(device, *part.shape, seed=1, scale=1000.0)
    if source == "quantized":
        src = FORMATS[format]()(src)
    part.copy_(src)
    if alone(t, rows, cols):
        for name, written in values(part).items():
            take(before[name]).copy_(written)
        same_values(values(t), before)
        if source == "plain":
            usage = {name: name in values(part) for name in PLANES["both"]}
            same_bytes(part.clone(), FORMATS[format](**usage)(src))
        else:
            for name in values(part):
                assert torch.equal(bits(getattr(part, name).data), bits(getattr(src, name).data))
    else:
        written = torch.zeros(SHAPE, dtype=torch.bool, device=device)
        take(written).fill_(True)
        for name, actual in values(t).items():
            want = before[name].clone()
            outside = torch.ones_like(written)
            outside[block_ranges(t, rows, cols)] = False
            assert torch.equal(actual[outside], want[outside]), name
            take(want).copy_(src.dequantize() if source == "quantized" else src)
            # Half a step of the format. Outside the part, at most half a step of the subnormal
            # numbers.
            least = 2.0**-9 * 0.51 * scales(t)[name]
            error = torch.where(written, 0.51 * 2.0**-3 * want.abs(), 0.0) + least
            assert ((actual - want).abs() <= error).all(), name
    same_values(values(part), {n: x.contiguous() for n, x in values(take(t)).items()})
    agree(t, format)


def block_ranges(
    t: QuantizedTensor, rows: tuple[int, int], cols: tuple[int, int]
) -> tuple[slice, slice]:
    """Return the rows and columns of the blocks of all planes that a part overlaps."""
    ranges = []
    for axis, (start, stop) in enumerate((rows, cols)):
        blocks = [getattr(t, n).format.block[axis ^ (n == "columnwise")] for n in values(t)]
        size = SHAPE[axis] if -1 in blocks else max(blocks)
        ranges.append(slice(start // size * size, -(-stop // size) * size))
    return ranges[0], ranges[1]


@every_format
@every_plane
@pytest.mark.parametrize("way", list(SHAPES))
@pytest.mark.parametrize("source", ["plain", "quantized", "quantized columnwise"])
def test_a_write_in_another_shape_reaches_all_elements(device, format, planes, way, source):
    take = SHAPES[way]
    t = make(format, planes, device)
    view = take(t)
    x = data(device, *SHAPE, seed=1, scale=1000.0)
    expected = FORMATS[format](**PLANES[planes])(x)
    if source == "plain":
        view.copy_(take(x))
    else:
        source_planes = FORMATS[format]()(take(x))
        # Quantizing these values again would give other codes.
        double_scales(source_planes)
        if source == "quantized columnwise" and format in SQUARE:
            source_planes.update_usage(rowwise=False)
        view.copy_(source_planes)
        # The codes move to other blocks, so they are quantized again.
        if way in CHANGED:
            take(x).copy_(source_planes.dequantize())
            expected = FORMATS[format](**PLANES[planes])(x)
        else:
            double_scales(expected)
    same_bytes(t, expected)
    agree(t, format)
    assert torch.equal(view.dequantize(), take(t.dequantize()))


@pytest.mark.parametrize("way", [*CHANGED, "rows", "as_strided"])
def test_planes_created_later_are_written_too(device, way):
    take = SHAPES[way] if way in SHAPES else PARTS[way][0]
    t = make("tensor", "rowwise", device)
    view = take(t)
    t.update_usage(columnwise=True)
    for source in (lambda x: x, FORMATS["tensor"]()):
        view.copy_(source(data(device, *view.shape, seed=1, scale=1000.0)))
        agree(t, "tensor")


@every_format
@every_plane
def test_every_kind_of_write_works_through_views(device, format, planes):
    """In-place operations and quantizers use the same path as copy_."""
    new = data(device, ROWS - 128, COLS, seed=2, scale=50.0)
    quantizer = FORMATS[format]()
    in_place = [
        lambda part: part.mul_(1000.0),
        lambda part: part.zero_(),
        lambda part: torch._foreach_mul_([part], 3.0),
    ]
    copies = [lambda part: part.quantize_(new), lambda part: quantizer.update_quantized(new, part)]
    for write in in_place + copies:
        t = make(format, planes, device)
        before = values(t)
        plain = t.dequantize()
        if write in copies:
            plain[128:] = new
        else:
            write(plain[128:])
        write(t[128:])
        after = values(t)
        # The smallest code of the largest scale, which may be twice the scale of the largest value.
        least = 2.0**-8 * plain.abs().max() / 448
        for value in after.values():
            torch.testing.assert_close(value[128:], plain[128:], rtol=0.13, atol=least)
        for name, value in after.items():
            if alone(t, (128, ROWS), (0, COLS)):
                assert torch.equal(value[:128], before[name][:128]), name
            else:
                torch.testing.assert_close(value[:128], before[name][:128], rtol=0, atol=least)
        agree(t, format)
        assert torch.equal(t[128:].dequantize(), t.dequantize()[128:])


@every_format
@every_plane
@pytest.mark.parametrize(
    "index",
    [
        150,
        slice(128, None),
        (5, 7),
        (150, slice(3, 30)),
        torch.tensor([3, 150]),
        (torch.tensor([3, 150]), torch.tensor([0, 7])),
    ],
    ids=str,
)
def test_item_assignment_writes_the_tensor(device, format, planes, index):
    t = make(format, planes, device)
    plain = t.dequantize()
    plain[index] = 7.0
    t[index] = 7.0
    torch.testing.assert_close(t.dequantize(), plain, rtol=0.13, atol=2e-3 * plain.abs().max())
    agree(t, format)
    vector = make("tensor", "both", device, 64)
    vector[3] = 100.0
    assert abs(vector.dequantize()[3] - 100.0) < 7.0


#: View operators for a matrix of SHAPE.
VIEWS = {
    "a column": lambda x: x[:, 3],
    "an element": lambda x: x[5, 7],
    "a row": lambda x: x[-1],
    "rows that cut blocks": lambda x: x[5:50],
    "columns that cut blocks": lambda x: x[:, 5:50],
    "a corner that cuts blocks": lambda x: x[70:90, 100:201],
    "narrow of narrow": lambda x: x.narrow(0, 3, 150).narrow(1, 7, 200).narrow(0, 1, 140),
    "steps": lambda x: x[::3, 1::2],
    "new dims": lambda x: x[None, :, None, 3:9],
    "unsqueeze": lambda x: x.unsqueeze(0),
    "unsqueeze at the end": lambda x: x.unsqueeze(-1),
    "squeeze": lambda x: x[:1].squeeze(0),
    "diagonal": lambda x: x.diagonal(),
    "diagonal off the middle": lambda x: x.diagonal(5),
    "unbind": lambda x: x.unbind(1)[4],
    "unbind rows": lambda x: x.unbind()[4],
    "a flat part": lambda x: x.view(-1)[77:12345],
    "a chunk of a flat view": lambda x: x.view(-1).chunk(7)[3],
    "a flat part as a matrix": lambda x: x.view(-1)[640:1280].view(4, 160),
    "columns of another matrix": lambda x: x.view(100, 640)[:, 17:400],
    "tensor_split": lambda x: x.tensor_split(3, 1)[1],
    "odd split": lambda x: x.split(33)[2],
    "movedim": lambda x: x.view(4, 50, 320).movedim(2, 0),
    "swapaxes": lambda x: x.view(4, 50, 320).swapaxes(0, 1),
    "middle dim": lambda x: x.view(4, 50, 320)[:, 3:7],
    "mT": lambda x: x.view(4, 50, 320).mT,
    "part of a transpose": lambda x: x.t()[5:50],
    "row of a transpose": lambda x: x.t()[5],
    "unflatten": lambda x: x.unflatten(1, (10, 32))[:, 4],
    "reshape": lambda x: x.reshape(400, 160)[3],
    "as_strided": lambda x: x.as_strided((7, 3), (5, 1), 333),
    "expand": lambda x: x[:1].expand(3, -1),
    "expand a column": lambda x: x[:, :1].expand(-1, 5),
    "unfold": lambda x: x.unfold(0, 3, 3),
    "expand_as": lambda x: x[3].expand_as(x[:7]),
}
#: Views of consecutive elements, which can be written.
WRITABLE = (
    "an element",
    "a row",
    "rows that cut blocks",
    "unsqueeze",
    "unsqueeze at the end",
    "squeeze",
    "unbind rows",
    "a flat part",
    "a chunk of a flat view",
    "a flat part as a matrix",
    "odd split",
    "reshape",
)

#: Writes through a view. The last ones also write a tensor that could be written.
WRITES = {
    "copy_": lambda view, other: view.copy_(torch.ones_like(view)),
    "copy_ of a quantized tensor": lambda view, other: view.copy_(view),
    "quantize_": lambda view, other: view.quantize_(torch.ones_like(view)),
    "fill_": lambda view, other: view.fill_(7.0),
    "zero_": lambda view, other: view.zero_(),
    "arithmetic": lambda view, other: view.mul_(2.0),
    "a random fill": lambda view, other: view.uniform_(),
    "item assignment": lambda view, other: view.__setitem__(..., 7.0),
    "a boolean mask": lambda view, other: view.__setitem__(torch.ones_like(view).bool(), 7.0),
    "masked_fill_": lambda view, other: view.masked_fill_(torch.ones_like(view).bool(), 7.0),
    "an alias": lambda view, other: view.detach().view_as(view).add_(1.0),
    "out=": lambda view, other: torch.add(torch.ones_like(view), 1.0, out=view),
    "foreach": lambda view, other: torch._foreach_mul_([other, view], 2.0),
    "foreach copy": lambda view, other: torch._foreach_copy_([other, view], [other * 2, view * 2]),
}


@every_format
@every_plane
@pytest.mark.parametrize("way", list(VIEWS))
def test_every_view_shows_the_values(device, format, planes, way):
    take = VIEWS[way]
    t = make(format, planes, device)
    plain = t.dequantize()
    view = take(t)
    assert isinstance(view, QuantizedTensor)
    expected = take(plain)
    assert (view.shape, view.stride()) == (expected.shape, expected.stride())
    assert view.storage_offset() == expected.storage_offset()
    assert torch.equal(view.dequantize(), expected.contiguous())
    assert torch.equal(view.detach() + 1, expected + 1)
    assert torch.equal(view.clone() * 1, expected)
    storages = {p.data.untyped_storage().data_ptr() for p in t.planes if p is not None}
    assert all(p.data.untyped_storage().data_ptr() in storages for p in view.planes if p)


@every_format
@every_plane
@pytest.mark.parametrize("way", WRITABLE)
def test_views_of_consecutive_elements_take_writes(device, format, planes, way):
    take = VIEWS[way]
    t = make(format, planes, device)
    before = {n: x.clone() for n, x in values(t).items()}
    take(t).fill_(7.0)
    agree(t, format)
    for name, value in values(t).items():
        changed = before[name]
        take(changed).fill_(7.0)
        assert torch.allclose(take(value), torch.full_like(take(value), 7.0), rtol=0.07)
        # The second plane is quantized again from the values of the rowwise one.
        error = (value - changed).abs()
        assert (error <= 0.14 * changed.abs() + 0.01 * changed.abs().max()).all()
    outside = torch.ones(SHAPE, dtype=torch.bool, device=device)
    reached = torch.zeros(SHAPE, dtype=torch.bool, device=device)
    take(reached).fill_(True)
    where = reached.nonzero()
    first = int(where[:, 0].min())
    last = int(where[:, 0].max())
    outside[block_ranges(t, (first, last + 1), (0, COLS))] = False
    for name, value in values(t).items():
        assert torch.equal(value[outside], before[name][outside]), "beyond the blocks of its rows"


@every_format
@every_plane
def test_a_copy_through_a_view_equals_that_of_plain_values(device, format, planes):
    """Compare element by element with a plain tensor, within the precision of the format."""
    for seed, way in enumerate(WRITABLE):
        take = VIEWS[way]
        t = FORMATS[format](**PLANES[planes])(torch.zeros(SHAPE, device=device))
        plain = torch.zeros(SHAPE, device=device)
        generator = torch.Generator().manual_seed(seed)
        src = torch.rand(take(plain).shape, generator=generator).to(device) + 1
        take(t).copy_(src)
        take(plain).copy_(src)
        for name, value in values(t).items():
            assert torch.allclose(value, plain, rtol=0.07), (way, name)
        take(t).copy_(take(FORMATS[format](**PLANES[planes])(plain * 2)))
        for name, value in values(t).items():
            assert torch.allclose(value, plain * 2, rtol=0.14), (way, name)


@every_format
@every_plane
@pytest.mark.parametrize("way", [way for way in VIEWS if way not in WRITABLE])
@pytest.mark.parametrize("write", list(WRITES))
def test_writes_through_other_views_are_refused(device, format, planes, way, write):
    """The error comes before anything is written, also to another tensor of a list."""
    t = make(format, planes, device)
    other = make(format, planes, device, seed=1)
    before = t.clone(), other.clone()
    view = VIEWS[way](t)
    with pytest.raises(NotImplementedError, match=r"consecutive elements\. Write slices"):
        WRITES[write](view, other)
    same_bytes(t, before[0])
    same_bytes(other, before[1])


@every_format
@every_plane
def test_item_assignment_through_other_views_is_refused(device, format, planes):
    t = make(format, planes, device)
    before = t.clone()
    for index in ((slice(None), 3), (..., 0), slice(None, None, 2), (slice(128, None), slice(9))):
        with pytest.raises(NotImplementedError, match="consecutive elements"):
            t[index] = 7.0
        with pytest.raises(NotImplementedError, match="consecutive elements"):
            t[index] *= 2.0
    with pytest.raises(NotImplementedError, match="consecutive elements"):
        t.t()[3:5] = 7.0
    with pytest.raises(NotImplementedError, match="consecutive elements"):
        torch.as_strided(t, (7, 3), (COLS, 1), 5).zero_()
    same_bytes(t, before)


@every_format
@every_plane
@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__(x > 0.5, 7.0),
        lambda x: x.masked_fill_(x > 0.5, 7.0),
        lambda x: x.index_fill_(1, torch.tensor([3, 5], device=x.device), 7.0),
        lambda x: x.scatter_(1, torch.tensor([[3], [5]], device=x.device), 7.0),
        lambda x: torch.mul(x, 3.0, out=x),
        lambda x: x.reshape(2, -1)[1].mul_(3.0),
        lambda x: torch.as_strided(x, (8, COLS), (COLS, 1), 3 * COLS).mul_(3.0),
    ],
    ids=["mask", "masked_fill_", "index_fill_", "scatter_", "out", "reshape", "as_strided"],
)
def test_operators_that_write_some_elements_reach_the_tensor(device, format, planes, write):
    t = make(format, planes, device)
    plain = t.dequantize()
    write(plain)
    write(t)
    torch.testing.assert_close(t.dequantize(), plain, rtol=0.13, atol=2e-3 * plain.abs().max())
    agree(t, format)


@every_format
@every_plane
def test_dcp_loads_pieces_of_columns(device, format, planes):
    """Tensor parallelism shards columns, and a checkpoint may have been saved with other sizes."""
    t = make(format, planes, device)
    plain = t.dequantize()
    shard = t.__get_tensor_shard__()
    new = data(device, 100, 128, seed=1)
    shard.narrow(0, 32, 100).narrow(1, 64, 128).detach().copy_(new)
    plain[32:132, 64:192] = new
    torch.testing.assert_close(t.dequantize(), plain, rtol=0.13, atol=2e-3 * plain.abs().max())
    agree(t, format)
    before = t.clone()
    with pytest.raises(NotImplementedError, match="consecutive elements"):
        shard.t().copy_(torch.ones(COLS, ROWS, device=device))
    same_bytes(t, before)


def test_results_of_a_transposed_matrix_have_its_strides(device):
    """As for a plain tensor, on which kernels such as GEMMs are chosen by strides."""
    x = data(device, *SHAPE)
    t = make("tensor", "rowwise", device)
    assert (t.t() + 1).stride() == (x.t() + 1).stride()


def test_a_reshape_that_copies_gives_a_plain_tensor(device):
    """A write to it does not reach the tensor, as for plain tensors."""
    t = make("128x128", "both", device)
    for copied in (t.t().reshape(-1), t[:, 1:].reshape(-1), t.t().contiguous(), t[:, 1:].flatten()):
        assert type(copied) is torch.Tensor


def test_every_view_operator_of_aten_has_a_handler():
    """By its schema, each operator of torch must be a view or refused, never a copy."""
    from fp8rs.tensor import collectives, fallback
    from fp8rs.tensor.aten import HANDLERS

    count = 0
    for name in dir(torch.ops.aten):
        packet = getattr(torch.ops.aten, name)
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            continue
        for overload in packet.overloads():
            op = getattr(packet, overload)
            arguments = op._schema.arguments
            returns = op._schema.returns
            if not arguments or "Tensor" not in str(arguments[0].type):
                continue
            writes = any(a.alias_info is not None and a.alias_info.is_write for a in arguments)
            aliases = any(r.alias_info is not None for r in returns)
            if not writes and not aliases:
                continue
            count += 1
            handler = HANDLERS[op]
            if writes:
                assert handler in (
                    fallback.dequantized_call,
                    fallback.foreach_call,
                    *WRITE_HANDLERS,
                ), op
            else:
                assert handler in VIEW_HANDLERS, op
    assert count > 300
    assert HANDLERS[torch.ops.aten.view.dtype] is VIEW_HANDLERS[0]
    for op in (torch.ops.aten.set_.source_Tensor, torch.ops.aten.resize_.default):
        assert HANDLERS[op] is refuse
    for name in dir(torch.ops.c10d):
        packet = getattr(torch.ops.c10d, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            assert HANDLERS[packet.default] is collectives.collective


@every_format
def test_views_as_other_dtypes_are_refused(device, format):
    t = make(format, "both", device)
    with pytest.raises(TypeError, match=r"bytes of a quantized tensor.*rowwise\.data"):
        t.view(torch.int32)


@every_format
@every_plane
def test_flat_views_share_memory_and_receive_writes(device, format, planes):
    """FSDP2 keeps a flat view of each shard.

    It must not be a second copy, and FSDP2 writes through it.
    """
    t = make(format, planes, device)
    flat = t.view(-1)
    assert type(flat) is type(t)
    assert flat.is_contiguous()
    back = flat.view(SHAPE)
    for name in values(t):
        assert getattr(back, name).data.data_ptr() == getattr(t, name).data.data_ptr()
    other = make(format, planes, device, seed=1)
    # This copies codes unchanged.
    flat.copy_(other.view(-1))
    same_bytes(t, other)
    flat[: 128 * COLS].zero_()
    if format not in ("tensor", "row"):
        same_values(values(t[128:]), values(other[128:]))
    assert not t[:128].dequantize().any()
    flat[128 * COLS :].view(72, COLS).copy_(other[:72])
    expected = other[:72].dequantize()
    error = (t[128:].dequantize() - expected).abs()
    assert (error <= 0.14 * expected.abs() + 0.01 * expected.abs().max()).all()


@every_format
@every_plane
def test_views_of_empty_parts(device, format, planes):
    t = make(format, planes, device)
    before = values(t)
    for take in (lambda x: x[3:3], lambda x: x[:, 5:5], lambda x: x.view(-1)[7:7]):
        part = take(t)
        assert part.dequantize().shape == part.shape == take(torch.zeros(SHAPE)).shape
        part.copy_(torch.zeros(part.shape, device=device))
        part.copy_(part.clone())
        part.zero_()
    same_values(values(t), before)
    for shape in ((0, 64), (64, 0)):
        empty = make(format, planes, device, *shape)
        assert empty.view(-1).dequantize().shape == (0,)
        empty.view(-1).fill_(1.0)
        empty[:0].zero_()
        empty.copy_(empty.view(-1).view(shape))


#: Invalid views.
IMPOSSIBLE = {
    "transpose": lambda x: x.transpose(5, 4),
    "permute beyond": lambda x: x.permute(3, -2),
    "permute twice": lambda x: x.permute(1, -1),
    "view of two unknowns": lambda x: x.view(-1, -1),
    "view of negative sizes": lambda x: x.view(-2, -x.numel() // 2),
    "as_strided of a negative size": lambda x: x.as_strided((-2,), (1,), 5),
    "as_strided with a stride too few": lambda x: x.as_strided((2, 3), (1,), 0),
    "split": lambda x: x.split(4, 7),
    "narrow": lambda x: x.narrow(0, ROWS - 10, 20),
    "select": lambda x: x.select(0, ROWS),
}


@pytest.mark.parametrize("way", IMPOSSIBLE)
def test_invalid_views_raise_as_for_a_plain_tensor(way):
    t = make("tensor", "both", torch.device("cpu"))
    with pytest.raises((RuntimeError, IndexError)) as plain:
        IMPOSSIBLE[way](t.dequantize())
    with pytest.raises(plain.type):
        IMPOSSIBLE[way](t)
