"""Kernel launches on other GPUs, threads and streams, in graphs, and at first use."""

import ctypes
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from cases import calls, data, ops, scalar
from oracle.elements import FORMATS, WIDE

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
BIG = (3000, 1100)


def same(got, want):
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        bytes_ = [t.detach().cpu().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
        assert torch.equal(*bytes_)


@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("fp8_dtype", FORMATS)
def test_operators_run_on_the_gpu_of_their_tensors(dtype, fp8_dtype):
    """The current GPU does not matter and does not change."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    x = data("cpu", 130, 70, dtype=dtype)
    with torch.cuda.device(0):
        got = calls(x.to("cuda:1"), fp8_dtype)
        assert torch.cuda.current_device() == 0
        assert torch.empty(1, device="cuda").device.index == 0
        assert {t.device.index for t in got} == {1}
        same(got, calls(x, fp8_dtype))


def test_operators_run_in_threads_without_a_context():
    """A thread of autograd has no current context before its first call."""
    x = data("cpu", 130, 70)
    on_gpu = x.to("cuda")
    torch.cuda.synchronize()
    got = []
    thread = threading.Thread(target=lambda: got.extend(calls(on_gpu, E4M3)))
    thread.start()
    thread.join()
    same(got, calls(x, E4M3))


def test_each_stream_has_its_own_workspace():
    """Two streams reduce different tensors concurrently and repeatedly."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    xs = [data("cuda", *BIG, seed=seed) * (seed + 1) for seed in range(2)]
    lists = [[x[:700].contiguous(), x[700:].contiguous()] for x in xs]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(50):
        for stream, x, parts, results in zip(streams, xs, lists, got, strict=True):
            with torch.cuda.stream(stream):
                results += [ops.amax(x), ops.multi_amax(parts).amax()]
                results.append(ops.quantize_current(x, E4M3)[2])
    torch.cuda.synchronize()
    for x, results in zip(xs, got, strict=True):
        amax = x.abs().max().cpu()
        scale = ops.scale_from_amax(amax, E4M3)
        assert {t.item() for t in results} == {amax.item(), scale.item()}


def captured(operate):
    """Capture ``operate`` in a graph after a warm-up on a side stream.

    Return the graph and its outputs.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        operate()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = operate()
    return graph, outputs


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("dtype", WIDE)
@pytest.mark.parametrize("shape", [(16, 8), (1041, 4103), (4096, 4096), (8192, 14352)], ids=str)
def test_current_scaling_is_one_launch(shape, dtype, columnwise):
    """The tensors have one piece, several, as many as the blocks hold on chip, and more."""
    x = torch.randn(shape, device="cuda", dtype=dtype)
    for row, column, value in ((0, 0, 7.0), (-1, -1, -9.0), (shape[0] // 2, 3, float("nan"))):
        x[row, column] = value
        got = ops.quantize_current(x, E4M3, True, columnwise)
        scale = ops.scale_from_amax(ops.amax(x), E4M3)
        want = *ops.quantize(x, scale, E4M3, True, columnwise), scale
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(got, want, strict=True))


def bits(t):
    return t.view(torch.int32 if t.dtype == torch.float32 else torch.uint8)


def test_current_scaling_runs_on_many_streams_at_once():
    """Each launch has only some of its blocks resident, and no block waits for one that is not."""
    streams = [torch.cuda.Stream() for _ in range(6)]
    xs = [torch.randn(4096 + 128 * i, 4096, device="cuda").bfloat16() for i in range(6)]
    wants = []
    for x in xs:
        scale = ops.scale_from_amax(ops.amax(x), E4M3)
        wants.append([*ops.quantize(x, scale, E4M3, True, True), scale])
    torch.cuda.synchronize()
    got = [[] for _ in xs]
    for n in range(40):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                actual = ops.quantize_current(xs[i], E4M3, True, True)
            if n % 13 == 0:
                got[i].append(actual)
    torch.cuda.synchronize()
    for results, want in zip(got, wants, strict=True):
        for actual in results:
            assert all(torch.equal(bits(a), bits(b)) for a, b in zip(actual, want, strict=True))


@pytest.mark.parametrize("shape", [BIG, (3008, 1104), (67, 35)], ids=str)
def test_every_operator_is_captured_and_replays(shape):
    """A replay reads its current input and shares no memory with eager calls."""
    x = data("cuda", *shape, dtype=torch.bfloat16)
    scale = scalar(0.37, "cuda")
    scales = torch.full((2,), 0.37, device="cuda")
    amax = scalar(0.0, "cuda")
    amaxes = torch.zeros(2, device="cuda")
    parts = list(x.split(shape[0] // 2 + 1))

    def outs():
        return [torch.empty(p.shape, dtype=E4M3, device="cuda") for p in parts]

    def operate():
        amax.zero_()
        amaxes.zero_()
        listed = outs()
        delayed = outs()
        ops.multi_quantize(parts, scales, listed)
        row, col = ops.quantize(x, scale, E4M3, True, True)
        return [
            row,
            col,
            *ops.quantize_current(x, E4M3, True, True),
            *ops.quantize_delayed(x, scale, amax, E4M3, True, True),
            amax.clone(),
            *listed,
            ops.multi_quantize_delayed(parts, scales, amaxes, delayed),
            *delayed,
            amaxes.clone(),
            ops.amax(x),
            ops.multi_amax(parts),
            ops.scale_from_amax(ops.multi_amax(parts), E4M3),
            ops.transpose(row),
            ops.dequantize(row, scale, [-1, -1], torch.bfloat16),
        ]

    graph, replayed = captured(operate)
    for seed in range(3):
        x.copy_(data("cpu", *shape, dtype=torch.bfloat16, seed=seed + 7))
        graph.replay()
        eager = operate()
        same(replayed, eager)


def in_a_new_process(script, force_ptx):
    """Return what a script prints.

    It has ``x``, and torch and CUDA are initialized, but fp8rs is not.
    """
    begin = """
        import hashlib, os, sys, threading, torch, fp8rs
        ops, E4M3 = torch.ops.fp8rs, torch.float8_e4m3fn
        x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
        scale, amax = torch.ones((), device="cuda"), torch.zeros((), device="cuda")

        def operate():
            # Several modules, a module's several kernels, and workspaces.
            return [
                *ops.quantize(x, scale, E4M3, True, True),
                *ops.quantize_current(x, E4M3, True, True),
                *ops.quantize_delayed(x, scale, amax, E4M3, True, True),
                *ops.quantize_blocks(x, E4M3, (1, 32), torch.float8_e8m0fnu, True, True),
                *ops.quantize_blocks(x, E4M3, (1, -1), torch.float32, True, True),
            ]

        def digest(tensors):
            parts = [t.cpu().contiguous().view(-1).view(torch.uint8).numpy() for t in tensors]
            return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()

        # torch's memory for the outputs: it may not allocate beside another thread's capture.
        warm = torch.cuda.Stream()
        with torch.cuda.stream(warm):
            held = [torch.empty(200_000, dtype=torch.uint8, device="cuda") for _ in range(64)]
        del held
        torch.cuda.synchronize()
        # Not before: it would forbid the machine code of torch too, which has no PTX for it.
        os.environ["CUDA_FORCE_PTX_JIT"] = sys.argv[1]
    """
    program = textwrap.dedent(begin) + textwrap.dedent(script)
    done = subprocess.run(
        [sys.executable, "-c", program, str(int(force_ptx))],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("force_ptx", [False, True])
def test_first_use_does_not_break_another_threads_capture(force_ptx):
    script = """
        graph, capturing = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        y, failed, got = torch.zeros(1000, device="cuda"), [], []
        y += 0
        torch.cuda.synchronize()

        def first_use():
            try:
                with torch.cuda.stream(warm):
                    got.extend(operate())
            except BaseException as error:
                failed.append(error)

        # Without torch.cuda.graph, which empties the cache. The strictest mode.
        with torch.cuda.stream(capturing):
            graph.capture_begin(capture_error_mode="global")
            y += 1
            thread = threading.Thread(target=first_use)
            thread.start()
            thread.join()
            y += 1
            graph.capture_end()
        assert not failed, failed
        graph.replay()
        torch.cuda.synchronize()
        assert y.unique().item() == 2
        assert digest(got) == digest(operate())
    """
    in_a_new_process(script, force_ptx)


@pytest.mark.parametrize("force_ptx", [False, True])
def test_first_use_may_be_captured(force_ptx):
    script = """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            amax.zero_()
            got = operate()
        graph.replay()
        torch.cuda.synchronize()
        amax.zero_()
        assert digest(got) == digest(operate())
    """
    in_a_new_process(script, force_ptx)


@pytest.mark.parametrize("ordinal", [0, 1])
def test_a_thread_without_a_context_stays_on_its_device(ordinal):
    """The CUDA runtime takes a thread's device from its context.

    Without one, it is the first device.

    On the first device, the context stays current in the thread, as after a call of the runtime.
    cuBLAS warns in threads that have none.
    """
    if torch.cuda.device_count() <= ordinal:
        pytest.skip(f"needs {ordinal + 1} GPUs")
    script = f"""
        import ctypes
        cuda, found = ctypes.CDLL("libcuda.so.1"), []
        out = torch.zeros(4, 8, device="cuda:{ordinal}")
        torch.cuda.synchronize(out.device)

        def context():
            current = ctypes.c_void_p(1)
            assert cuda.cuCtxGetCurrent(ctypes.byref(current)) == 0
            found.append(current.value)

        def call():
            context()
            fp8rs._core.random_uniform(out, 1)
            context()
            found.append(torch.cuda.current_device())

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        torch.cuda.synchronize(out.device)
        assert out.unique().numel() > 1
        assert found[0] is None and (found[1] is not None) == ({ordinal} == 0), found
        assert found[2] == 0
    """
    in_a_new_process(script, False)


def test_threads_that_start_together_load_kernels_once():
    script = """
        results, barrier = [], threading.Barrier(8)

        def first_use():
            with torch.cuda.stream(torch.cuda.Stream()):
                barrier.wait()
                results.append(operate())

        threads = [threading.Thread(target=first_use) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        torch.cuda.synchronize()
        expected = digest(operate())
        assert [digest(result) for result in results] == [expected] * 8
    """
    in_a_new_process(script, True)


def test_machine_code_and_ptx_give_the_same_bytes():
    script = """
        x = (torch.arange(300 * 512, device="cuda") % 997 - 498).view(300, 512).bfloat16()
        print(digest(operate()))
    """
    machine_code, ptx = (in_a_new_process(script, force_ptx) for force_ptx in (False, True))
    assert machine_code == ptx


def test_destroyed_graphs_release_their_workspaces():
    """A capture needs 100,000 slots. If they were not released, the eleventh capture would fail."""
    xs = [torch.ones(8, device="cuda") for _ in range(1000)]
    outs = [torch.empty(8, device="cuda", dtype=E4M3) for _ in xs]
    scales = torch.ones(1000, device="cuda")
    amaxes = torch.zeros(1000, device="cuda")
    used = []
    for _ in range(24):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                ops.multi_quantize_delayed(xs, scales, amaxes, outs)
        amaxes.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert amaxes.unique().tolist() == [1.0]
        graph.reset()
        del graph
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    # A capture that kept its slots would add 0.8 MB. Fifteen of them would add 12 MB. The
    # measurement includes the memory of other processes.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        assert used[-1] - used[8] < 6 << 20


def test_live_graphs_do_not_share_workspaces():
    """Two streams replay them concurrently."""
    xs = [data("cuda", *BIG, seed=seed) * (seed + 1) for seed in range(2)]
    graphs = []
    results = []
    for x in xs:
        graph, got = captured(lambda x=x: ops.amax(x))
        graphs.append(graph)
        results.append(got)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for got, x in zip(results, xs, strict=True):
            assert got.item() == x.abs().max().item()


NANS = [0x7FC00000, 0x7F800001, -0x400000, 0x7FFFFFFF]


@pytest.mark.parametrize("columnwise", [False, True])
@pytest.mark.parametrize("dtype", WIDE)
def test_a_nan_in_a_delayed_amax_is_replaced(dtype, columnwise):
    """The first finite maximum replaces a NaN.

    An infinity remains. Non-finite inputs change nothing.
    """
    x = torch.linspace(-3, 3, 64 * 48, device="cuda").view(64, 48).to(dtype)
    scale = scalar(0.25, "cuda")
    for slot in NANS:
        for bad in (None, float("nan"), float("inf")):
            y = x.clone()
            if bad is not None:
                y[3, 5] = bad
            amax = torch.tensor(slot, dtype=torch.int32, device="cuda").view(torch.float32)
            ops.quantize_delayed(y, scale, amax, E4M3, True, columnwise)
            if bad is None:
                assert amax.item() == 3.0
            else:
                assert amax.view(torch.int32).item() == slot
    amax = scalar(float("inf"), "cuda")
    ops.quantize_delayed(x, scale, amax, E4M3, True, columnwise)
    assert amax.item() == float("inf")


@pytest.mark.parametrize("bits", NANS)
def test_a_nan_delayed_scale_makes_every_code_nan(bits):
    x = torch.linspace(-3, 3, 64 * 48, device="cuda").view(64, 48)
    scale = torch.tensor(bits, dtype=torch.int32, device="cuda").view(torch.float32)
    amax = scalar(0.5, "cuda")
    row, col, used = ops.quantize_delayed(x, scale, amax, E4M3, True, True)
    assert {c for t in (row, col) for c in t.view(torch.uint8).unique().tolist()} == {0x7F}
    assert used.view(torch.int32).item() == bits
    assert amax.item() == 3.0


def kernels(call):
    """Return how many kernels a call launches, counted as kernel nodes of a captured graph."""
    call()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        outputs = call()
    driver = ctypes.CDLL("libcuda.so.1")
    captured = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    kind = ctypes.c_int()
    assert driver.cuGraphGetNodes(captured, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(captured, nodes, ctypes.byref(count)) == 0
    kinds = []
    for node in nodes:
        assert driver.cuGraphNodeGetType(ctypes.c_void_p(node), ctypes.byref(kind)) == 0
        kinds.append(kind.value)
    del outputs
    # 0 is CU_GRAPH_NODE_TYPE_KERNEL.
    return kinds.count(0)


LAUNCHES = {
    "cast": (1, lambda x, s, a: ops.quantize(x, s, E4M3, True, False)),
    "cast, both": (1, lambda x, s, a: ops.quantize(x, s, E4M3, True, True)),
    "current": (1, lambda x, s, a: ops.quantize_current(x, E4M3, True, False)),
    "current, both": (1, lambda x, s, a: ops.quantize_current(x, E4M3, True, True)),
    "delayed": (1, lambda x, s, a: ops.quantize_delayed(x, s, a, E4M3, True, False)),
    "delayed, both": (1, lambda x, s, a: ops.quantize_delayed(x, s, a, E4M3, True, True)),
    "amax": (1, lambda x, s, a: ops.amax(x)),
    "amaxes of a list": (1, lambda x, s, a: ops.multi_amax([x, x[:7], x[7:]])),
    "MX, both": (1, lambda x, s, a: blocks(x, (1, 32), torch.float8_e8m0fnu)),
    "MX of 32x32, both": (1, lambda x, s, a: blocks(x, (32, 32), torch.float8_e8m0fnu)),
    "1x128, both": (1, lambda x, s, a: blocks(x, (1, 128), torch.float32)),
    "128x128, both": (1, lambda x, s, a: blocks(x, (128, 128), torch.float32)),
    "per row": (1, lambda x, s, a: blocks(x, (1, -1), torch.float32, False)),
    # The maxima of rows and columns, the flags of maxima that exist, and the cast.
    "per row, both": (3, lambda x, s, a: blocks(x, (1, -1), torch.float32)),
}


def blocks(x, block, scale_dtype, columnwise=True):
    return ops.quantize_blocks(x, E4M3, block, scale_dtype, True, columnwise)


# These rows are multiples of the vector size. Other shapes may need one more launch.
@pytest.mark.parametrize("shape", [(256, 512), (4096, 4096)])
@pytest.mark.parametrize("name", list(LAUNCHES))
def test_operators_launch_the_documented_number_of_kernels(name, shape):
    expected, call = LAUNCHES[name]
    x = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    scale = scalar(0.5, "cuda")
    amax = scalar(0.0, "cuda")
    assert kernels(lambda: call(x, scale, amax)) == expected
