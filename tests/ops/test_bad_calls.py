"""Bad calls of every kind raise an exception that names the argument, and write nothing."""

import re

import pytest
import torch

from cases import all_codes, scalar
from internals import core
from oracle.compare import same
from oracle.elements import E4M3

ops = torch.ops.fp8rs
E8M0 = torch.float8_e8m0fnu
F64, I32 = torch.float64, torch.int32


class Call:
    """Valid arguments. Each bad call replaces one of them."""

    def __init__(self, device):
        self.x = torch.linspace(-3, 3, 48, device=device).view(6, 8)
        self.scale = scalar(0.5, device)
        self.amax = scalar(1.0, device)
        self.two = torch.full((2,), 0.5, device=device)
        self.row = self.allocate(6, 8, E4M3)
        self.col = self.allocate(8, 6, E4M3)
        self.one = self.allocate(1, 1, torch.float32)
        self.vector = self.allocate(1, 2, torch.float32).view(2)
        self.codes = all_codes(E4M3, device, 6, 8)
        self.wide = self.allocate(6, 8, torch.float32)
        self.flat = torch.full((256,), 0xAA, dtype=torch.uint8, device=device)

    def allocate(self, rows, cols, dtype):
        bytes_ = torch.full((rows * cols * dtype.itemsize,), 0xAA, dtype=torch.uint8)
        return bytes_.to(self.x.device).view(dtype).view(rows, cols)

    def tensors(self):
        return {name: t for name, t in vars(self).items() if isinstance(t, torch.Tensor)}

    def flat_codes(self, start, rows, cols):
        return self.flat[start : start + rows * cols].view(E4M3).view(rows, cols)


def misaligned(t):
    """Return the same values at an address that is one byte off alignment."""
    raw = torch.empty(t.numel() * t.element_size() + 8, dtype=torch.uint8, device=t.device)
    address = torch.frombuffer(memoryview(raw.numpy())[1 : 1 + t.numel() * 4], dtype=torch.float32)
    return address.view(t.shape)


class Wrapper(torch.Tensor):
    """A tensor subclass without memory of its own."""

    @staticmethod
    def __new__(cls, t):
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype, device=t.device)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError("not called")


#: For each fault: the exception, a pattern of its message, and the call.
BAD = {
    # Dtypes.
    "x float64": (TypeError, "^x has dtype float64", lambda c: ops.amax(c.x.to(F64))),
    "x int32": (
        TypeError,
        "^x has dtype int32",
        lambda c: ops.quantize(c.x.to(I32), c.scale, E4M3),
    ),
    "x bool": (TypeError, "^x has dtype bool", lambda c: ops.quantize_current(c.x > 0, E4M3)),
    "x complex": (TypeError, "^x has dtype complex64", lambda c: ops.amax(c.x.cfloat())),
    "x codes": (TypeError, "^x has dtype float8_e4m3fn", lambda c: ops.amax(c.codes)),
    "x uint8": (TypeError, "^x has dtype uint8", lambda c: ops.amax(c.flat)),
    "xs[1] int32": (
        TypeError,
        r"^xs\[1\] has dtype int32",
        lambda c: ops.multi_amax([c.x, c.x.to(I32)]),
    ),
    "scale bf16": (
        TypeError,
        "^scale has dtype bfloat16.*must be float32",
        lambda c: ops.quantize(c.x, c.scale.bfloat16(), E4M3),
    ),
    "scales float64": (
        TypeError,
        "^scales has dtype float64",
        lambda c: ops.multi_quantize([c.x], c.two.to(F64)[:1], [c.row]),
    ),
    "amax float64": (
        TypeError,
        "^amax has dtype float64",
        lambda c: ops.quantize_delayed(c.x, c.scale, c.amax.to(F64), E4M3),
    ),
    "amax bf16": (
        TypeError,
        "^amax has dtype bfloat16",
        lambda c: ops.scale_from_amax(c.amax.bfloat16(), E4M3),
    ),
    "codes float32": (TypeError, "^codes has dtype float32", lambda c: ops.transpose(c.x)),
    "codes E8M0": (
        TypeError,
        "^codes has dtype float8_e8m0fnu",
        lambda c: ops.transpose(c.codes.view(E8M0)),
    ),
    "dequantize codes": (
        TypeError,
        "^codes has dtype float32",
        lambda c: ops.dequantize(c.x, c.scale, [-1, -1], torch.float32),
    ),
    "dequantize scale": (
        TypeError,
        "^scale has dtype float16.*float32 or float8_e8m0fnu",
        lambda c: ops.dequantize(c.codes, c.scale.half(), [-1, -1], torch.float32),
    ),
    "outs[0] float32": (
        TypeError,
        r"^outs\[0\] has dtype float32",
        lambda c: ops.multi_quantize([c.x], c.two[:1], [c.wide]),
    ),
    "fp8_dtype float32": (
        TypeError,
        "^fp8_dtype is torch.float32",
        lambda c: ops.quantize(c.x, c.scale, torch.float32),
    ),
    "fp8_dtype fnuz": (
        TypeError,
        "^fp8_dtype is torch.float8_e4m3fnuz",
        lambda c: ops.quantize_current(c.x, torch.float8_e4m3fnuz),
    ),
    "fp8_dtype of a scale": (
        TypeError,
        "^fp8_dtype is torch.uint8",
        lambda c: ops.scale_from_amax(c.amax, torch.uint8),
    ),
    "fp8_dtype delayed": (
        TypeError,
        "^fp8_dtype is torch.float8_e8m0fnu",
        lambda c: ops.quantize_delayed(c.x, c.scale, c.amax, E8M0),
    ),
    "dtype float64": (
        TypeError,
        "^dtype is torch.float64",
        lambda c: ops.dequantize(c.codes, c.scale, [-1, -1], F64),
    ),
    # Shapes and lengths.
    "scale two": (ValueError, "^scale has shape", lambda c: ops.quantize(c.x, c.two, E4M3)),
    "scale empty": (ValueError, "^scale has shape", lambda c: ops.quantize(c.x, c.two[:0], E4M3)),
    "amax two": (
        ValueError,
        "^amax has shape",
        lambda c: ops.quantize_delayed(c.x, c.scale, c.two, E4M3),
    ),
    "scales short": (
        ValueError,
        "^scales has 1 elements; it must have 2, as many as xs",
        lambda c: ops.multi_quantize([c.x, c.x], c.two[:1], [c.row, c.row]),
    ),
    "scales column": (
        ValueError,
        "^scales has shape",
        lambda c: ops.multi_quantize([c.x, c.x], c.two.view(2, 1), [c.row, c.row]),
    ),
    "outs short": (
        ValueError,
        "^outs has 1 elements",
        lambda c: ops.multi_quantize([c.x, c.x], c.two, [c.row]),
    ),
    "outs[1] transposed": (
        ValueError,
        r"^outs\[1\] has shape \(8, 6\).*\(6, 8\), the shape of xs\[1\]",
        lambda c: ops.multi_quantize([c.x, c.x], c.two, [c.row, c.col]),
    ),
    "amaxes short": (
        ValueError,
        "^amaxes has 1 elements",
        lambda c: ops.multi_quantize_delayed(
            [c.x, c.x], c.two, c.two.clone()[:1], [c.row, c.col.t()]
        ),
    ),
    "scale not a grid": (
        ValueError,
        "^scale has shape.*each block",
        lambda c: ops.dequantize(c.codes, c.two, [1, -1], torch.float32),
    ),
    # Numbers.
    "block of one": (ValueError, "^block is", lambda c: ops.dequantize(c.codes, c.scale, [1], F64)),
    "block 0": (
        ValueError,
        "^block has the size 0",
        lambda c: ops.dequantize(c.codes, c.scale, [0, -1], torch.float32),
    ),
    "block -2": (
        ValueError,
        "^block has the size -2",
        lambda c: ops.dequantize(c.codes, c.scale, [-1, -2], torch.float32),
    ),
    "amax_epsilon negative": (
        ValueError,
        "^amax_epsilon is -1",
        lambda c: ops.scale_from_amax(c.amax, E4M3, False, -1.0),
    ),
    "amax_epsilon NaN": (
        ValueError,
        "^amax_epsilon is NaN",
        lambda c: ops.quantize_current(c.x, E4M3, amax_epsilon=float("nan")),
    ),
    "amax_epsilon past float32": (
        ValueError,
        "^amax_epsilon is inf",
        lambda c: ops.quantize_current(c.x, E4M3, amax_epsilon=1e300),
    ),
    "margin 128": (
        ValueError,
        "^margin is 128",
        lambda c: ops.scale_from_amax(c.amax, E4M3, margin=128),
    ),
    "margin past int32": (
        ValueError,
        "^margin is ",
        lambda c: ops.scale_from_amax(c.amax, E4M3, margin=1 << 40),
    ),
    "core level": (ValueError, "^level is", lambda c: core.set_cpu_simd("sse")),
    # Missing arguments.
    "no direction": (
        ValueError,
        "^rowwise is absent, and so is columnwise",
        lambda c: ops.quantize(c.x, c.scale, E4M3, False, False),
    ),
    "no direction, current": (
        ValueError,
        "^rowwise is absent, and so is columnwise",
        lambda c: ops.quantize_current(c.x, E4M3, False, False),
    ),
    "no direction, delayed": (
        ValueError,
        "^rowwise is absent, and so is columnwise",
        lambda c: ops.quantize_delayed(c.x, c.scale, c.amax, E4M3, False, False),
    ),
    # Arguments of functions of the Rust core, which receives Python objects unchecked.
    "core xs a number": (
        TypeError,
        "^xs is of type int",
        lambda c: core.multi_quantize(3, c.two, [c.row]),
    ),
    "core outs[1] None": (
        TypeError,
        r"^outs\[1\] is of type NoneType",
        lambda c: core.multi_quantize([c.x, c.x], c.two, [c.row, None]),
    ),
    "core scales a number": (
        TypeError,
        "^scales is of type float",
        lambda c: core.multi_quantize([c.x], 1.0, [c.row]),
    ),
    "core argument missing": (TypeError, "'outs'", lambda c: core.multi_quantize([c.x], c.two)),
    # Memory.
    "core x meta": (
        TypeError,
        "^x must be a dense tensor with storage: Cannot pack tensors on meta$",
        lambda c: core.random_uniform(c.wide.to("meta"), 1),
    ),
    "core x sparse": (
        TypeError,
        "^x must be a dense tensor with storage",
        lambda c: core.random_uniform(c.x.cpu().to_sparse(), 1),
    ),
    "core x without memory": (
        ValueError,
        r"^xs\[0\] has 48 elements and a null data pointer",
        lambda c: core.multi_quantize([Wrapper(c.x)], c.two[:1], [c.row]),
    ),
    "core out without memory": (
        ValueError,
        "^x has 48 elements and a null data pointer",
        lambda c: core.random_uniform(Wrapper(c.wide), 1),
    ),
    "core x no matrix": (
        ValueError,
        r"^x is of shape \[2, 2, 3\] with strides \[3, 6, 1\].*must be contiguous",
        lambda c: core.random_uniform(c.wide.view(-1)[:12].view(2, 2, 3).transpose(0, 1), 1),
    ),
    "core x expanded": (
        ValueError,
        "^x has strides .*overlap",
        lambda c: core.random_uniform(c.wide[:1].expand(6, 8), 1),
    ),
    "outs share memory": (
        ValueError,
        r"^outs\[\d\] overlaps outs\[\d\]",
        lambda c: ops.multi_quantize(
            [c.x, c.x], c.two, [c.flat_codes(0, 6, 8), c.flat_codes(40, 6, 8)]
        ),
    ),
    "amaxes are scales": (
        ValueError,
        "^amaxes overlaps scales",
        lambda c: ops.multi_quantize_delayed([c.x, c.x], c.two, c.two, [c.row, c.col.t()]),
    ),
    "amax is the scale": (
        ValueError,
        "^amax overlaps scale",
        lambda c: ops.quantize_delayed(c.x, c.amax, c.amax, E4M3),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_name_the_argument_and_write_nothing(device, case):
    exception, message, call = BAD[case]
    good = Call(device)
    before = {name: t.clone() for name, t in good.tensors().items()}
    # Compare the exact type, because the contract excludes subclasses.
    with pytest.raises(exception) as raised:
        call(good)
    assert type(raised.value) is exception
    assert re.search(message, str(raised.value)), str(raised.value)
    for name, t in good.tensors().items():
        assert same(t, before[name]), f"{name} was written to"


def test_the_table_is_long_enough():
    assert len(BAD) >= 40


def test_misaligned_memory_is_refused():
    with pytest.raises(ValueError, match=r"^x starts at an address"):
        ops.amax(misaligned(torch.ones(3, 4)))


def test_an_empty_list_has_no_device():
    with pytest.raises((RuntimeError, ValueError), match="multi_amax"):
        ops.multi_amax([])


def test_meta_tensors_do_not_mix(device):
    """For a meta argument torch calls the kernel that only allocates outputs."""
    x = torch.randn(2, 4, device=device)
    meta = torch.ones((), device="meta")
    amax = torch.ones((), device=device)
    for call, message in [
        (lambda: ops.quantize(x, meta, E4M3), "^scale is on meta and x is on c"),
        (lambda: ops._quantize_delayed(x, amax, meta, E4M3), "^amax is on meta and x is on c"),
        (
            lambda: ops.quantize_blocks(
                x, E4M3, [1, -1], torch.float32, column_scale=meta.expand(2)
            ),
            "^column_scale is on meta and x is on c",
        ),
        (lambda: ops.multi_amax([x, x.to("meta")]), "^xs is on meta and xs is on c"),
        (lambda: ops.dequantize(x.to(E4M3), meta, [-1, -1], x.dtype), "^scale is on meta"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.gpu
def test_tensors_on_different_devices_are_refused():
    cpu = Call("cpu")
    cuda = Call("cuda")
    for call, message in [
        (lambda: ops.quantize(cuda.x, cpu.scale, E4M3), "^scale is on cpu; it must be on cuda:0"),
        (lambda: ops.quantize(cpu.x, cuda.scale, E4M3), "^(x|scale) is on c"),
        (lambda: ops.multi_amax([cuda.x, cpu.x]), r"^xs\[1\] is on cpu"),
        (lambda: core.multi_quantize([cuda.x], cuda.two[:1], [cpu.row]), r"^outs\[0\] is on cpu"),
        (lambda: core.multi_quantize([cpu.x], cpu.two[:1], [cuda.row]), r"^outs\[0\] is on cuda"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
