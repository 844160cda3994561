"""Objects that torch passes to Rust are released, and calls do not depend on the caller's modes."""

import ctypes
import gc
import weakref

import pytest
import torch
from torch.overrides import TorchFunctionMode

from distributed.models import same_bytes
from internals import core

ops = torch.ops.fp8rs
E4M3, E8M0, F32 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.float32


def calls(x):
    """One argument and result of each kind. ``x`` is (2, 32)."""
    unit_scale = torch.ones(())
    scales = torch.ones(2, 1)
    after = torch.ones(1)
    return {
        "a tensor": lambda: ops.amax(x),
        "one that is copied": lambda: ops.amax(x.view(2, 2, 16).transpose(0, 1)),
        "a list of tensors": lambda: ops.multi_amax([x, x]),
        "outputs": lambda: ops.quantize(x, unit_scale, E4M3, True, False),
        "an optional tensor": lambda: ops.quantize(x, unit_scale, E4M3, True, False, after),
        "a list of integers": lambda: ops.quantize_blocks(x, E4M3, [1, 32], E8M0, True, True),
        "a string": lambda: ops.quantize_blocks(
            x, E4M3, [1, 32], E8M0, True, False, rounding="floor"
        ),
        "a given amax": lambda: ops.quantize_blocks(
            x, E4M3, [1, -1], F32, True, False, amax=scales
        ),
        "a refused call": lambda: refused(x),
    }


def refused(x):
    with pytest.raises(ValueError, match="block"):
        ops.block_amax(x, [3, 3])


every_kind = pytest.mark.parametrize("kind", list(calls(torch.ones(2, 32))))


@every_kind
def test_arguments_are_freed_with_their_owner(kind):
    x = torch.ones(2, 32)
    result = calls(x)[kind]()
    gone = weakref.ref(x)
    del x, result
    gc.collect()
    assert gone() is None


def block_amax(x: torch.Tensor, block: list[int]) -> torch.Tensor:
    return torch.ops.fp8rs.block_amax(x, block)


class Swallows(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        try:
            return func(*args, **(kwargs or {}))
        except ValueError:
            return None


def test_a_mode_that_catches_a_kernels_error_does_not_end_the_process():
    """Function modes do not see scripted calls. An error in one once ended the process."""
    scripted = torch.jit.script(block_amax)
    with Swallows(), pytest.raises(RuntimeError, match="block is"):
        scripted(torch.ones(2, 32), [3, 3])


class Mallinfo(ctypes.Structure):
    """glibc's mallinfo2. ``uordblks`` is the number of allocated bytes."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@every_kind
def test_calls_do_not_leak_memory(kind):
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("needs glibc 2.33")
    libc.mallinfo2.restype = Mallinfo
    call = calls(torch.ones(2, 32))[kind]

    def allocated():
        gc.collect()
        return libc.mallinfo2().uordblks

    def grown():
        before = allocated()
        for _ in range(1000):
            call()
        return allocated() - before

    # Each collection would otherwise walk the objects that earlier tests imported.
    gc.collect()
    gc.freeze()
    grown()
    # A leak is at least 16 bytes per call. The memory of other threads varies.
    assert any(grown() < 12_000 for _ in range(3))


def test_a_write_to_a_lazy_clone_does_not_change_the_original():
    """torch shares memory until the clone is written."""
    first = torch.zeros(())
    amax = torch._lazy_clone(first)
    ops._quantize_delayed(torch.full((2, 2), 3.0), torch.ones(()), amax, E4M3, True, False)
    assert (amax, first) == (3, 0)
    codes = torch.zeros(2, 2).to(E4M3)
    out = torch._lazy_clone(codes)
    ops.multi_quantize([torch.full((2, 2), 3.0)], torch.ones(1), [out])
    assert (out.float() == 3).all()
    assert (codes.float() == 0).all()


def test_tensors_with_more_than_64_dimensions_are_refused():
    x = torch.ones([1] * 65)
    with pytest.raises(ValueError, match="65 dimensions; at most 64 are supported"):
        ops.quantize(x, torch.ones(()), E4M3, True, False)


def test_rounding_is_checked_for_formats_that_do_not_use_it():
    x = torch.ones(2, 32)
    with pytest.raises(ValueError, match="rounding is"):
        ops.quantize_blocks(x, E4M3, [1, 128], F32, True, False, rounding="up")


def step(**changes):
    """A step of AdamW with two tensors."""
    names = ("grads", "exp_avgs", "exp_avg_sqs", "params", "masters")
    lists = {name: [torch.ones(2, 2) for _ in range(2)] for name in names}
    lists |= {"steps": [torch.ones(()) for _ in range(2)], "offsets": [0, 4], "streams": [0, 1]}
    lists |= {name: [] for name in ("scales", "new_scales", "amaxes")}
    lists |= {name: [] for name in ("exp_avg_ranges", "exp_avg_sq_ranges")}
    numbers = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.0}
    absent = dict.fromkeys(("lr_tensor", "grad_scale", "found_inf", "seed"))
    core.adamw(**{**lists, **changes}, **numbers, **absent, maximize=False, block=[])


def test_a_step_refuses_lists_of_different_lengths_and_negative_offsets():
    step()
    with pytest.raises(ValueError, match="masters has 3 elements; it must have 2"):
        step(masters=[torch.ones(2, 2) for _ in range(3)])
    with pytest.raises(ValueError, match="offsets is -1; it must be at least 0"):
        step(offsets=[0, -1])


TINY = {
    "native": lambda: ops.scale_from_amax(torch.zeros(1), E4M3, False, 1e-40, 0),
    "random": lambda: _filled(lambda out: core.random_uniform(out, 1, 0, 1e-40, 3e-40)),
}


def _filled(write):
    out = torch.ones(1)
    write(out)
    return out


@pytest.mark.parametrize("call", list(TINY))
def test_a_small_argument_is_kept_if_torch_flushes_subnormals(call):
    expected = TINY[call]()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot")
    try:
        actual = TINY[call]()
    finally:
        torch.set_flush_denormal(False)
    assert same_bytes(actual, expected)
    assert actual != 0
