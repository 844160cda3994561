"""Operators that quantize values which they compute: norms and gated activations."""

from __future__ import annotations

import pytest
import torch

from cases import each_direction, each_dtype, each_format, scalar
from oracle import activations, norms, tensorwise
from oracle.compare import codes, same
from oracle.elements import E4M3, E5M2

ops = torch.ops.fp8rs
each_norm = pytest.mark.parametrize("centered", [False, True], ids=["RMSNorm", "LayerNorm"])
each_activation = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])

#: Whole tiles, odd sizes, a long row, rows with room for one or none in a block, and no rows.
SHAPES = [(128, 256), (48, 136), (7, 33), (16, 4096), (3, 9000), (2, 16392), (1, 1), (0, 64)]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))


def make(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * torch.logspace(-2, 1, shape[-1])
    return x.to(dtype)


def check_planes(row, col, scale, values, fp8_dtype, scaling=None, **rule):
    """Compare planes with the quantization of values by the definition of per-tensor scales."""
    expected_scale = scaling
    if scaling is None:
        expected_scale = tensorwise.scale_from_amax(tensorwise.amax(values), fp8_dtype, **rule)
    assert same(scale, expected_scale)
    expected = tensorwise.quantize(values, expected_scale, fp8_dtype)
    if row.dim() > 1:
        assert torch.equal(codes(row), expected.view(row.shape))
    if col.dim() > 1:
        assert torch.equal(codes(col), expected.flatten(0, -2).t())


@each_shape
@each_dtype
@each_format
@each_norm
def test_norm_matches_its_definition(device, shape, dtype, fp8_dtype, centered):
    x = make(shape, dtype)
    weight = make(shape[1:], dtype, 1)
    bias = make(shape[1:], dtype, 2) if centered else None
    moved = [None if t is None else t.to(device) for t in (x, weight, bias)]
    row, col, scale, mean, rstd = ops._quantize_norm(*moved, centered, 1e-5, fp8_dtype, True, True)
    values, expected_mean, expected_rstd = norms.norm(x, weight, bias, centered, 1e-5)
    assert same(rstd, expected_rstd)
    assert same(mean, expected_mean) if centered else mean.shape == (0,)
    check_planes(row, col, scale, values, fp8_dtype)


@each_direction
@each_norm
def test_norm_without_parameters_and_with_a_scale_rule(device, rowwise, columnwise, centered):
    x = make((64, 128), torch.bfloat16)
    rule = {"power_2_scale": True, "amax_epsilon": 100.0}
    row, col, scale, _, _ = ops._quantize_norm(
        x.to(device), None, None, centered, 0.5, E4M3, rowwise, columnwise, *rule.values()
    )
    assert (row.dim() > 1, col.dim() > 1) == (rowwise, columnwise)
    values, _, _ = norms.norm(x, None, None, centered, 0.5)
    check_planes(row, col, scale, values, E4M3, **rule)


@pytest.mark.parametrize("shape", [(32, 256), (5, 9)])
def test_norm_with_a_delayed_scale_records_the_amax(device, shape):
    x = make(shape, torch.bfloat16)
    values, _, _ = norms.norm(x, None, None, False, 1e-5)
    for slot, infinite in ((0.0, False), (1e6, False), (2.0, True)):
        if infinite:
            x[1, 3] = torch.inf
        delayed_scale = scalar(0.01, device)
        amax = scalar(slot, device)
        row, col, scale, _, _ = ops._quantize_norm(
            x.to(device), None, None, False, 1e-5, E4M3, True, True, scale=delayed_scale, amax=amax
        )
        if infinite:
            assert scale.isnan() and amax == 2.0
        else:
            check_planes(row, col, scale, values, E4M3, torch.tensor(0.01))
            assert amax.item() == max(slot, tensorwise.amax(values).item())


@each_norm
def test_norm_of_any_strides_and_dimensions(device, centered):
    x = make((6, 8, 128), torch.bfloat16)
    weight = make((128,), torch.bfloat16, 1)
    expected, _, rstd = norms.norm(x.flatten(0, 1), weight, None, centered, 1e-5)
    wide = torch.zeros(6, 8, 131, dtype=x.dtype)
    wide[..., 2:130] = x
    views = {
        "contiguous": x.to(device),
        "rows with gaps": wide.to(device)[..., 2:130],
        "transposed": x.movedim(-1, 0).contiguous().to(device).movedim(0, -1),
    }
    for name, view in views.items():
        row, col, scale, _, got_rstd = ops._quantize_norm(
            view, weight.to(device), None, centered, 1e-5, E4M3, True, True
        )
        assert row.shape == x.shape and got_rstd.shape == (6, 8, 1), name
        assert same(got_rstd, rstd.view(6, 8, 1)), name
        check_planes(row, col, scale, expected.view(x.shape), E4M3)


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [256, 4096, 4104, 8192, 8200, 16384, 16392, 1001])
@pytest.mark.parametrize("gap", [0, 24])
@pytest.mark.parametrize("parameters", ["weight", "weight and bias", "none"])
@pytest.mark.parametrize("is_delayed", [False, True])
@each_dtype
@each_norm
def test_norm_of_more_rows_than_blocks_equals_the_cpu(
    cols, gap, parameters, is_delayed, dtype, centered
):
    """A block takes several rows, and requests the next ones while it computes."""

    def run(device):
        x = wide.to(device)[:, :cols]
        weight = make((cols,), dtype, 1).to(device) if "weight" in parameters else None
        bias = make((cols,), dtype, 2).to(device) if "bias" in parameters else None
        delayed = {}
        if is_delayed:
            delayed = {"scale": scalar(0.01, device), "amax": scalar(0.0, device)}
        planes = ops._quantize_norm(x, weight, bias, centered, 1e-5, E4M3, True, True, **delayed)
        return [*planes, *delayed.values()]

    wide = make((2000, cols + gap), dtype)
    for got, expected in zip(run("cuda"), run("cpu"), strict=True):
        assert same(got, expected)


@each_norm
def test_norm_of_nan_and_infinity(device, centered):
    x = make((16, 64), torch.float32)
    x[3, 5] = torch.nan
    x[7, 1] = torch.inf
    row, col, scale, mean, rstd = ops._quantize_norm(
        x.to(device), None, None, centered, 1e-5, E4M3, True, True
    )
    values, expected_mean, expected_rstd = norms.norm(x, None, None, centered, 1e-5)
    assert torch.equal(rstd.cpu().isnan(), expected_rstd.isnan())
    assert not centered or torch.equal(mean.cpu().isnan(), expected_mean.isnan())
    check_planes(row, col, scale, values, E4M3)


def glu_values(activation, gate, up, dy=None):
    """Return the product, or the gradients of gate and up."""
    h = torch.cat([gate.flatten(0, -2), up.flatten(0, -2)], 1)
    if dy is None:
        return activations.gated(activation, h).view(gate.shape)
    gradients = activations.gated(activation, h, dy.flatten(0, -2))
    return [gradient.reshape(gate.shape) for gradient in gradients.chunk(2, 1)]


@each_shape
@each_dtype
@each_format
@each_activation
def test_glu_matches_its_definition(device, shape, dtype, fp8_dtype, activation):
    gate = make(shape, dtype)
    up = make(shape, dtype, 1)
    row, col, scale = ops._quantize_glu(
        gate.to(device), up.to(device), activation, fp8_dtype, True, True
    )
    check_planes(row, col, scale, glu_values(activation, gate, up), fp8_dtype)


@each_shape
@each_dtype
@each_activation
def test_gradients_of_glu_match_their_definition(device, shape, dtype, activation):
    tensors = [make(shape, dtype, seed) for seed in range(3)]
    moved = [t.to(device) for t in tensors]
    results = ops._quantize_glu_backward(*moved, activation, E5M2, True, True)
    for planes, values in zip(
        (results[:3], results[3:]), glu_values(activation, *tensors), strict=True
    ):
        check_planes(*planes, values, E5M2)


@pytest.mark.parametrize("shape", [(32, 256), (5, 9), (144, 392), (2, 9000)])
@pytest.mark.parametrize("is_split", [False, True])
@each_dtype
@each_activation
def test_glu_with_delayed_scales_records_the_amaxes(device, shape, is_split, dtype, activation):
    gate, up, dy = (make(shape, dtype, seed) for seed in range(3))
    moved = [t.to(device) for t in (gate, up, dy)]
    if is_split:
        # Gate and up are halves of one matrix, as after one GEMM for both.
        moved[:2] = torch.cat(moved[:2], 1).chunk(2, 1)
    scales = [scalar(value, device) for value in (0.5, 0.25, 2.0)]
    amaxes = [scalar(0.0, device) for _ in scales]
    product = ops._quantize_glu(
        *moved[:2], activation, E4M3, True, True, scale=scales[0], amax=amaxes[0]
    )
    delayed = (scales[1], amaxes[1], scales[2], amaxes[2])
    gradients = ops._quantize_glu_backward(
        *moved, activation, E5M2, True, True, False, 0.0, *delayed
    )

    values = [glu_values(activation, gate, up), *glu_values(activation, gate, up, dy)]
    results = (product, gradients[:3], gradients[3:])
    formats = (E4M3, E5M2, E5M2)
    for planes, value, scale, amax, fp8_dtype in zip(
        results, values, scales, amaxes, formats, strict=True
    ):
        check_planes(*planes, value, fp8_dtype, scale.cpu())
        assert same(amax, tensorwise.amax(value))


@pytest.mark.parametrize("rowwise, columnwise", [(True, False), (False, True), (True, True)])
def test_a_gradient_that_is_not_finite_keeps_its_delayed_amax(device, rowwise, columnwise):
    """The scale that it reports is NaN. The other gradient is quantized as usual."""
    gate, up, dy = (make((64, 128), torch.bfloat16, seed) for seed in range(3))
    up[5, 7] = torch.inf  # the gradient of gate is infinite there
    scales = [scalar(value, device) for value in (0.25, 0.5)]
    amaxes = [scalar(3.0, device), scalar(1e9, device)]
    results = ops._quantize_glu_backward(
        gate.to(device),
        up.to(device),
        dy.to(device),
        "silu",
        E5M2,
        rowwise,
        columnwise,
        gate_scale=scales[0],
        gate_amax=amaxes[0],
        up_scale=scales[1],
        up_amax=amaxes[1],
    )
    _, up_gradient = glu_values("silu", gate, up, dy)
    assert results[2].isnan()
    assert amaxes[0] == 3.0
    check_planes(*results[3:], up_gradient, E5M2, scales[1].cpu())
    assert amaxes[1] == 1e9


@each_activation
def test_glu_of_any_strides_and_dimensions(device, activation):
    gate, up, dy = (make((6, 8, 128), torch.bfloat16, seed) for seed in range(3))
    gate_up = torch.cat([gate, up], -1).to(device)
    views = (gate_up[..., :128], gate_up[..., 128:], dy.movedim(-1, 0).contiguous().to(device))
    strided = (*views[:2], views[2].movedim(0, -1))
    planes = ops._quantize_glu(*strided[:2], activation, E4M3, True, True)
    check_planes(*planes, glu_values(activation, gate, up), E4M3)
    results = ops._quantize_glu_backward(*strided, activation, E4M3, True, True)
    for planes, values in zip(
        (results[:3], results[3:]), glu_values(activation, gate, up, dy), strict=True
    ):
        check_planes(*planes, values, E4M3)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": torch.ones(63)}, r"weight has shape \(1, 63\)"),
        ({"weight": torch.ones(64, dtype=torch.float64)}, "weight has dtype"),
        ({"weight": torch.ones(64, dtype=torch.bfloat16)}, "weight has dtype"),
        ({"bias": torch.ones(64)}, "bias is given without weight"),
        ({"eps": -1.0}, "eps is -1"),
        ({"scale": torch.ones(())}, "scale and amax must be given together"),
        ({"rowwise": False}, "rowwise is absent"),
        ({"x": torch.ones(())}, "x has no dimension"),
    ],
)
def test_bad_arguments_of_a_norm_are_named(change, message):
    arguments = {
        "x": torch.ones(4, 64),
        "weight": None,
        "bias": None,
        "centered": False,
        "eps": 1e-5,
        "fp8_dtype": E4M3,
        **change,
    }
    with pytest.raises((TypeError, ValueError), match=message):
        ops._quantize_norm(**arguments)


def test_bad_arguments_of_glu_are_named():
    gate = torch.ones(4, 64)
    with pytest.raises(ValueError, match="up has shape"):
        ops._quantize_glu(gate, gate[:, 1:], "silu", E4M3)
    with pytest.raises(TypeError, match="up has dtype"):
        ops._quantize_glu(gate, gate.bfloat16(), "silu", E4M3)
    with pytest.raises(ValueError, match='activation is "relu"'):
        ops._quantize_glu(gate, gate, "relu", E4M3)
    scale_of_gate = {"gate_scale": torch.ones(()), "gate_amax": torch.zeros(())}
    with pytest.raises(ValueError, match="delayed scaling is given for one gradient"):
        ops._quantize_glu_backward(gate, gate, gate, "silu", E5M2, **scale_of_gate)
    with pytest.raises(ValueError, match="dy has shape"):
        ops._quantize_glu_backward(gate, gate, gate[1:], "silu", E5M2)
