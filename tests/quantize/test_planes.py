"""Every format, with both planes, rowwise only and columnwise only, in every operation.

Only operations that need a missing plane raise an error, which names the plane.
"""

import copy
import pickle

import pytest
import torch
from torch import nn

import fp8rs
from cases import skip_without_block_gemms
from fp8rs.quantize.formats import TENSOR
from fp8rs.tensor.quantized import Plane, QuantizedTensor
from fp8rs.tensor.quantizer import Quantizer
from oracle.blocks import expand
from saving import reloaded
from tensor_formats import (
    FORMATS,
    PLANES,
    RECIPES,
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


@every_format
@every_plane
@pytest.mark.parametrize("shape", [SHAPE, (3, 40, 70), (130,), (0, 64), (64, 0)])
def test_every_plane_dequantizes(device, format, planes, shape):
    t = make(format, planes, device, *shape)
    plane = t.any_plane()
    rows, cols = plane.matrix.shape
    block = plane.format.block if plane.scale.dim() else (rows or 1, cols or 1)
    scale = plane.scale.float().view(plane.format.scale_shape(rows, cols) or (1, 1))
    expected = plane.matrix.float() * expand(scale, block, (rows, cols))
    if planes == "columnwise":
        expected = expected.t()
    assert torch.equal(t.dequantize(), expected.reshape(shape))
    assert torch.equal(t.dequantize(torch.bfloat16), expected.reshape(shape).bfloat16())


#: Operations whose result is quantized, applied to the tensor and to plain values.
KEEPING = {
    "detach": lambda x: x.detach(),
    "alias": lambda x: torch.ops.aten.alias(x),
    "contiguous": lambda x: x.contiguous(),
    "to the device": lambda x: x.to(x.device),
    "the whole slice": lambda x: x[:],
    "rows": lambda x: x[128:],
    "one row": lambda x: x[128],
    "columns": lambda x: x[:, 128:256],
    "no rows": lambda x: x[3:3],
    "narrow": lambda x: x.narrow(0, 0, 128),
    "as_strided": lambda x: torch.as_strided(x, (72, 320), (320, 1), 128 * 320),
    "split": lambda x: x.split(128)[1],
    "split with sizes": lambda x: x.split([128, 72])[1],
    "split of columns": lambda x: x.split(128, 1)[2],
    "chunk": lambda x: x[:, :256].chunk(2, 1)[1],
    "view": lambda x: x.view(2, 100, 320),
    "part of a view": lambda x: x.view(25, 8, 320)[16:],
    "flatten": lambda x: x.view(2, 100, 320).flatten(0, 1),
    "slice of a slice": lambda x: x[128:][:, 256:],
}
COPYING = {
    "clone": lambda x: x.clone(),
    "deepcopy": lambda x: copy.deepcopy(x),
    "copy": lambda x: copy.copy(x),
    "clone of a part": lambda x: x[128:].clone(),
    "to another device": lambda x: x.to(x.device, copy=True),
}


@every_format
@every_plane
@pytest.mark.parametrize("operation", [*KEEPING, *COPYING])
def test_operations_keep_planes(device, format, planes, operation):
    t = make(format, planes, device)
    call = {**KEEPING, **COPYING}[operation]
    out = call(t)
    assert type(out) is type(t)
    same_values(values(out), {name: call(x) for name, x in values(t).items()})
    for name in values(t):
        before = getattr(t, name).data.untyped_storage().data_ptr()
        shared = getattr(out, name).data.untyped_storage().data_ptr() == before
        assert shared == (operation in KEEPING or operation == "copy")


@every_format
@every_plane
@pytest.mark.parametrize(
    "swap", [lambda x: x.t(), lambda x: x.transpose(0, 1), lambda x: x.permute(1, 0), lambda x: x.T]
)
def test_transposes_have_no_planes(device, format, planes, swap):
    t = make(format, planes, device)
    out = swap(t)
    assert isinstance(out, QuantizedTensor) and out.planes == (None, None)
    assert torch.equal(out.dequantize(), swap(t.dequantize()))
    assert torch.equal(out.t().dequantize(), t.dequantize())


@every_format
@every_plane
def test_dtypes_and_devices_convert(device, format, planes):
    t = make(format, planes, device)
    as_bf16 = t.to(torch.bfloat16)
    assert as_bf16.dtype == torch.bfloat16
    same_values(values(as_bf16), values(t))
    assert torch.equal(t.to(torch.float64), t.dequantize().double())
    meta = t.to("meta")
    assert {n for n in PLANES["both"] if getattr(meta, n) is not None} == values(t).keys()


@every_format
@every_plane
@pytest.mark.parametrize("kind", ["tensor", "parameter", "part", "flat view"])
@pytest.mark.parametrize("way", ["pickle", "torch.save", "weights_only"])
def test_tensors_are_pickled(device, format, planes, kind, way):
    t = make(format, planes, device)
    if kind == "parameter":
        t = nn.Parameter(t)
    elif kind == "part":
        t = t[128:]
    elif kind == "flat view":
        t = t.view(-1)
    if way == "pickle":
        back = pickle.loads(pickle.dumps(t))
    else:
        back = reloaded(t, weights_only=way == "weights_only")
    if t.planes == (None, None):
        assert type(back) is torch.Tensor
        assert torch.equal(back, t.dequantize())
        return
    same_bytes(back, t.detach())
    assert (back.dtype, back.requires_grad) == (t.dtype, t.requires_grad)
    assert isinstance(back, nn.Parameter) == (kind == "parameter")
    src = data(device, *t.shape, seed=3)
    usage = {name: name in values(t) for name in PLANES["both"]}
    same_bytes(back.detach().quantize_(src), FORMATS[format](**usage)(src))


@every_format
@every_plane
def test_new_tensors_are_plain(device, format, planes):
    t = make(format, planes, device)
    new = [
        torch.empty_like(t),
        torch.zeros_like(t),
        torch.ones_like(t),
        torch.full_like(t, 2.0),
        torch.rand_like(t),
        t.new_empty(SHAPE),
        t.new_zeros(SHAPE),
    ]
    assert all(type(x) is torch.Tensor and x.shape == t.shape for x in new)


@every_format
@every_plane
@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x + 1,
        lambda x: x.abs().amax(0),
        lambda x: x @ x.t(),
        lambda x: torch.cat([x, x]),
        lambda x: nn.functional.linear(x, x),
    ],
)
def test_other_operations_dequantize(device, format, planes, operation):
    t = make(format, planes, device)
    out = operation(t)
    expected = operation(t.dequantize())
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, expected)


@every_format
@every_plane
def test_repr_and_flattening_show_the_existing_planes(device, format, planes):
    t = make(format, planes, device)
    assert format in repr(t)
    names, context = t.__tensor_flatten__()
    inner = {name: getattr(t, name) for name in names}
    same_bytes(type(t).__tensor_unflatten__(inner, context, t.shape, t.stride()), t)


@every_format
@every_plane
def test_writes_fill_the_existing_planes(device, format, planes):
    src = data(device, *SHAPE, seed=1, scale=9.0)
    want = FORMATS[format](**PLANES[planes])(src)
    two_planes = FORMATS[format]()(src)
    for write in (
        lambda t: t.quantize_(src),
        lambda t: t.copy_(src),
        lambda t: t.copy_(want),
        lambda t: t.copy_(two_planes),
        lambda t: Quantizer(t.spec).update_quantized(src, t),
        lambda t: FORMATS[format]().update_quantized(src, t),
    ):
        t = make(format, planes, device)
        assert write(t) is t
        same_bytes(t, want)


@every_format
@every_plane
@pytest.mark.parametrize("of", list(PLANES))
def test_copies_between_usages(device, format, planes, of):
    """Codes are copied if they exist or can be made from the other plane.

    Otherwise values are quantized again.
    """
    t = make(format, planes, device)
    src = make(format, of, device, seed=1)
    t.copy_(src)
    if format in SQUARE or planes == of or of == "both":
        source = copy.copy(src).update_usage(**PLANES[planes]) if format in SQUARE else src
        for name in values(t):
            assert torch.equal(bits(getattr(t, name).data), bits(getattr(source, name).data))
    else:
        same_bytes(t, FORMATS[format](**PLANES[planes])(src.dequantize()))


@every_format
@every_plane
def test_in_place_operations_quantize_again(device, format, planes):
    t = make(format, planes, device)
    want = t.dequantize() * 3.0
    assert t.mul_(3.0) is t
    for name, value in values(t).items():
        error = 0.51 * 2.0**-3 * want.abs() + 0.51 * 2.0**-9 * scales(t)[name]
        # A value that the rowwise plane has rounded to 0 may be nonzero in the second one, and 0 *
        # 3 is 0.
        comparable = (want != 0) | (name == next(iter(values(t))))
        assert ((value - want).abs() <= error)[comparable].all(), name
    t.zero_()
    assert not any(x.any() for x in values(t).values())


@every_format
@every_plane
@pytest.mark.parametrize("wanted", ["rowwise", "columnwise"])
def test_update_usage(device, format, planes, wanted):
    t = make(format, planes, device)
    two_planes = make(format, "both", device)
    before = values(t)
    if wanted in values(t) or format in SQUARE:
        assert t.update_usage(**{wanted: True}) is t
        assert torch.equal(bits(getattr(t, wanted).data), bits(getattr(two_planes, wanted).data))
        assert torch.equal(bits(getattr(t, wanted).scale), bits(getattr(two_planes, wanted).scale))
    else:
        with pytest.raises(ValueError, match=rf"update_usage\({wanted}=True\) needs the {wanted}"):
            t.update_usage(**{wanted: True})
    for name, value in before.items():
        assert torch.equal(values(t)[name], value)
    for name in list(values(t)):
        if len(values(t)) == 2:
            t.update_usage(**{name: False})
            assert name not in values(t)
        else:
            with pytest.raises(ValueError, match="no plane"):
                t.update_usage(**{name: False})


@every_format
def test_errors_name_the_missing_plane(device, format):
    row = make(format, "rowwise", device)
    col = make(format, "columnwise", device)
    with pytest.raises(ValueError, match="a test needs the columnwise plane"):
        row.plane("columnwise", "a test")
    with pytest.raises(ValueError, match="a test needs the rowwise plane"):
        col.plane("rowwise", "a test")
    two_planes = make(format, "both", device)
    if format != "tensor":
        with pytest.raises(ValueError, match=r"a test needs the rowwise plane.*not made of whole"):
            two_planes.view(-1).plane("rowwise", "a test")


# --- linear layers -------------------------------------------------------------------------------


def pair(format, planes, device):
    """Return a layer with a quantized weight, and one with the dequantized weight."""
    recipe = RECIPES[format]
    if recipe.name == "block":
        skip_without_block_gemms(device)
    torch.manual_seed(0)
    plain = fp8rs.nn.Linear(96, 160, device=device, recipe=recipe)
    layer = copy.deepcopy(plain)
    t = FORMATS[format](**PLANES[planes])(plain.weight)
    layer.weight = nn.Parameter(t)
    # No recipe has weights of this format, so take its dequantized values.
    if format == "1x128":
        plain.weight = nn.Parameter(FORMATS[format]()(plain.weight))
    return layer, plain


@every_format
@every_plane
@pytest.mark.parametrize("grad", [False, True])
def test_forward_equals_that_of_the_dequantized_weight(device, format, planes, grad):
    layer, plain = pair(format, planes, device)
    x = data(device, 40, 96)
    with torch.set_grad_enabled(grad):
        if planes == "columnwise":
            with pytest.raises(ValueError, match="forward needs the rowwise plane"):
                layer(x)
            return
        assert torch.equal(layer(x), plain(x))


@every_format
@pytest.mark.parametrize("planes", ["both", "rowwise"])
def test_wgrad_reads_no_plane_of_the_weight(device, format, planes):
    layer, plain = pair(format, planes, device)
    x = data(device, 40, 96)
    dy = data(device, 40, 160, seed=1)
    grads = []
    for module in (layer, plain):
        module(x).backward(dy)
        grads.append([module.weight.grad, module.bias.grad])
    for a, b in zip(*grads, strict=True):
        assert type(a) is torch.Tensor
        assert torch.equal(a, b)


@every_format
@pytest.mark.parametrize("planes", ["both", "rowwise"])
def test_dgrad_equals_that_of_the_dequantized_weight(device, format, planes):
    layer, plain = pair(format, planes, device)
    dy = data(device, 40, 160, seed=1)
    grads = []
    for module in (layer, plain):
        x = data(device, 40, 96).requires_grad_()
        y = module(x)
        if planes == "rowwise" and module is layer and format not in (*SQUARE, "row"):
            with pytest.raises(ValueError, match="dgrad needs the columnwise plane"):
                y.backward(dy)
            return
        y.backward(dy)
        grads.append(x.grad)
    assert torch.equal(*grads)


# --- constructors --------------------------------------------------------------------------------


@every_format
@every_plane
def test_constructors_accept_results_of_quantizers(device, format, planes):
    t = make(format, planes, device)
    for cls in (type(t), QuantizedTensor):
        rebuilt = cls(t.rowwise, t.columnwise, shape=t.shape, dtype=t.dtype)
        same_values(values(rebuilt), values(t))


def _other_scales(plane, change):
    return Plane(plane.data, change(plane.scale), plane.format)


@every_format
@pytest.mark.parametrize("name", ["rowwise", "columnwise"])
def test_scales_of_another_shape_are_refused(device, format, name):
    t = make(format, "both", device)
    wrong = _other_scales(getattr(t, name), lambda s: s.new_ones(7, 7))
    planes = {"rowwise": t.rowwise, "columnwise": t.columnwise, name: wrong}
    with pytest.raises(ValueError, match=rf"{name} has scales of shape \(7, 7\)"):
        type(t)(**planes, shape=t.shape, dtype=t.dtype)


def test_planes_of_other_dtypes_are_refused(device):
    t = make("128x128", "both", device)
    mx = make("32x32", "both", device)
    with pytest.raises(TypeError, match=r"Float8Tensor has scales of torch.float32"):
        type(t)(mx.rowwise, shape=t.shape, dtype=t.dtype)
    with pytest.raises(TypeError, match="rowwise is in format 'tensor', which has scales of"):
        QuantizedTensor(
            Plane(t.rowwise.data, mx.rowwise.scale, TENSOR), shape=t.shape, dtype=t.dtype
        )
    wide = Plane(t.columnwise.data.float(), t.columnwise.scale, t.columnwise.format)
    with pytest.raises(TypeError, match=r"columnwise\.data\.dtype"):
        type(t)(columnwise=wide, shape=t.shape, dtype=t.dtype)
