"""Tensors passed to Rust through DLPack's C interface."""

import ctypes
import sys
import threading
import weakref

import numpy as np
import pytest
import torch

from internals import core

CUDA = 2
E4M3 = torch.float8_e4m3fn


class NoApi:
    def __dlpack__(self, **_):
        raise AssertionError("not called")


@pytest.mark.parametrize(
    "x", [object(), np.ones((2, 3), np.float32), NoApi()], ids=lambda x: type(x).__name__
)
def test_errors_name_arguments_that_are_not_tensors(x):
    out = torch.full((2, 3), 7.0)
    message = rf"is of type {type(x).__name__}; it must be a torch tensor$"
    with pytest.raises(TypeError, match=f"^step {message}"):
        core.random_uniform(out, 1, step=x)
    with pytest.raises(TypeError, match=rf"^xs\[1\] {message}"):
        core.multi_quantize([torch.ones(2, 3), x], torch.ones(2), [out, out])
    assert (out == 7).all()


def test_the_negative_bit_is_applied():
    """The imaginary part of a conjugate is a view that torch negates when it reads it."""
    x = torch.conj(torch.complex(torch.ones(2, 4), torch.full((2, 4), 3.0))).imag
    assert x.is_neg()
    out = torch.zeros(2, 4, dtype=E4M3)
    with pytest.raises(ValueError, match=r"^x is a view that torch negates .* x\.resolve_neg\(\)"):
        core.random_uniform(x, 1)
    assert (x == -3).all()
    row, _ = torch.ops.fp8rs.quantize(x, torch.ones(()), E4M3, True, False)
    torch.ops.fp8rs.multi_quantize([x], torch.ones(1), [out])
    assert (row.float() == -3).all() and (out.float() == -3).all()


def test_a_call_releases_the_interpreter_lock():
    out = torch.empty(1 << 24)
    begun = threading.Event()
    counts = [0]
    counts_seen = []

    def fill():
        begun.set()
        counts_seen.append(counts[0])
        core.random_uniform(out, 1)
        counts_seen.append(counts[0])

    interval = sys.getswitchinterval()
    # With this interval, no thread is forced to switch, so the call must release the lock itself.
    sys.setswitchinterval(60)
    try:
        thread = threading.Thread(target=fill)
        thread.start()
        begun.wait()
        for _ in range(100):
            counts[0] += 1
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert counts_seen == [0, 100]


# --- a minimal exporter of DLPack tensors ---


class Tensor(ctypes.Structure):
    """``DLTensor``."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


_LEND = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Tensor))
_STREAM = ctypes.PYFUNCTYPE(
    ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p)
)


class ExchangeApi(ctypes.Structure):
    """``DLPackExchangeAPI``."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("prev_api", ctypes.c_void_p),
        ("allocator", ctypes.c_void_p),
        ("from_object", ctypes.c_void_p),
        ("to_object", ctypes.c_void_p),
        ("lend", _LEND),
        ("current_stream", _STREAM),
    ]


SHAPE = (ctypes.c_int64 * 2)(2, 3)
STRIDES = (ctypes.c_int64 * 2)(3, 1)


@_STREAM
def current_stream(_, __, out):
    out[0] = 0
    return 0


def capsule(pointer, name):
    """Return a capsule. ``name`` must outlive it."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype = ctypes.py_object
    new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return new(pointer, name, None)


NAME = b"dlpack_exchange_api"


def test_list_elements_stay_alive_until_the_call_ends():
    """Exporting the second element clears the list, which holds the only references."""
    tensors = [torch.full((1 << 16,), 3.0)]
    alive = []
    first = weakref.ref(tensors[0])
    values = (ctypes.c_float * 6)(*[1.0] * 6)

    @_LEND
    def lend(_, out):
        tensors.clear()
        alive.append(first() is not None)
        out[0] = Tensor(ctypes.addressof(values), 1, 0, 2, 2, 32, 1, SHAPE, STRIDES, 0)
        return 0

    api = ExchangeApi(1, 3, None, None, None, None, lend, current_stream)
    # The core caches types and their interfaces forever.
    KEPT.append((api, lend))
    emptying = type(
        "Emptying", (), {"__dlpack_c_exchange_api__": capsule(ctypes.addressof(api), NAME)}
    )
    tensors.append(emptying())
    outs = [torch.zeros(1 << 16, dtype=E4M3), torch.zeros(2, 3, dtype=E4M3)]
    core.multi_quantize(tensors, torch.ones(2), outs)
    assert (tensors, alive) == ([], [True])
    assert [out.float().unique().tolist() for out in outs] == [[3], [1]]
    assert first() is None


KEPT = []


@_LEND
def lend_elsewhere(_, out):
    out[0] = Tensor(256, CUDA, 63, 2, 2, 32, 1, SHAPE, STRIDES, 0)
    return 0


ELSEWHERE = ExchangeApi(1, 3, None, None, None, None, lend_elsewhere, current_stream)


class MatrixElsewhere:
    """A tensor on a device type that does not exist."""

    __dlpack_c_exchange_api__ = capsule(ctypes.addressof(ELSEWHERE), NAME)


def test_an_error_contains_the_code_of_the_driver():
    with pytest.raises(core.CudaError) as raised:
        core.random_uniform(MatrixElsewhere(), 1)
    error = raised.value
    assert not error.is_out_of_memory
    if error.code is None:
        # Without a driver, the error has no code.
        assert error.name is None and "libcuda failed" in str(error)
    else:
        assert error.name in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE")
        assert error.code in (100, 101) and error.name in str(error)
