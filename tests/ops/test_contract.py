"""Properties of all operators: instruction sets, threads, memory, versions, tensor kinds."""

import pytest
import torch

from cases import calls, data, each_dtype, each_format, scalar
from internals import core
from oracle import tensorwise
from oracle.compare import codes, same
from oracle.elements import E4M3

ops = torch.ops.fp8rs


@pytest.fixture(params=["avx2", "avx512"])
def simd(request):
    """Return a function that runs a call with the scalar code and with an instruction set."""
    try:
        core.set_cpu_simd(request.param)
    except core.UnsupportedError:
        pytest.skip(f"this CPU has no {request.param}")

    def on_both(function):
        results = []
        for level in ("scalar", request.param):
            core.set_cpu_simd(level)
            assert core.cpu_features() == level
            results.append(function())
        return zip(*results, strict=True)

    yield on_both
    core.set_cpu_simd(None)


@each_format
@each_dtype
def test_instruction_sets_give_equal_bytes(simd, fp8_dtype, dtype):
    bits = torch.randint(-(1 << 15), 1 << 15, (61, 1036), dtype=torch.int16)
    x = bits.view(dtype)
    for view in (x, x.t(), x[:, 1::3], data("cpu", 61, 1037, dtype=dtype)):
        assert all(same(a, b) for a, b in simd(lambda view=view: calls(view, fp8_dtype)))


@each_format
def test_large_tensors_equal_the_reference(fp8_dtype):
    x = data("cpu", 700, 513)
    x[699, 512] = 3e30
    scale = scalar(0.37, "cpu")
    row, col = ops.quantize(x, scale, fp8_dtype, True, True)
    expected = tensorwise.quantize(x, scale, fp8_dtype)
    assert same(codes(row), expected)
    assert same(codes(col), expected.t())
    assert same(ops.amax(x), torch.tensor(3e30))
    current = ops.quantize_current(x, fp8_dtype)
    assert same(codes(current[0]), tensorwise.quantize(x, current[2], fp8_dtype))
    assert same(current[2], tensorwise.scale_from_amax(torch.tensor(3e30), fp8_dtype))


def test_outputs_do_not_share_memory(device):
    x = data(device, 8, 8)
    scale = scalar(1.0, device)
    first = ops.quantize(x, scale, E4M3, True, True)
    second = ops.quantize(x, scale, E4M3, True, True)
    assert len({t.data_ptr() for t in (*first, *second)}) == 4
    empty = ops.quantize(x, scale, E4M3)[1]
    assert empty is not ops.quantize(x, scale, E4M3)[1]


def test_inputs_are_not_modified(device):
    x = data(device, 33, 9)
    scale = scalar(0.5, device)
    amax = scalar(1.0, device)
    copies = [t.clone() for t in (x, scale)]
    ops.quantize_delayed(x, scale, amax, E4M3, True, True)
    ops.quantize_current(x, E4M3, True, True)
    assert all(same(a, b) for a, b in zip((x, scale), copies, strict=True))
    assert (x._version, scale._version) == (0, 0)


def test_writes_increase_the_version_counter(device):
    x = data(device, 3, 4)
    scale = scalar(1.0, device)
    amax = scalar(0.0, device)
    amaxes = torch.zeros(1, device=device)
    out = torch.empty(3, 4, dtype=E4M3, device=device)
    ops.quantize_delayed(x, scale, amax, E4M3)
    ops.multi_quantize([x], scale.view(1), [out])
    ops.multi_quantize_delayed([x], scale.view(1), amaxes, [out])
    assert (amax._version, amaxes._version, out._version) == (1, 1, 2)


def test_operators_run_under_inference_mode(device):
    with torch.inference_mode():
        x = data(device, 3, 4)
        scale = scalar(1.0, device)
        amax = scalar(0.0, device)
        row, _, _ = ops.quantize_delayed(x, scale, amax, E4M3)
    assert same(codes(row), tensorwise.quantize(x, scale, E4M3))


def test_operators_accept_parameters(device):
    x = torch.nn.Parameter(data(device, 3, 4))
    with torch.no_grad():
        row, _ = ops.quantize(x, scalar(1.0, device), E4M3)
    assert same(codes(row), tensorwise.quantize(x.detach(), scalar(1.0, device), E4M3))


def test_operators_accept_negated_views(device):
    z = torch.complex(data(device, 3, 4), data(device, 3, 4, seed=1))
    x = z.conj().imag
    assert x.is_neg()
    row, _ = ops.quantize(x, scalar(1.0, device), E4M3)
    assert same(codes(row), tensorwise.quantize(x.clone(), scalar(1.0, device), E4M3))
