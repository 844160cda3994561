"""The operators' kernels in Rust, registered through torch's C interface."""

import pytest
import torch

import fp8rs.gemm.grouped  # noqa: F401, registers operators
from fp8rs.ops import define
from internals import core
from oracle.elements import E4M3

ops = torch.ops.fp8rs

#: Operators that declare a write, because only Python can increment a version counter, and
#: operators composed of torch's.
IN_PYTHON = {"_note_amax", "multi_quantize", "multi_quantize_delayed", "quantize_delayed"}
IN_PYTHON |= {"adamw_", "random_uniform_", "sum_rows_", "_scaled_mm", "_observe"}
IN_PYTHON |= {"grouped_mm", "grouped_mm_plain", "grouped_wgrad"}


def test_operators_have_a_kernel_in_rust():
    registered = {
        schema.name.removeprefix("fp8rs::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("fp8rs::")
    }
    assert registered - IN_PYTHON == define.NATIVE


def test_a_failed_allocation_of_outputs_raises_torchs_error():
    huge = torch.empty(1, dtype=torch.float32).expand(1 << 40, 1 << 10)
    with pytest.raises(RuntimeError, match=r"allocate|memory"):
        ops.quantize(huge, torch.tensor(1.0), E4M3)


def test_an_output_that_was_not_requested_is_a_separate_tensor(device):
    """Such outputs share one storage without memory."""
    x = torch.ones(4, 6, device=device)
    scale = torch.tensor(1.0, device=device)
    first, second = (ops.quantize(x, scale, E4M3)[1] for _ in range(2))
    assert (first.shape, first.dtype, first.device) == ((0,), E4M3, x.device)
    assert first is not second
    first.resize_(3).fill_(1.0)
    first.label = "mine"
    third = ops.quantize(x, scale, E4M3)[1]
    assert third.shape == second.shape == (0,)
    assert not hasattr(third, "label")
    with torch.inference_mode():
        assert ops.quantize(x, scale, E4M3)[1].shape == (0,)


def test_errors_are_raised_under_a_torch_function_mode():
    with torch.device("cpu"), pytest.raises(TypeError, match=r"^x has dtype float64"):
        ops.amax(torch.ones(2, dtype=torch.float64))


def test_errors_in_threads_leave_no_state():
    from concurrent.futures import ThreadPoolExecutor

    def bad(i):
        with pytest.raises(ValueError, match=r"^scale has shape"):
            ops.quantize(torch.ones(4, 4), torch.ones(2), E4M3)
        return ops.amax(torch.full((3,), float(i))).item()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(bad, range(40))) == list(range(40))


def test_kernels_release_the_interpreter_lock():
    """Other threads run Python during a long call."""
    import threading

    x = torch.randn(1 << 12, 1 << 12)
    ticks = []
    done = threading.Event()

    def tick():
        while not done.is_set():
            ticks.append(None)
            done.wait(0.0001)

    thread = threading.Thread(target=tick)
    thread.start()
    during = []
    try:
        for _ in range(5):
            before = len(ticks)
            ops.quantize_current(x, E4M3, True, True)
            during.append(len(ticks) - before)
    finally:
        done.set()
        thread.join()
    # If the call held the lock, one tick could pass at its start and one at its end.
    assert max(during) > 3, during


def test_registration_refuses_an_object_without_a_stream_interface():
    with pytest.raises(core.UnsupportedError, match=r"cannot register .*current_work_stream"):
        core.register_kernels(int, object())
