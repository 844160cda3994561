"""The decomposition of current scaling for Inductor gives the operator's bytes."""

from __future__ import annotations

import pytest
import torch
from functorch.compile import make_boxed_func
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo import config as dynamo_config
from torch._dynamo import reset
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.utils import run_and_get_code
from torch.nn.functional import rms_norm, silu

from fp8rs.nn.function import prepare_compilers
from fp8rs.ops import inductor
from oracle.compare import same

ops = torch.ops.fp8rs
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
INF, NAN = float("inf"), float("nan")
SMALLEST = 2.0**-126
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
fp8_dtypes = pytest.mark.parametrize("fp8_dtype", [E4M3, E5M2])


@pytest.fixture(autouse=True)
def on_the_cpu_too(monkeypatch):
    """Apply the decomposition on CPU too, where it is not faster, to compare its bytes."""
    monkeypatch.setattr(inductor, "fuses", inductor.covers)


def assert_same_bits(got, expected):
    for a, b in zip(got, expected, strict=True):
        assert a.stride() == b.stride() and same(a, b)


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
def test_the_scale_equals_the_operators(mantissa, exponent):
    around = torch.arange(mantissa, mantissa + 4096, dtype=torch.int32).clamp(max=2**23 - 1)
    amax = (around + exponent * 2**23).view(torch.float32)
    for fp8_dtype in (E4M3, E5M2):
        scale = inductor.fused_scale(amax, torch.finfo(fp8_dtype).max, 0.0)
        assert_same_bits([scale], [ops.scale_from_amax(amax, fp8_dtype)])


@dtypes
def test_shapes_and_strides_give_the_operators_bytes(device, dtype):
    wide = torch.randn(6, 10, 4, device=device).to(dtype)
    for x in (wide, wide[1:, ::3], wide.transpose(0, 1), wide[0].t(), wide[0, 0], wide[:, :1, :1]):
        args = x, E4M3, True, True
        assert_same_bits(inductor.quantize_current(*args), ops.quantize_current(*args))


@dtypes
def test_unsupported_arguments_use_the_operator(device, dtype):
    x = torch.randn(2, 3, 4, device=device).to(dtype)
    for y in (x[0, 0, 0], x[:0], x[:, :, :0]):
        assert not inductor.covers(y)
        args = y, E4M3, True, True
        assert_same_bits(inductor.quantize_current(*args), ops.quantize_current(*args))


@pytest.mark.parametrize("amax_epsilon", [-1.0, INF, NAN, 1e39])
def test_errors_equal_those_of_the_operator(device, amax_epsilon):
    x = torch.ones(2, 2, device=device)
    for function in (ops.quantize_current, inductor.quantize_current):
        with pytest.raises(ValueError, match=r"^amax_epsilon is"):
            function(x, E4M3, True, False, False, amax_epsilon)
        with pytest.raises(TypeError, match=r"^x has dtype bool"):
            function(x > 0, E4M3)
        with pytest.raises(TypeError, match=r"^fp8_dtype is"):
            function(x, torch.float16)


def test_nothing_is_fused_on_cpu(monkeypatch):
    monkeypatch.undo()
    assert not inductor.fuses(torch.ones(2, 2))


def test_data_dependent_sizes_use_the_operator(device):
    """It is not known whether such a tensor is empty."""
    prepare_compilers()
    reset()

    def function(x, chosen):
        return ops.quantize_current(x[chosen], E4M3, True, True)

    x = torch.randn(8, 32, device=device)
    chosen = torch.arange(8, device=device) % 3 == 0
    with dynamo_config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(function, fullgraph=True)
        for which in (chosen, chosen & False):
            assert_same_bits(compiled(x, which), function(x, which))


PRODUCERS = {
    "a product": lambda x, y: silu(x) * y,
    "a norm": lambda x, y: rms_norm(x + y, x.shape[-1:]),
}


def traced(function):
    """Run the graph that Inductor traces, uncompiled: Inductor's CPU code needs a C++ compiler."""
    texts = []

    def keep(graph, inputs):
        texts.append(graph.code)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep, decompositions=select_decomp_table)
    return torch.compile(function, fullgraph=True, backend=backend), texts


# torch 2.11 emits this warning.
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("producer", list(PRODUCERS))
def test_the_bytes_equal_those_of_the_materialized_input(device, dtype, producer):
    prepare_compilers()
    reset()

    def function(x, y):
        producer_output = PRODUCERS[producer](x, y)
        return producer_output.clone(), *ops.quantize_current(producer_output, E4M3, True, True)

    x, y = (torch.randn(64, 96, device=device).to(dtype) for _ in range(2))
    if device.type == "cuda":
        compiled = torch.compile(function, fullgraph=True)
        # The keys of the caches do not include decompositions.
        with inductor_config.patch(force_disable_caches=True):
            (producer_output, *got), code = run_and_get_code(compiled, x, y)
    else:
        compiled, code = traced(function)
        producer_output, *got = compiled(x, y)
    assert_same_bits(got, ops.quantize_current(producer_output, E4M3, True, True))
    assert "fp8rs.quantize.default" in code[0] and "ops.fp8rs.quantize_current" not in code[0]
    x[3, 5] = NAN
    producer_output, *got = compiled(x, y)
    assert_same_bits(got, ops.quantize_current(producer_output, E4M3, True, True))
    assert got[-1].isnan()
