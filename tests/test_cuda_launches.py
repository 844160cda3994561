"""Where and when kernels run: another GPU, another thread, two streams at once, graphs."""

import threading

import pytest
import torch

from cases import calls, data, ops, scalar
from reference import FORMATS, WIDE

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
    """Whatever GPU is current, which stays current."""
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
    """As autograd's: a new thread has no current context before its first call."""
    x = data("cpu", 130, 70)
    on_gpu = x.to("cuda")
    torch.cuda.synchronize()
    got = []
    thread = threading.Thread(target=lambda: got.extend(calls(on_gpu, E4M3)))
    thread.start()
    thread.join()
    same(got, calls(x, E4M3))


def test_streams_have_meeting_places_of_their_own():
    """Two streams reduce different tensors at once, again and again."""
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    xs = [data("cuda", *BIG, seed=seed) * (seed + 1) for seed in range(2)]
    lists = [[x[:700].contiguous(), x[700:].contiguous()] for x in xs]
    torch.cuda.synchronize()
    got = [[], []]
    for _ in range(50):
        for stream, x, parts, found in zip(streams, xs, lists, got, strict=True):
            with torch.cuda.stream(stream):
                found += [ops.amax(x), ops.multi_amax(parts).amax()]
                found.append(ops.quantize_current(x, E4M3)[2])
    torch.cuda.synchronize()
    for x, found in zip(xs, got, strict=True):
        amax = x.abs().max().cpu()
        scale = ops.scale_from_amax(amax, E4M3)
        assert {t.item() for t in found} == {amax.item(), scale.item()}


def captured(operate):
    """A graph of ``operate`` after a warm-up on a stream of its own, and its outputs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        operate()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = operate()
    return graph, outputs


@pytest.mark.parametrize("shape", [BIG, (67, 35)], ids=str)
def test_every_operator_is_captured_and_replays(shape):
    """A replay sees the input as it is then, and shares nothing with eager calls around it."""
    x = data("cuda", *shape, dtype=torch.bfloat16)
    scale, scales = scalar(0.37, "cuda"), torch.full((2,), 0.37, device="cuda")
    amax, amaxes = scalar(0.0, "cuda"), torch.zeros(2, device="cuda")
    parts = list(x.split(shape[0] // 2 + 1))

    def outs():
        return [torch.empty(p.shape, dtype=E4M3, device="cuda") for p in parts]

    def operate():
        amax.zero_()
        amaxes.zero_()
        listed, delayed = outs(), outs()
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
