"""Where shards lie and what is gathered of them, with no ranks: both are pure."""

from itertools import pairwise

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fp8rs.fsdp.layout import AllGatherLayout
from fp8rs.model.shard_spec import ShardSpec
from fp8rs.quantize.cast import quantize_planes
from fp8rs.quantize.formats import E4M3, E5M2, FORMATS
from fp8rs.quantize.planes import Plane
from fp8rs.quantize.spec import QuantSpec
from oracle.compare import same

examples = settings(max_examples=80, derandomize=True, database=None, deadline=None)

rows = st.integers(1, 300)
cols = st.integers(1, 140)
counts = st.integers(1, 5)


def placement(ranks, rank, shape, dim=0, full_shape=None, origin=(0, 0)):
    return ShardSpec("cpu", (), (), ranks, rank, dim, shape, full_shape or shape, origin)


def length(p):
    """Return the length of a shard along the sharded dimension."""
    return max(min(p.padded_length, p.unsharded_shape[p.shard_dim] - p.shard_offset), 0)


def elements(p):
    """The numbers of a shard's elements."""
    size = list(p.unsharded_shape)
    size[p.shard_dim] = length(p)
    (first,) = p.element_offsets
    return range(first, first + size[0] * size[1])


@examples
@given(rows, cols, counts, st.integers(0, 1))
def test_shards_are_a_whole_weight_in_order(rows, cols, ranks, dim):
    shards = [placement(ranks, rank, (rows, cols), dim) for rank in range(ranks)]
    assert shards[0].shard_offset == 0
    assert all(a.shard_offset + length(a) == b.shard_offset for a, b in pairwise(shards))
    assert shards[-1].shard_offset + length(shards[-1]) == (rows, cols)[dim]
    assert all(length(p) <= p.padded_length for p in shards)
    assert length(shards[0]) == shards[0].padded_length, "the first is the longest"


@examples
@given(rows, cols, counts, counts, st.integers(0, 1), st.integers(0, 1))
def test_no_two_elements_have_one_number(rows, cols, parts, ranks, tensor_dim, dim):
    """With tensor parallelism along one dimension, and FSDP's shards of each part."""
    shape = (rows, cols)
    numbers = []
    chunk = -(-shape[tensor_dim] // parts)
    for start in range(0, shape[tensor_dim], chunk):
        part_shape = list(shape)
        origin = [0, 0]
        part_shape[tensor_dim] = min(chunk, shape[tensor_dim] - start)
        origin[tensor_dim] = start
        for rank in range(ranks):
            p = placement(ranks, rank, shape, dim, tuple(part_shape), tuple(origin))
            numbers.extend(elements(p))
    if tensor_dim == dim or dim == 0:
        assert sorted(numbers) == list(range(rows * cols))


def by_rows(plane):
    """Return a plane with contiguous scales."""
    if plane is None:
        return None
    scale = plane.scale.clone(memory_format=torch.contiguous_format)
    return Plane(plane.data, scale, plane.format)


def cut(plane, p, height, dim):
    """Return a shard's rows or columns of a whole weight's plane, with their scales."""
    start = p.shard_offset
    end = p.shard_offset + length(p)
    data = plane.data.view(torch.uint8).narrow(dim, start, end - start).view(plane.data.dtype)
    if plane.format.per_tensor:
        return Plane(data, plane.scale, plane.format)
    first = start // height
    count = -(-end // height) - first if end > start else 0
    scale = plane.scale.view(torch.uint8 if plane.scale.itemsize == 1 else torch.float32)
    first = min(first, scale.shape[dim])
    scale = scale.narrow(dim, first, count).view(plane.scale.dtype)
    return Plane(data, scale, plane.format)


@examples
@given(
    rows,
    cols,
    counts,
    st.sampled_from(list(FORMATS)),
    st.sampled_from([E4M3, E5M2]),
)
@example(rows=129, cols=1, ranks=2, name="1x128", fp8_dtype=E4M3)  # fp32 scales of one column
def test_what_is_gathered_is_read_as_the_whole_weights_planes(rows, cols, ranks, name, fp8_dtype):
    format = FORMATS[name]
    layout = AllGatherLayout(format, fp8_dtype)
    x = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * cols)).exp()
    row, col = quantize_planes(QuantSpec(format, fp8_dtype), x, True, layout.columnwise)
    # Scales of 1x128 are stored by columns for its GEMM. No recipe has such a format for weights.
    row = by_rows(row)
    col = by_rows(col)
    sent = []
    for rank in range(ranks):
        p = placement(ranks, rank, (rows, cols))
        row_part = cut(row, p, format.block[0], 0)
        other = cut(col, p, layout.height, 1) if layout.columnwise else None
        sent.append(layout.pack((row_part, other), p))
        assert [t.numel() for t in sent[-1]] == [t.numel() for t in sent[0]]
        assert sum(t.nbytes for t in sent[-1]) == layout.nbytes(p)
    outputs = [torch.cat(parts) for parts in zip(*sent, strict=True)]
    scale = row.scale if format.per_tensor else None
    gathered_planes = layout.unpack(outputs, p, scale)
    assert layout.columnwise == (gathered_planes[1] is not None)
    for plane, gathered in zip((row, col), gathered_planes, strict=True):
        if gathered is not None:
            assert same(gathered.data, plane.data)
            assert same(gathered.scale, plane.scale)
