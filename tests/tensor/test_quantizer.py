"""Quantizers: codes and scales against plain torch, usages, in-place updates, groups."""

import copy
import dataclasses
import pickle

import pytest
import torch

import fp8rs
from distributed import ranks
from fp8rs.quantize.formats import FORMATS
from fp8rs.quantize.recipes import RECIPES, quant_spec, resolve_recipe
from fp8rs.tensor.quantized import Float8Tensor
from fp8rs.tensor.quantizer import Quantizer
from oracle.elements import MAX
from oracle.tensorwise import quantize, scale_from_amax
from tensor_formats import quantizer_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2

every_type = pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])


def data(device, *shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, dtype)


def bits(t):
    return t.view(torch.uint8)


@every_type
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(16, 32), (3, 5, 7), (9,), (0, 4), (4, 0), (1, 1)])
def test_current_scaling_bytes_equal_the_oracle(device, fp8_dtype, dtype, shape):
    x = data(device, *shape, dtype=dtype)
    t = quantizer_of("tensor", fp8_dtype)(x)
    amax = x.float().abs().max() if x.numel() else torch.zeros((), device=device)
    scale = scale_from_amax(amax, fp8_dtype)
    assert torch.equal(t.rowwise.scale, scale)
    assert torch.equal(bits(t.rowwise.data), bits(quantize(x, scale, fp8_dtype)))
    rows = t.rowwise.data.reshape(-1, shape[-1]) if x.numel() else None
    if rows is not None:
        assert torch.equal(bits(t.columnwise.data), bits(rows).t())
    assert t.columnwise.scale is t.rowwise.scale
    assert (t.shape, t.dtype) == (x.shape, dtype)


@every_type
def test_delayed_bytes_and_amax_equal_the_oracle(device, fp8_dtype):
    scale = torch.full((), 0.01, device=device)
    amax = torch.full((), 1.0, device=device)
    quantizer = quantizer_of("tensor", fp8_dtype, delayed=(scale, amax))
    x = data(device, 16, 32) * 3
    t = quantizer(x)
    assert torch.equal(bits(t.rowwise.data), bits(quantize(x, scale, fp8_dtype)))
    assert torch.equal(bits(t.columnwise.data), bits(t.rowwise.data).t())
    assert t.rowwise.scale.item() == scale.item()
    assert amax.item() == x.abs().max().item()
    quantizer(x * 0.1)
    assert amax.item() == x.abs().max().item(), "a running maximum"
    assert scale.item() == pytest.approx(0.01)


def test_delayed_scaling_saturates(device):
    scale = torch.ones((), device=device)
    amax = torch.zeros((), device=device)
    t = quantizer_of("tensor", E4M3, delayed=(scale, amax))(
        torch.tensor([1000.0, -1000.0], device=device)
    )
    assert t.dequantize().tolist() == [448.0, -448.0]
    assert amax.item() == 1000.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_data_stays_visible(device, bad):
    x = torch.tensor([1.0, bad, 2.0, 3.0], device=device)
    t = quantizer_of("tensor", E4M3)(x)
    assert t.rowwise.scale.isnan()
    assert (bits(t.rowwise.data) == 0x7F).all()
    assert t.dequantize().isnan().all()

    scale = torch.ones((), device=device)
    amax = torch.full((), 0.5, device=device)
    t = quantizer_of("tensor", E4M3, delayed=(scale, amax))(x)
    assert t.rowwise.scale.isnan(), "this one tensor's scale"
    assert t.dequantize().isnan().all()
    assert amax.item() == 0.5, "never in the history"
    assert scale.item() == 1.0


def test_power_of_2_scales(device):
    x = data(device, 16, 32)
    plain = quantizer_of("tensor", E4M3)(x).rowwise.scale
    scale = quantizer_of("tensor", E4M3, power_2_scale=True)(x).rowwise.scale
    assert torch.frexp(scale).mantissa.item() == 0.5
    assert plain <= scale < 2 * plain


def test_amax_epsilon_bounds_the_scale(device):
    x = torch.full((4, 4), 1e-6, device=device)
    scale = quantizer_of("tensor", E4M3, amax_epsilon=1.0)(x).rowwise.scale
    assert torch.equal(scale, scale_from_amax(torch.ones((), device=device), E4M3))


@pytest.mark.parametrize("value", [0.0, -0.0])
def test_zeros_have_scale_1(device, value):
    t = quantizer_of("tensor", E4M3)(torch.full((4, 4), value, device=device))
    assert t.rowwise.scale.item() == 1.0
    assert not t.dequantize().any()


def test_strided_inputs_give_the_bytes_of_contiguous_ones(device):
    x = data(device, 8, 6, 10)
    quantizer = quantizer_of("tensor", E4M3)
    for view in (x.transpose(1, 2), x[:, ::2], x[..., 1::3], x.transpose(0, 1)[1]):
        t = quantizer(view)
        expected = quantizer(view.contiguous())
        assert torch.equal(bits(t.rowwise.data), bits(expected.rowwise.data))
        assert torch.equal(bits(t.columnwise.data), bits(expected.columnwise.data))


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, True), (True, False), (False, True)])
def test_usages(device, rowwise, columnwise):
    x = data(device, 4, 6)
    for quantizer in (
        quantizer_of("tensor", E4M3, rowwise=rowwise, columnwise=columnwise),
        quantizer_of(
            "tensor",
            E4M3,
            delayed=(torch.ones((), device=device), torch.zeros((), device=device)),
            rowwise=rowwise,
            columnwise=columnwise,
        ),
    ):
        t = quantizer(x)
        assert isinstance(t, Float8Tensor)
        assert (t.rowwise is not None, t.columnwise is not None) == (rowwise, columnwise)
        empty = quantizer.make_empty((4, 6), dtype=torch.bfloat16, device=device)
        assert (empty.rowwise is not None, empty.columnwise is not None) == (rowwise, columnwise)
        assert (empty.shape, empty.dtype) == ((4, 6), torch.bfloat16)
        assert empty.device == x.device


def test_set_usage(device):
    quantizer = quantizer_of("tensor", E4M3)
    quantizer.set_usage(columnwise=False)
    assert quantizer(data(device, 4, 6)).columnwise is None
    quantizer.set_usage(rowwise=False, columnwise=True)
    assert quantizer(data(device, 4, 6)).rowwise is None
    with pytest.raises(ValueError, match="rowwise and columnwise"):
        quantizer.set_usage(columnwise=False)
    assert quantizer.columnwise, "left as it was"


def test_copies_change_only_their_usage_and_share_amaxes(device):
    scale = torch.ones((), device=device)
    amax = torch.zeros((), device=device)
    quantizer = quantizer_of("tensor", E4M3, delayed=(scale, amax))
    other = quantizer.copy()
    other.set_usage(rowwise=False)
    assert quantizer.rowwise
    other(data(device, 4, 6))
    assert amax.item() > 0


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, True), (True, False), (False, True)])
def test_update_quantized_writes_the_existing_planes(device, rowwise, columnwise):
    quantizer = quantizer_of("tensor", E4M3)
    dst = quantizer_of("tensor", E4M3, rowwise=rowwise, columnwise=columnwise).make_empty(
        (4, 6), device=device
    )
    datas = [p.data for p in (dst.rowwise, dst.columnwise) if p is not None]
    src = data(device, 4, 6, dtype=torch.bfloat16)
    assert quantizer.update_quantized(src, dst) is dst
    after = [p.data for p in (dst.rowwise, dst.columnwise) if p is not None]
    assert all(a is b for a, b in zip(datas, after, strict=True))
    assert torch.equal(dst.dequantize(), quantizer(src).dequantize(torch.float32))


def test_results_are_outside_autograd(device):
    x = data(device, 4, 6).requires_grad_()
    assert not quantizer_of("tensor", E4M3)(x).requires_grad


def test_make_empty_with_gradients(device):
    t = quantizer_of("tensor", E4M3).make_empty((2, 2), device=device, requires_grad=True)
    assert t.requires_grad
    assert t.rowwise.scale.item() == 1.0


def test_quantizing_a_quantized_tensor_dequantizes_it_first(device):
    x = quantizer_of("tensor", E5M2)(data(device, 4, 6))
    t = quantizer_of("tensor", E4M3)(x)
    expected = quantizer_of("tensor", E4M3)(x.dequantize())
    assert torch.equal(bits(t.rowwise.data), bits(expected.rowwise.data))


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda q, x: quantizer_of("tensor", torch.float16), TypeError, "fp8_dtype"),
        (lambda q, x: quantizer_of("tensor", "e4m3"), TypeError, "fp8_dtype"),
        (lambda q, x: Quantizer("current", "output"), ValueError, "role must be 'input' or"),
        (lambda q, x: Quantizer("fp4"), ValueError, "recipe 'fp4' is not known"),
        (lambda q, x: q([1.0]), TypeError, "x"),
        (lambda q, x: q(x.double()), TypeError, "x"),
        (lambda q, x: q(x.int()), TypeError, "x"),
        (lambda q, x: q.update_quantized(x, x), TypeError, "dst"),
        (lambda q, x: q.update_quantized(x[:2], q(x)), ValueError, "src"),
        (lambda q, x: q.update_quantized(x.double(), q(x)), TypeError, "src"),
        (
            lambda q, x: quantizer_of("tensor", E5M2).update_quantized(x, q(x)),
            ValueError,
            "dst",
        ),
        (lambda q, x: q.update_quantized(x, q(x).to("meta")), ValueError, "dst"),
        (lambda q, x: quantizer_of("tensor", E4M3, delayed=(1.0, x.sum())), TypeError, "scale"),
        (lambda q, x: quantizer_of("tensor", E4M3, delayed=(x.sum(), x)), ValueError, "amax"),
        (
            lambda q, x: quantizer_of("tensor", E4M3, delayed=(x.sum().double(), x.sum())),
            TypeError,
            "scale",
        ),
        (
            lambda q, x: quantizer_of("tensor", E4M3, rowwise=False, columnwise=False),
            ValueError,
            "rowwise",
        ),
        (lambda q, x: q(x).quantize_("x"), TypeError, "src must be a tensor, not str"),
        (lambda q, x: q(x).quantize_(None), TypeError, "src must be a tensor, not NoneType"),
        (lambda q, x: q(x)[:2].quantize_(3.0), TypeError, "src must be a tensor, not float"),
        (lambda q, x: q(x).dequantize("x"), TypeError, "dtype must be .* not 'x'"),
        (lambda q, x: q(x)[:2].dequantize(16), TypeError, "dtype must be .* not 16"),
        (lambda q, x: q(x).dequantize(torch.int32), TypeError, "dtype"),
    ],
)
def test_errors_name_the_argument(device, call, error, match):
    with pytest.raises(error, match=match):
        call(quantizer_of("tensor", E4M3), torch.ones(4, 4, device=device))


@pytest.mark.parametrize("kind", [fp8rs.Float8CurrentScaling, fp8rs.Float8BlockScaling])
@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"power_2_scale": "x"}, TypeError),
        ({"power_2_scale": 1}, TypeError),
        ({"amax_epsilon": "x"}, TypeError),
        ({"amax_epsilon": None}, TypeError),
        ({"amax_epsilon": True}, TypeError),
        ({"amax_epsilon": -1}, ValueError),
        ({"amax_epsilon": float("nan")}, ValueError),
        ({"amax_epsilon": float("inf")}, ValueError),
        ({"amax_epsilon": 1e39}, ValueError),
    ],
)
def test_options_of_scales_are_checked_on_construction(kind, options, error):
    with pytest.raises(error, match=next(iter(options))):
        fp8rs.Quantizer(kind(**options))


@pytest.mark.parametrize("fullgraph", [False, True])
@pytest.mark.parametrize(
    "format, options",
    [
        ("tensor", {}),
        ("1x128", {}),
        ("1x32", {}),
        ("tensor", {"amax_epsilon": 16.5}),
        ("1x128", {"amax_epsilon": 2.5, "power_2_scale": True}),
    ],
)
def test_update_quantized_compiles(format, options, fullgraph):
    quantizer = quantizer_of(format, **options)
    src = data("cpu", 64, 64, seed=1)
    t = quantizer(data("cpu", 64, 64))
    planes = t.planes

    @torch.compile(fullgraph=fullgraph, backend="aot_eager")
    def update(src, t):
        return quantizer.update_quantized(src, t).dequantize() * 2

    assert torch.equal(update(src, t), quantizer(src).dequantize() * 2)
    for plane, before, new in zip(t.planes, planes, quantizer(src).planes, strict=True):
        assert plane.data is before.data and plane.format is quantizer.format
        assert torch.equal(bits(plane.data), bits(new.data))
        assert torch.equal(plane.scale.float(), new.scale.float())


@pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))
def test_formats_are_singletons(format):
    fields = [getattr(format, field.name) for field in dataclasses.fields(format)]
    assert type(format)(*fields) is format is copy.deepcopy(format)
    assert pickle.loads(pickle.dumps(format)) is format
    other = type(format)("odd", (7, -1), torch.float32)
    assert other is not format and other != format and other.block == (7, -1)
    assert hash(format) != hash(other)
    assert format.per_tensor == (format.block == (-1, -1))
    assert format.square == (format.block[0] == format.block[1])
    with pytest.raises(dataclasses.FrozenInstanceError):
        format.block = (1, 1)


def test_one_specification_serves_quantizers_and_tensors(device):
    x = data(device, 8, 64)
    for quantizer in (
        quantizer_of("tensor", E4M3, power_2_scale=True, amax_epsilon=0.5),
        quantizer_of("1x128", E5M2, power_2_scale=True),
        quantizer_of("1x32", E4M3, scale_rounding="floor"),
    ):
        spec = quantizer.spec
        assert spec == copy.deepcopy(spec) == pickle.loads(pickle.dumps(spec))
        assert hash(spec) == hash(copy.deepcopy(spec))
        assert spec != dataclasses.replace(spec, amax_epsilon=0.25)
        assert spec.format is pickle.loads(pickle.dumps(spec)).format
        t = quantizer(x)
        assert t.spec == spec
        loaded = pickle.loads(pickle.dumps(quantizer))
        for other in (Quantizer(spec)(x), loaded(x)):
            assert torch.equal(bits(t.rowwise.data), bits(other.rowwise.data))
            assert torch.equal(t.columnwise.scale.float(), other.columnwise.scale.float())
            assert other.spec == spec


@pytest.mark.parametrize("role", ["input", "weight", "grad"])
@pytest.mark.parametrize("recipe", list(RECIPES))
def test_a_quantizer_of_a_recipe_has_the_spec_of_the_operand(recipe, role):
    quantizer = Quantizer(recipe, role)
    assert quantizer.spec == quant_spec(resolve_recipe(recipe), role)
    assert Quantizer(resolve_recipe(recipe), role).spec == quantizer.spec


@ranks(2)
def test_ranks_of_a_group_share_the_scale(rig):
    import torch.distributed as dist

    quantizer = quantizer_of("tensor", E4M3, group=dist.group.WORLD.group_name)
    x = torch.full((4, 4), 1.0 + rig.rank, device=rig.device)
    scale = quantizer(x).rowwise.scale
    assert torch.equal(scale.cpu(), torch.tensor(2.0 / MAX[E4M3]))
    # A NaN on one rank reaches all ranks.
    if rig.rank == 0:
        x[0, 0] = float("nan")
    assert quantizer(x).rowwise.scale.isnan()


@ranks(2)
def test_collectives_into_quantized_tensors(rig):
    import torch.distributed as dist

    def fresh(value=None):
        x = torch.full((4, 4), 1.0 + rig.rank if value is None else value, device=rig.device)
        return quantizer_of("tensor", E4M3)(x)

    def holds(t, value):
        for plane in t.planes:
            values = plane.dequantize(torch.float32)
            assert ((values - value).abs() <= 0.07 * value).all(), values

    def run(collective, *args):
        work = collective(*args, async_op=modes[-1])
        if work is not None:
            work.wait()

    modes = [True, False]
    while modes:
        t = fresh()
        run(dist.broadcast, t, 1)
        holds(t, 2.0)
        t = fresh()
        run(dist.all_reduce, t)
        holds(t, 3.0)
        part = fresh()
        run(dist.all_reduce, part[:2])
        holds(part[:2], 3.0)
        holds(part[2:], 1.0 + rig.rank)
        t = fresh()
        run(dist.reduce, t, 0)
        if rig.rank == 0:
            holds(t, 3.0)
        outs = [fresh(0.0), fresh(0.0)]
        run(dist.all_gather, outs, fresh())
        for rank, out in enumerate(outs):
            holds(out, 1.0 + rank)
        out = quantizer_of("tensor", E4M3)(torch.zeros(8, 4, device=rig.device))
        run(dist.all_gather_into_tensor, out, fresh())
        holds(out[:4], 1.0)
        holds(out[4:], 2.0)
        out = fresh(0.0)
        parts = [torch.full((4, 4), 5.0 + r, device=rig.device) for r in range(2)]
        run(dist.scatter, out, parts if rig.rank == 0 else None, 0)
        holds(out, 5.0 + rig.rank)
        modes.pop()
    t = fresh()
    if rig.rank == 0:
        dist.send(t, 1)
        got = torch.empty(4, 4, device=rig.device)
        dist.recv(got, 1)
        assert (got == 2.0).all()
    else:
        got = torch.empty(4, 4, device=rig.device)
        dist.recv(got, 0)
        assert (got == 1.0).all()
        dist.send(t, 0)
    with pytest.raises(NotImplementedError, match=r"recv_ into a quantized tensor.*copy_\(\)"):
        dist.recv(t, 1 - rig.rank)
    with pytest.raises(NotImplementedError, match="consecutive elements"):
        dist.broadcast(t[:, 1:], 1)


@ranks(2)
def test_collectives_between_quantized_and_plain_tensors(rig):
    """Rank 0 has quantized tensors, rank 1 plain ones, as in a load from rank 0."""
    import torch.distributed as dist

    def tensor(value):
        x = torch.full((4, 4), value, device=rig.device)
        return x if rig.rank else Quantizer("current")(x)

    def check(t, value):
        values = t.dequantize() if rig.rank == 0 else t
        assert ((values - value).abs() <= 0.07 * value).all(), values

    def ranks_values():
        return [tensor(10.0 * rig.rank + receiver + 1) for receiver in range(2)]

    for source in range(2):
        t = tensor(1.0 + rig.rank)
        dist.broadcast(t, source)
        check(t, 1.0 + source)

        t = tensor(0.0)
        dist.scatter(t, ranks_values() if rig.rank == source else None, source)
        check(t, 10.0 * source + rig.rank + 1)

        t = tensor(1.0 + rig.rank)
        dist.reduce(t, source)
        if rig.rank == source:
            check(t, 3.0)

        outputs = [tensor(0.0) for _ in range(2)]
        dist.gather(tensor(1.0 + rig.rank), outputs if rig.rank == source else None, source)
        for rank, output in enumerate(outputs if rig.rank == source else []):
            check(output, 1.0 + rank)

    t = tensor(1.0 + rig.rank)
    dist.all_reduce(t)
    check(t, 3.0)

    outputs = [tensor(0.0) for _ in range(2)]
    dist.all_gather(outputs, tensor(1.0 + rig.rank))
    for rank, output in enumerate(outputs):
        check(output, 1.0 + rank)

    t = tensor(0.0)
    dist.reduce_scatter(t, ranks_values())
    check(t, 12.0 + 2 * rig.rank)

    if rig.device_type == "cuda":  # gloo has no all_to_all of lists
        outputs = [tensor(0.0) for _ in range(2)]
        dist.all_to_all(outputs, ranks_values())
        for rank, output in enumerate(outputs):
            check(output, 10.0 * rank + rig.rank + 1)


# --- torch.compile --------------------------------------------------------------------------------

IN_GRAPHS = {
    "delayed": lambda device: quantizer_of(
        "tensor",
        E4M3,
        delayed=(torch.full((), 0.25, device=device), torch.zeros((), device=device)),
    ),
    "current": lambda device: quantizer_of("tensor", E4M3, power_2_scale=True, amax_epsilon=0.5),
    "rowwise plane": lambda device: quantizer_of("tensor", E4M3, columnwise=False),
    "row": lambda device: quantizer_of("row", E4M3),
    "1x128": lambda device: quantizer_of("1x128", E4M3, power_2_scale=True),
    "32x32": lambda device: quantizer_of("32x32", E4M3, scale_rounding="floor"),
}


# torch 2.11 emits this warning.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", list(IN_GRAPHS))
def test_quantizers_in_compiled_functions_give_the_bytes_of_eager(device, name, backend):
    """One graph serves all sizes."""
    torch._dynamo.reset()
    eager = IN_GRAPHS[name](device)
    compiled = IN_GRAPHS[name](device)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32, device=device))
    fp8rs.convert_to_float8_training(layer, recipe="current")

    def function(x, quantizer):
        t = quantizer(x * 2)
        y = layer(t) if quantizer.format.per_tensor else t.dequantize()
        return t, t[:3], y, y.sum() + x.sum()

    step = torch.compile(function, fullgraph=True, backend=backend, dynamic=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (160, 224, 288):
            x = data(device, rows, 64, seed=rows).requires_grad_()
            actual = step(x, compiled)
            expected = function(x, eager)
            for t, other in zip(actual[:2], expected[:2], strict=True):
                assert type(t) is type(other) and not t.requires_grad
                assert t.spec == other.spec
                for plane, other_plane in zip(t.planes, other.planes, strict=True):
                    assert (plane is None) == (other_plane is None)
                    if plane is not None:
                        assert torch.equal(bits(plane.data), bits(other_plane.data))
                        assert torch.equal(plane.scale.float(), other_plane.scale.float())
            torch.testing.assert_close(actual[2], expected[2])
            actual[3].backward()
            assert (x.grad == 1).all(), "outside autograd"
            if name == "delayed":
                assert compiled.amax == eager.amax > 0
                compiled.amax.zero_()
                eager.amax.zero_()
