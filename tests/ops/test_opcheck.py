"""torch.library.opcheck on each operator: schema, fake kernel, functionalization, compilation."""

import pytest
import torch
from torch.library import opcheck

import fp8rs.gemm.grouped  # noqa: F401, registers operators
from cases import data, scalar
from fp8rs.nn.observe import STATISTICS
from ops.operator_checks import (
    BLOCK_NAMES,
    EVERYTHING,
    UNDECLARED,
    WITHOUT_SCHEMA,
    check_writes,
    ops,
    tensors,
)
from oracle.elements import E4M3, E5M2


def samples(device):
    """Yield (operator, arguments) for every operator, each with several shapes."""
    scale = scalar(0.5, device)
    amax = scalar(1.0, device)
    for shape in ((5, 7), (3,), (2, 3, 4), (0, 4)):
        for dtype in (torch.float32, torch.bfloat16):
            x = data(device, *shape, dtype=dtype)
            yield ops.amax, (x,)
            yield ops.multi_amax, ([x, x[:1]],)
            for row, col in ((True, False), (False, True), (True, True)):
                yield ops.quantize, (x, scale, E4M3, row, col)
                yield ops.quantize_current, (x, E5M2, row, col, True, 0.1)
                yield ops.quantize_delayed, (x, scale, amax.clone(), E4M3, row, col)
                yield ops._quantize_delayed, (x, scale, amax.clone(), E4M3, row, col)
            outs = [torch.zeros(shape, dtype=E4M3, device=device) for _ in range(2)]
            two = torch.ones(2, device=device)
            yield ops.multi_quantize, ([x, x], two, outs)
            yield ops.multi_quantize_delayed, ([x, x], two, two.clone(), outs)
            codes, _, _ = ops.quantize_current(x, E4M3)
            yield ops.transpose, (codes,)
            yield ops.dequantize, (codes, scale, [-1, -1], dtype)
        yield ops.scale_from_amax, (data(device, *shape).abs(), E4M3, True, 0.0, 1)
    for shape in ((5, 7), (3,), (2, 3, 4), (0, 4)):
        x = data(device, *shape)
        weight = data(device, shape[-1])
        delayed = (scale, amax.clone())
        for row, col in ((True, False), (False, True), (True, True)):
            yield ops._quantize_norm, (x, weight, None, row, 0.1, E4M3, row, col)
            yield ops._quantize_glu, (x, x, "silu", E4M3, row, col)
            yield ops._quantize_glu_backward, (x, x, x, "gelu_tanh", E5M2, row, col)
        yield ops._quantize_norm, (x, None, None, True, 0.1, E4M3, True, True, False, 0.0, *delayed)
        yield ops._quantize_glu, (x, x, "silu", E4M3, True, True, False, 0.0, *delayed)
        scale_and_amax = (*delayed, scale, amax.clone())
        yield (
            ops._quantize_glu_backward,
            (x, x, x, "silu", E5M2, True, True, False, 0.0, *scale_and_amax),
        )
    for shape in ((2, 6, 16), (6, 8), (0, 24)):
        for back in (False, True):
            angles = data(device, 2, 3, 8)
            yield ops._rotate, (data(device, *shape, dtype=torch.bfloat16), *angles, back)
    yield ops._note_amax, (scale, amax, scalar(0.5, device))
    codes, _, scale = ops.quantize_current(data(device, 2, 3, 16), E4M3)
    b_codes, _, b_scale = ops.quantize_current(data(device, 7, 16), E4M3)
    for a in (codes.flatten(0, 1), codes[0, :0]):
        for bias, dtype in ((None, torch.bfloat16), (torch.ones(7, device=device), torch.float32)):
            operands = (a, scale, "tensor", b_codes, b_scale, "tensor", bias, dtype)
            yield ops._scaled_mm, (*operands, True, False)
    slots = torch.zeros(3, STATISTICS, dtype=torch.float64, device=device)
    for values in (data(device, 2, 3, 16), None):
        yield ops._observe, (values, codes, scale, [-1, -1], 0, 0, None, slots, 1)
    # torch 2.11 casts values over 448 to NaN.
    rows, weight, columns, transposed = (
        data(device, *shape).clamp(-448, 448).to(E4M3)
        for shape in ((40, 32), (3, 48, 32), (48, 64), (32, 64))
    )
    scales = (torch.ones(n, device=device) for n in (40, 48, 32))
    row_scale, n_scale, k_scale = (
        s.view(-1, 1) if len(s) == 40 else s.repeat(3, 1) for s in scales
    )
    for ends in ([8, 8, 40], [0, 16, 24]):
        ends = torch.tensor(ends, dtype=torch.int32, device=device)
        yield ops.grouped_mm, (rows, row_scale, weight, n_scale, ends, torch.bfloat16, True)
        padded = (columns, n_scale, transposed, k_scale, ends // 16 * 16, torch.bfloat16)
        yield ops.grouped_wgrad, padded
        values = data(device, 40, 32), data(device, 3, 32, 48), data(device, 40, 48)
        yield ops.grouped_mm_plain, (*values[:2], ends, True)
        yield ops.grouped_mm_plain, (values[2].t(), values[0], ends, False)
    permuted = data(device, 3, 4, 5).permute(2, 0, 1)
    yield ops.quantize, (permuted, scale, E4M3, True, True)
    yield ops.scale_from_amax, (permuted.abs(), E5M2)


NAMES = [
    "_note_amax",
    "_observe",
    "_quantize_delayed",
    "_quantize_glu",
    "_quantize_glu_backward",
    "_quantize_norm",
    "_rotate",
    "_scaled_mm",
    "amax",
    "dequantize",
    "grouped_mm",
    "grouped_mm_plain",
    "grouped_wgrad",
    "multi_amax",
    "multi_quantize",
    "multi_quantize_delayed",
    "quantize",
    "quantize_current",
    "quantize_delayed",
    "scale_from_amax",
    "transpose",
]
#: The operators that optim/test_adamw.py, test_random.py, test_rows.py, test_groups.py and
#: test_combine.py check.
OTHER_NAMES = ["adamw_", "random_uniform_", "sum_rows_"]
OTHER_NAMES += ["group_bounds", "quantize_gated", "quantize_groups", "route_rows"]
OTHER_NAMES += ["combine_rows", "combine_rows_backward"]


def samples_of(name, device):
    return [args for packet, args in samples(device) if packet is getattr(ops, name)]


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(device, name):
    for arguments in samples_of(name, device):
        fp8 = any(t.dtype.itemsize == 1 for t in tensors(arguments))
        utils = WITHOUT_SCHEMA if fp8 or name in UNDECLARED else EVERYTHING
        opcheck(getattr(ops, name).default, arguments, test_utils=utils)


@pytest.mark.parametrize("name", NAMES)
def test_only_declared_arguments_are_written(device, name):
    for arguments in samples_of(name, device):
        check_writes(name, arguments)


def test_every_operator_is_checked():
    registered = {
        schema.name.removeprefix("fp8rs::")
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith("fp8rs::")
    }
    assert registered == {*NAMES, *BLOCK_NAMES, *OTHER_NAMES}


def test_meta_tensors_give_shapes_and_dtypes():
    x = torch.empty(2, 3, 8, dtype=torch.bfloat16, device="meta")
    row, col, scale = ops.quantize_current(x, E4M3, True, True)
    assert (row.shape, col.shape, scale.shape) == ((2, 3, 8), (8, 6), ())
    assert (row.dtype, col.dtype, scale.dtype) == (E4M3, E4M3, torch.float32)
    assert {t.device.type for t in (row, col, scale)} == {"meta"}
    assert ops.transpose(row).shape == (8, 6)
    assert ops.dequantize(row, scale, [-1, -1], torch.float16).dtype == torch.float16


def step(x, amax, scale, out):
    row, col, current = ops.quantize_current(x, E4M3, True, True)
    _, _, used = ops.quantize_delayed(x, scale, amax, E5M2)
    ops.multi_quantize([x], current.view(1), [out])
    return row.view(torch.uint8), ops.transpose(col).view(torch.uint8), used + amax


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_bytes_equal_eager_bytes(device, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (5, 9):
        x = data(device, rows, 12)
        scale = scalar(0.25, device)
        results = []
        for function in (step, compiled):
            amax = scalar(1.0, device)
            out = torch.zeros(rows, 12, dtype=E4M3, device=device)
            results.append([*function(x, amax, scale, out), amax, out.view(torch.uint8)])
        assert all(map(torch.equal, *results))
