"""Randomly damaged input either raises an error or gives the values that were written.

Two parsers read bytes of files: of a checkpoint's tensors, and of pickled quantized tensors. DCP
reads a checkpoint's metadata. The library writes safetensors files and configs but does not parse
them.
"""

import io
import shutil
import warnings

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fp8rs
from distributed.models import same_bytes
from fp8rs import checkpoint
from fp8rs.checkpoint import CheckpointError, Model, Optimizer
from fp8rs.checkpoint.files import find_damage
from fp8rs.optim import AdamW

#: CPython's unpickler emits this warning if a damaged length ends a read early.
pytestmark = [
    pytest.mark.newest_torch,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

#: The number of inputs for each parser, by default and with --full.
PARSES = pytest.mark.parametrize(
    "inputs", [500, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(1500)])]
)
LOADS = pytest.mark.parametrize(
    "inputs", [60, pytest.param(1500, marks=[pytest.mark.long, pytest.mark.timeout(1500)])]
)

#: The file of a checkpoint with its tensors.
FILE = "__0_0.distcp"

positions = st.floats(0, 1, exclude_max=True)
#: The offsets to change with their new bytes, and the length to truncate to.
changes = st.tuples(
    st.lists(st.tuples(positions, st.integers(1, 255)), max_size=4),
    st.one_of(st.just(1.0), positions),
    st.binary(max_size=3),
)


def changed(data, change):
    flips, fraction, more = change
    damaged = bytearray(data)
    for place, mask in flips:
        damaged[int(place * len(damaged))] ^= mask
    return bytes(damaged[: int(fraction * len(damaged))]) + more


def check_changes(inputs, data, tried):
    """Call ``tried`` with the given number of damaged copies of the data."""
    count = 0

    @settings(
        max_examples=inputs, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(changes)
    def run(change):
        nonlocal count
        count += 1
        tried(changed(data, change))

    run()
    print(f"{count} inputs tried")


def trained(seed=0, recipe="delayed"):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 40), torch.nn.Linear(40, 32))
    fp8rs.convert_to_float8_training(model, recipe=recipe, fp8_weights=True)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 32)).sum().backward()
    optimizer.step()
    return {"model": Model(model), "optimizer": Optimizer(model, optimizer)}


def tensors(value, name=""):
    if isinstance(value, dict):
        return {k: t for key, v in value.items() for k, t in tensors(v, f"{name}.{key}").items()}
    return {name: value.clone()} if isinstance(value, torch.Tensor) else {}


def contents(state):
    return tensors({key: value.state_dict() for key, value in state.items()})


def same(left, right):
    return left.keys() == right.keys() and all(same_bytes(left[n], right[n]) for n in left)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "whole"
    checkpoint.save(trained(), folder)
    return folder


def check_read(data, length, value):
    """Check that torch reads the value, or that the bytes are recognized as damaged."""
    if find_damage(data, length) is None:
        try:
            read = torch.load(io.BytesIO(data), weights_only=True)
        except RuntimeError:
            # torch checks fields of the header that zipfile ignores.
            return
        assert torch.equal(read, value)


def stored_tensor():
    buffer = io.BytesIO()
    value = torch.randn(20, 10)
    torch.save(value, buffer)
    return buffer.getvalue(), value


@PARSES
def test_a_damaged_tensor_file_loads_its_values_or_raises(inputs):
    data, value = stored_tensor()
    assert find_damage(data, len(data)) is None
    check_changes(inputs, data, lambda damaged: check_read(damaged, len(data), value))


def test_no_single_bit_changes_a_tensor_unnoticed():
    data, value = stored_tensor()
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            check_read(bytes(damaged), len(data), value)


@LOADS
def test_a_load_restores_what_was_saved_or_leaves_the_model(saved, tmp_path, inputs):
    folder = tmp_path / "copy"
    state = trained(1)
    shutil.copytree(saved, folder)
    expected = trained(0)
    model = state["model"].model
    before = contents(state)
    checkpoint.load(expected, saved)
    after = contents(expected)

    def tried(damaged):
        (folder / FILE).write_bytes(damaged)
        try:
            checkpoint.load(state, folder)
        except CheckpointError:
            assert same(contents(state), before)
            return
        assert same(contents(state), after)
        fresh = trained(1)
        state["model"] = fresh["model"]
        state["optimizer"] = fresh["optimizer"]

    check_changes(inputs, (saved / FILE).read_bytes(), tried)
    assert isinstance(model, torch.nn.Module)


@PARSES
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_a_damaged_pickle_of_a_quantized_tensor_loads_or_raises(recipe, inputs):
    buffer = io.BytesIO()
    torch.save(trained(0, recipe)["model"].model[0].weight, buffer)

    def tried(damaged):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = torch.load(io.BytesIO(damaged), weights_only=True)
                if isinstance(value, fp8rs.QuantizedTensor):
                    value.dequantize()
        except Exception:
            return

    check_changes(inputs, buffer.getvalue(), tried)
