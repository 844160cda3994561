"""Writes through views of quantized tensors, in every format: they land, in every plane.

Where the part that is written has its blocks to itself, nothing else changes; where it shares a
scale with other elements, all are quantized again. Codes are copied as they are where they fit.
"""

import pytest
import torch

from fp8rs.tensor.quantized import QuantizedTensor
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
    values,
)

ROWS, COLS = SHAPE

#: Ways to a part: what takes it, and its rows and columns.
PARTS = {
    "rows": (lambda x: x[:128], (0, 128), (0, COLS)),
    "the last rows": (lambda x: x[128:], (128, ROWS), (0, COLS)),
    "rows that end in a block": (lambda x: x[128:136], (128, 136), (0, COLS)),
    "narrow": (lambda x: x.narrow(0, 0, 128), (0, 128), (0, COLS)),
    "columns": (lambda x: x[:, 128:256], (0, ROWS), (128, 256)),
    "the last columns": (lambda x: x[:, 256:], (0, ROWS), (256, COLS)),
    "a corner": (lambda x: x[128:, 256:], (128, ROWS), (256, COLS)),
    "split": (lambda x: x.split(128)[1], (128, ROWS), (0, COLS)),
    "split with sizes": (lambda x: x.split([128, 72])[0], (0, 128), (0, COLS)),
    "chunk of columns": (lambda x: x[:, :256].chunk(2, 1)[1], (0, ROWS), (128, 256)),
    "as_strided": (
        lambda x: torch.as_strided(x, (72, COLS), (COLS, 1), 128 * COLS),
        (128, ROWS),
        (0, COLS),
    ),
    "detached": (lambda x: x[128:].detach(), (128, ROWS), (0, COLS)),
    "a view of a part": (lambda x: x[:128].view(4, 32, COLS), (0, 128), (0, COLS)),
    "a part of a view": (lambda x: x.view(25, 8, COLS)[16:], (128, ROWS), (0, COLS)),
    "a part of the transpose": (lambda x: x.t()[128:256], (0, ROWS), (128, 256)),
}
#: Ways to all elements in another shape. The last two change the matrix.
SHAPES = {
    "view": lambda x: x.view(2, 100, COLS),
    "transpose": lambda x: x.t(),
    "two transposes": lambda x: x.t().t(),
    "detach": lambda x: x.detach(),
    "flat": lambda x: x.view(-1),
    "another matrix": lambda x: x.view(100, 2 * COLS),
    "flat and back": lambda x: x.view(-1).view(SHAPE),
    "flat, transposed": lambda x: x.view(100, 2 * COLS).t(),
}
CHANGED = ("flat", "another matrix", "flat and back", "flat, transposed")


def alone(t: QuantizedTensor, rows: tuple[int, int], cols: tuple[int, int]) -> bool:
    """Whether a part of a matrix shares no block of any plane with the rest of it."""
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
    """Square formats' planes hold the same codes."""
    if format in SQUARE and len(values(t)) == 2:
        assert torch.equal(bits(t.rowwise.data), bits(t.columnwise.data.t()))
        assert torch.equal(t.dequantize(), values(t)["columnwise"])


@every_format
@every_plane
@pytest.mark.parametrize("way", list(PARTS))
@pytest.mark.parametrize("source", ["plain", "quantized"])
def test_a_write_to_a_part(device, format, planes, way, source):
    take, rows, cols = PARTS[way]
    t = make(format, planes, device)
    before, plain = values(t), t.dequantize()
    if way == "a part of the transpose":  # which reads the other plane
        plain = before.get("columnwise", plain)
    part = take(t)
    assert isinstance(part, QuantizedTensor)
    src = data(device, *part.shape, seed=1, scale=1000.0)
    if source == "quantized":
        src = FORMATS[format]()(src)
    part.copy_(src)
    if alone(t, rows, cols):
        for name, written in values(part).items():
            here = name
            if way == "a part of the transpose":
                here = "rowwise" if name == "columnwise" else "columnwise"
            take(before[here]).copy_(written)
        same_values(values(t), before)
        if source == "plain":
            usage = {name: name in values(part) for name in PLANES["both"]}
            same_bytes(part.clone(), FORMATS[format](**usage)(src))
        else:
            for name in values(part):
                assert torch.equal(bits(getattr(part, name).data), bits(getattr(src, name).data))
    else:
        take(plain).copy_(src.dequantize() if source == "quantized" else src)
        same_bytes(t, FORMATS[format](**PLANES[planes])(plain))
    same_values(values(part), {n: x.contiguous() for n, x in values(take(t)).items()})
    agree(t, format)


@every_format
@every_plane
@pytest.mark.parametrize("way", list(SHAPES))
@pytest.mark.parametrize("source", ["plain", "quantized", "quantized columnwise"])
def test_a_write_to_all_elements_in_another_shape(device, format, planes, way, source):
    take = SHAPES[way]
    t = make(format, planes, device)
    if way in CHANGED and (format != "tensor" or planes == "columnwise"):
        with pytest.raises(ValueError, match="rowwise" if format == "tensor" else "cut the blocks"):
            take(t)
        return
    view = take(t)
    x = data(device, *SHAPE, seed=1, scale=1000.0)
    whole = FORMATS[format](**PLANES[planes])(x)
    if source == "plain":
        view.copy_(take(x))
    else:
        both = FORMATS[format]()(take(x))
        double_scales(both)  # which quantizing these values again would not give
        if source == "quantized columnwise" and format in SQUARE:
            both.update_usage(rowwise=False)
        view.copy_(both)
        double_scales(whole)
    same_bytes(t, whole)
    agree(t, format)
    if format in SQUARE or planes != "both":
        assert torch.equal(view.dequantize(), take(t.dequantize()))


@pytest.mark.parametrize("way", [*SHAPES, "rows", "columns"])
def test_planes_that_a_view_made_for_itself_follow(device, way):
    take = SHAPES[way] if way in SHAPES else PARTS[way][0]
    t = make("tensor", "rowwise", device)
    view = take(t)
    view.update_usage(rowwise=True, columnwise=True)
    for source in (lambda x: x, FORMATS["tensor"]()):
        view.copy_(source(data(device, *view.shape, seed=1, scale=1000.0)))
        agree(view, "tensor")
        assert torch.equal(view.dequantize(), take(t.dequantize()).contiguous())


@pytest.mark.parametrize("way", [*CHANGED, "rows", "columns", "as_strided"])
def test_planes_that_the_whole_makes_later_are_written_too(device, way):
    take = SHAPES[way] if way in SHAPES else PARTS[way][0]
    t = make("tensor", "rowwise", device)
    view = take(t)
    t.update_usage(columnwise=True)
    for source in (lambda x: x, FORMATS["tensor"]()):
        view.copy_(source(data(device, *view.shape, seed=1, scale=1000.0)))
        agree(t, "tensor")


@every_format
@every_plane
def test_other_writes_through_views(device, format, planes):
    """In-place operations, quantizers and item assignment go the way of copy_."""
    for write in (
        lambda part: part.mul_(1000.0),
        lambda part: part.zero_(),
        lambda part: torch._foreach_mul_([part], 3.0),
        lambda part: part.quantize_(data(device, *part.shape, seed=2, scale=50.0)),
        lambda part: FORMATS[format]().update_quantized(
            data(device, *part.shape, seed=2, scale=50.0), part
        ),
    ):
        t = make(format, planes, device)
        rest = t[:128].dequantize()
        write(t[128:])
        torch.testing.assert_close(t[:128].dequantize(), rest, rtol=0.07, atol=rest.abs().max() / 2)
        agree(t, format)
        assert torch.equal(t[128:].dequantize(), t.dequantize()[128:])


@every_format
@every_plane
@pytest.mark.parametrize(
    "index",
    [
        150,
        (slice(128, None), slice(None, 128)),
        (slice(None), 3),
        (Ellipsis, 0),
        (5, 7),
        torch.tensor([3, 150]),
        slice(None, None, 2),
    ],
    ids=str,
)
def test_item_assignment_lands(device, format, planes, index):
    t = make(format, planes, device)
    plain = t.dequantize()
    plain[index] = 7.0
    t[index] = 7.0
    torch.testing.assert_close(t.dequantize(), plain, rtol=0.13, atol=2e-3 * plain.abs().max())
    agree(t, format)
    vector = make("tensor", "both", device, 64)
    vector[3] = 100.0
    assert vector.dequantize()[3] == 100.0


@every_format
@every_plane
def test_what_would_cut_blocks_is_refused(device, format, planes):
    t = make(format, planes, device)
    for axis, take in enumerate((lambda x: x[5:50], lambda x: x[:, 5:50])):
        sizes = {getattr(t, n).format.block[axis ^ (n == "columnwise")] for n in values(t)}
        if max(sizes) > 1:
            with pytest.raises(ValueError, match=f"would cut blocks.*{max(sizes)}"):
                take(t)
        else:
            same_values(values(take(t)), {n: take(x) for n, x in values(t).items()})
    deep = make(format, planes, device, 4, 32, 64)
    if format == "tensor":
        if planes != "columnwise":
            assert torch.equal(deep[:, 3:7].dequantize(), deep.dequantize()[:, 3:7])
    else:
        with pytest.raises(ValueError, match="no range of rows or columns"):
            deep[:, 3:7]
