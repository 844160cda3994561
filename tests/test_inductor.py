"""Current scaling as Inductor traces it: the bytes are the operator's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo import reset
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import rms_norm, silu

from fp8rs.nn.function import prepare_compilers
from fp8rs.ops import inductor

ops = torch.ops.fp8rs
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF, NAN = float("inf"), float("nan")
SMALLEST = 2.0**-126
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
fp8_dtypes = pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])


def assert_same_bits(got, expected):
    for a, b in zip(got, expected, strict=True):
        kind = torch.uint8 if b.dtype.itemsize == 1 else torch.int32
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        assert torch.equal(a.view(kind), b.view(kind))


@dtypes
@fp8_dtypes
@pytest.mark.parametrize("power_2_scale", [False, True])
@pytest.mark.parametrize("amax_epsilon", [0.0, 1e-3, 3e-41])
def test_any_amax_gives_the_operators_bytes(device, dtype, fp8_dtype, power_2_scale, amax_epsilon):
    for amax in (0.0, 1e-45, 1e-40, SMALLEST, SMALLEST * 448, 447.0, 57344.0, 3e38, INF, NAN):
        x = torch.tensor([[1e-3, 0.0, 0.0], [0.0, -amax, 1e-45]], device=device).to(dtype)
        x[0, 0] = 1e-3 if amax > 1 else 0.0
        args = x, fp8_dtype, True, True, power_2_scale, amax_epsilon
        assert_same_bits(inductor.quantize_current(*args), ops.quantize_current(*args))


@given(mantissa=st.integers(0, 2**23 - 1), exponent=st.integers(0, 254))
def test_the_scale_is_the_operators_to_the_bit(mantissa, exponent):
    around = torch.arange(mantissa, mantissa + 4096, dtype=torch.int32).clamp(max=2**23 - 1)
    amax = (around + exponent * 2**23).view(torch.float32)
    for fp8_dtype in (E4M3, E5M2):
        scale = inductor._scale(amax, torch.finfo(fp8_dtype).max, 0.0)
        assert_same_bits([scale], [ops.scale_from_amax(amax, fp8_dtype)])


@dtypes
def test_shapes_and_strides(device, dtype):
    wide = torch.randn(6, 10, 4, device=device).to(dtype)
    for x in (wide, wide[1:, ::3], wide.transpose(0, 1), wide[0].t(), wide[0, 0], wide[:, :1, :1]):
        args = x, E4M3, True, True
        assert_same_bits(inductor.quantize_current(*args), ops.quantize_current(*args))
    for x in (wide[0, 0, 0], wide[:0], wide[:, :, :0]):
        assert inductor.quantize_current(x, E4M3) is NotImplemented
    assert inductor.quantize_current(wide > 0, E4M3) is NotImplemented


PRODUCERS = {
    "a product": lambda x, y: silu(x) * y,
    "a norm": lambda x, y: rms_norm(x + y, x.shape[-1:]),
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch 2.11's
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("producer", list(PRODUCERS))
def test_the_bytes_are_those_of_what_the_producer_gives(device, dtype, producer):
    prepare_compilers()
    reset()

    def function(x, y):
        made = PRODUCERS[producer](x, y)
        return made.clone(), *ops.quantize_current(made, E4M3, True, True)

    compiled = torch.compile(function, fullgraph=True)
    x, y = (torch.randn(64, 96, device=device).to(dtype) for _ in range(2))
    (made, *got), code = run_and_get_code(compiled, x, y)
    assert_same_bits(got, ops.quantize_current(made, E4M3, True, True))
    assert "fp8rs.quantize.default" in code[0] and "ops.fp8rs.quantize_current" not in code[0]
    x[3, 5] = NAN
    made, *got = compiled(x, y)
    assert_same_bits(got, ops.quantize_current(made, E4M3, True, True))
    assert got[-1].isnan()
