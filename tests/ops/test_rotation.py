"""fp8rs._rotate: rotary position embeddings."""

import pytest
import torch

from cases import data, each_dtype
from oracle.compare import canonical, same

ops = torch.ops.fp8rs

#: (batch, length, heads, channels), with halves of whole vectors and of other sizes.
SHAPES = [(2, 24, 4, 128), (1, 1, 1, 2), (3, 7, 3, 10), (1, 33, 2, 64), (2, 5, 1, 8), (0, 3, 2, 4)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
both_directions = pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])


def make(device, shape, dtype, shared):
    """Return tokens, and cosines and sines that differ between the halves of a head.

    With ``shared``, all rows of the batch have the same ones.
    """
    batch, length, heads, channels = shape
    x = data(device, batch, length, heads * channels, dtype=dtype)
    positions = length if shared else batch * length
    cos, sin = data(device, 2, positions, channels, seed=1)
    return x, cos, sin


def expected_rotation(x, cos, sin, back):
    """Compute the definition in float32, one rounding after each operation."""
    channels = cos.shape[1]
    heads = x.cpu().float().reshape(x.shape[:-1].numel(), x.shape[-1] // channels, channels)
    periods = len(heads) // max(len(cos), 1)
    cos = cos.cpu().repeat(periods, 1).unsqueeze(1)
    sin = sin.cpu().repeat(periods, 1).unsqueeze(1)
    first, second = heads.chunk(2, -1)
    first_sin, second_sin = sin.chunk(2, -1)
    if back:
        sine_terms = torch.cat((second * second_sin, -(first * first_sin)), -1)
    else:
        sine_terms = torch.cat((-(second * first_sin), first * second_sin), -1)
    return canonical((heads * cos + sine_terms).to(x.dtype)).reshape(x.shape)


@each_shape
@each_dtype
@both_directions
@pytest.mark.parametrize("shared", [True, False], ids=["one rotation", "one for each row"])
def test_bytes_equal_the_definition(device, shape, dtype, back, shared):
    x, cos, sin = make(device, shape, dtype, shared)
    got = ops._rotate(x, cos, sin, back)
    assert got.is_contiguous()
    assert same(got, expected_rotation(x, cos, sin, back))


@each_dtype
@both_directions
def test_special_values_equal_the_definition(device, dtype, back):
    special = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-40, 3e38])
    x = torch.cartesian_prod(special, special).to(device, dtype).view(1, 4, 32)
    cos, sin = data(device, 2, 2, 16, seed=1)
    sin[0, :3] = torch.tensor([torch.nan, torch.inf, 0.0])
    assert same(ops._rotate(x, cos, sin, back), expected_rotation(x, cos, sin, back))


@each_dtype
def test_strides_and_alignments_do_not_change_the_bytes(device, dtype):
    """Queries may be columns of a wider matrix, and gradients may have other strides."""
    wide = data(device, 2, 12, 304, dtype=dtype)
    cos, sin = data(device, 2, 12, 64, seed=1)
    for x in (
        wide[..., 8:264],
        wide[..., 1:257],
        wide[..., ::2][..., :128],
        wide[..., :64].transpose(0, 1),
    ):
        assert same(ops._rotate(x, cos, sin, False), expected_rotation(x, cos, sin, False))
    unaligned = torch.empty(12 * 64 + 1, device=device)[1:].view(12, 64).copy_(cos)
    x = wide[..., 8:264]
    assert same(ops._rotate(x, unaligned, sin, True), expected_rotation(x, cos, sin, True))


X, COS = torch.zeros(2, 6, 16), torch.ones(6, 8)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ((X.double(), COS, COS), TypeError, "x has dtype float64"),
        ((X, COS.bfloat16(), COS), TypeError, "cos has dtype bfloat16"),
        ((X, COS.t(), COS), ValueError, "cos is strided"),
        ((X, COS, COS[:3]), ValueError, r"sin has shape \(3, 8\)"),
        ((X, COS[:, :5].contiguous(), COS[:, :5].contiguous()), ValueError, "cos is of 5 channels"),
        ((X[..., :12], COS, COS), ValueError, "an even number that divides the 12 columns of x"),
        ((X, COS[:5], COS[:5]), ValueError, "cos is of 5 positions"),
        ((X, COS[:0], COS[:0]), ValueError, "a number that divides the 12 rows of x"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ops._rotate(*arguments, False)
