"""Operators with their checks by `torch.library.opcheck`, and which arguments a call writes."""

import torch

from oracle.compare import same

ops = torch.ops.fp8rs
#: The operators that test_blocks_opcheck.py checks.
BLOCK_NAMES = ["block_amax", "pack_scales", "quantize_blocks", "rebase"]
#: The checks for operators with FP8 arguments. torch's schema check multiplies its inputs, which is
#: not implemented for FP8. `check_writes` replaces it.
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
EVERYTHING = ("test_schema", *WITHOUT_SCHEMA)
#: Operators that write an argument although their schema does not declare it, by design.
UNDECLARED = {
    "_note_amax": ["into"],
    "_observe": ["slots"],
    "_quantize_delayed": ["amax"],
    "_quantize_glu": ["amax"],
    "_quantize_glu_backward": ["gate_amax", "up_amax"],
    "_quantize_norm": ["amax"],
}


def tensors(arguments):
    """Yield the tensors among the arguments, including the elements of lists."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, list):
            yield from tensors(argument)


def check_writes(name, arguments, keywords=None):
    """Assert that an operator writes only what its schema declares and returns no alias."""
    overload = getattr(ops, name).default
    before = [[t.clone() for t in tensors([a])] for a in arguments]
    results = overload(*arguments, **(keywords or {}))
    written = [
        (a.alias_info is not None and a.alias_info.is_write) or a.name in UNDECLARED.get(name, ())
        for a in overload._schema.arguments
    ]
    for argument, copies, may_change in zip(arguments, before, written, strict=False):
        unchanged = map(same, tensors([argument]), copies)
        assert may_change or all(unchanged), name
    inputs = {t.untyped_storage().data_ptr() for t in tensors(arguments) if t.numel()}
    results = [results] if isinstance(results, torch.Tensor) else list(results or ())
    assert inputs.isdisjoint(t.untyped_storage().data_ptr() for t in results if t.numel())
