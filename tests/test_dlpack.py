"""Arguments that are no torch tensors: through ``__dlpack__``, and whose stream a call runs on."""

import ctypes
import sys
import weakref

import numpy as np
import pytest
import torch

import reference
from fp8rs import _core
from reference import E4M3, codes, same

CUDA = 2
LEGACY_STREAM = 1


def test_numpy_arrays_are_read_and_written():
    x = np.linspace(-3, 3, 48, dtype=np.float32).reshape(6, 8)
    out = np.full((1, 1), 7, dtype=np.float32)
    for view in (x, x.T, x[::2, 1::3], x[::-1], x.astype(np.float16)):
        _core.amax(view, out)
        assert out == np.abs(view.astype(np.float32)).max()
    amaxes, scales = np.array([1.5, 448.0], np.float32), np.zeros(2, np.float32)
    _core.scale_from_amax(amaxes, scales, "e4m3")
    assert scales.tolist() == [np.float32(1.5) / np.float32(448), 1.0]


def test_numpy_arrays_and_tensors_go_together():
    x = np.linspace(-3, 3, 48, dtype=np.float32).reshape(6, 8)
    scale = np.array(0.5, np.float32)
    row, col = torch.empty(6, 8, dtype=E4M3), torch.empty(8, 6, dtype=E4M3)
    _core.quantize(x, scale, row, col)
    expected = reference.quantize(torch.from_numpy(x), torch.tensor(0.5), E4M3)
    assert same(codes(row), expected)
    assert same(codes(col), expected.t())


def test_lists_of_numpy_arrays_are_read_and_written():
    xs = [np.full((n, 3), n, np.float32) for n in (1, 5, 0)]
    out = np.zeros(3, np.float32)
    _core.multi_amax(xs, out)
    assert out.tolist() == [1, 5, 0]
    _core.multi_amax((torch.ones(2), xs[1]), out[:2])
    assert out.tolist() == [1, 5, 0]


def test_a_read_only_output_is_refused():
    x, out = np.ones((2, 3), np.float32), np.full((1, 1), 7, np.float32)
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"^out is read-only; an output must be writable$"):
        _core.amax(x, out)
    assert out == 7
    x.flags.writeable = False
    writable = np.zeros((1, 1), np.float32)
    _core.amax(x, writable)
    assert writable == 1


class Array:
    """An array with what a case replaces."""

    def __init__(self, device=(1, 0), export=None):
        self.array = np.ones((2, 3), np.float32)
        self.device, self.export, self.streams = device, export, []

    def __dlpack__(self, *, max_version, stream=None):
        self.streams.append(stream)
        if self.export is not None:
            return self.export()
        return self.array.__dlpack__(max_version=max_version)

    def __dlpack_device__(self):
        return self.device


class NoDevice:
    def __dlpack__(self, **_):
        raise AssertionError("not called")


class FailingDevice(Array):
    def __dlpack_device__(self):
        raise RuntimeError("device lost")


def refuse():
    raise BufferError("not today")


@pytest.mark.parametrize(
    "x, message",
    [
        (object(), "^x is of type object; it must be a tensor$"),
        (NoDevice(), "^x is of type NoDevice, which has no __dlpack_device__$"),
        (FailingDevice(), "^x cannot be exported: RuntimeError: device lost$"),
        (Array(device="cpu"), "^x cannot be exported: "),
        (Array(export=refuse), "^x cannot be exported: BufferError: not today$"),
        (Array(export=lambda: 3), r"^x exports no DLPack 1\.x tensor"),
        (Array(export=np.ones(3).__dlpack__), r"^x exports no DLPack 1\.x tensor"),
        (np.ones((2, 2)), "^x has dtype float64"),
        (np.ones((2, 2), np.int8), "^x has dtype int8"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_exports_no_tensor_is_refused_by_name(x, message):
    out = np.full((1, 1), 7, np.float32)
    with pytest.raises(TypeError, match=message):
        _core.amax(x, out)
    with pytest.raises(TypeError, match=message.replace("^x", r"^xs\[1\]")):
        _core.multi_amax([np.ones(2, np.float32), x], np.zeros(2, np.float32))
    assert out == 7


def test_an_exported_array_is_given_back():
    array = np.ones((2, 3), np.float32)
    before = sys.getrefcount(array)
    out = np.zeros((1, 1), np.float32)
    _core.amax(array, out)
    with pytest.raises(ValueError, match=r"^out has shape"):
        _core.amax(array, np.zeros((2, 2), np.float32))
    assert sys.getrefcount(array) == before


def test_elements_of_a_list_live_until_the_call_ends():
    """The second element's export empties the list, which held the only references."""
    arrays, alive = [torch.full((1 << 16,), 3.0)], []
    first = weakref.ref(arrays[0])

    class Emptying(Array):
        def __dlpack__(self, **keywords):
            arrays.clear()
            alive.append(first() is not None)
            return super().__dlpack__(**keywords)

    arrays.append(Emptying())
    out = np.zeros(2, np.float32)
    _core.multi_amax(arrays, out)
    assert (arrays, alive) == ([], [True])
    assert out.tolist() == [3, 1]
    assert first() is None


# --- streams, with a library of our own making in the place of torch on CUDA ---


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
current_streams = []


@_LEND
def lend(_, out):
    # Not memory that a kernel could have: a call must be refused before it is used.
    out[0] = Tensor(256, CUDA, 0, 2, 2, 32, 1, SHAPE, STRIDES, 0)
    return 0


@_STREAM
def current_stream(_, __, out):
    out[0] = current_streams[-1]
    return 0


def capsule(pointer, name):
    """``name`` must outlive the capsule."""
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = (
        ctypes.py_object,
        [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p],
    )
    return new(pointer, name, None)


NAME = b"dlpack_exchange_api"
API = ExchangeApi(1, 3, None, None, None, None, lend, current_stream)


class CudaTensor:
    """Of a library that has the exchange API, and a current stream."""

    __dlpack_c_exchange_api__ = capsule(ctypes.addressof(API), NAME)


@pytest.mark.parametrize(
    "stream, asked",
    [(0x5000, [LEGACY_STREAM, 0x5000]), (0, [LEGACY_STREAM])],
    ids=["side stream", "default stream"],
)
def test_a_tensor_that_names_a_stream_overrides_an_array_that_names_none(stream, asked):
    """The array is made ready on the legacy stream at first, then on the one that is used."""
    current_streams.append(stream)
    array = Array(device=(CUDA, 0))
    # The array's memory is on the CPU, so that nothing runs.
    with pytest.raises(ValueError, match=r"^out is on cuda:0; it must be on cpu, where x is"):
        _core.amax(array, CudaTensor())
    assert array.streams == asked


def test_an_array_after_a_tensor_is_made_ready_on_the_tensors_stream():
    current_streams.append(0x6000)
    array = Array(device=(CUDA, 0))
    with pytest.raises(ValueError, match=r"^out is on cpu; it must be on cuda:0, where x is"):
        _core.amax(CudaTensor(), array)
    assert array.streams == [0x6000]


def test_arrays_alone_use_the_legacy_stream():
    first, second = Array(device=(CUDA, 0)), Array(device=(CUDA, 0))
    out = np.zeros(2, np.float32)
    _core.multi_amax([first, second], out)
    assert (first.streams, second.streams) == ([LEGACY_STREAM], [LEGACY_STREAM])


@_LEND
def lend_elsewhere(_, out):
    out[0] = Tensor(256, CUDA, 63, 2, 2, 32, 1, SHAPE, STRIDES, 0)
    return 0


@_LEND
def lend_one_elsewhere(_, out):
    out[0] = Tensor(512, CUDA, 63, 0, 2, 32, 1, SHAPE, STRIDES, 0)
    return 0


ELSEWHERE = ExchangeApi(1, 3, None, None, None, None, lend_elsewhere, current_stream)
ONE_ELSEWHERE = ExchangeApi(1, 3, None, None, None, None, lend_one_elsewhere, current_stream)


class MatrixElsewhere:
    """On a device that no machine has."""

    __dlpack_c_exchange_api__ = capsule(ctypes.addressof(ELSEWHERE), NAME)


class ScalarElsewhere:
    """One element there."""

    __dlpack_c_exchange_api__ = capsule(ctypes.addressof(ONE_ELSEWHERE), NAME)


def test_the_drivers_code_comes_with_its_error():
    current_streams.append(0)
    with pytest.raises(_core.CudaError) as raised:
        _core.amax(MatrixElsewhere(), ScalarElsewhere())
    error = raised.value
    assert not error.is_out_of_memory
    if error.code is None:
        # No driver on this machine: nobody gave a code.
        assert error.name is None and "libcuda failed" in str(error)
    else:
        assert error.name in ("CUDA_ERROR_NO_DEVICE", "CUDA_ERROR_INVALID_DEVICE")
        assert error.code in (100, 101) and error.name in str(error)
