"""Bytes from outside, damaged at random: an error, or what was written; never anything else.

The parsers of outside bytes are a checkpoint's metadata, its tensors' files, and pickles of
quantized tensors. (Safetensors files and configs are written alone, and read by others.)
"""

import io
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata

import fp8rs
from distributed.models import same_bytes
from fp8rs import checkpoint
from fp8rs.checkpoint import CheckpointError, Model, Optimizer
from fp8rs.checkpoint.files import damage, parse_metadata
from fp8rs.optim import AdamW

#: CPython's unpickler says this of itself where a damaged length ends a read early.
pytestmark = [
    pytest.mark.newest_torch,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

#: Inputs that are tried of each parser: here, and with --full.
PARSES = pytest.mark.parametrize(
    "inputs", [500, pytest.param(20_000, marks=[pytest.mark.long, pytest.mark.timeout(1500)])]
)
LOADS = pytest.mark.parametrize(
    "inputs", [60, pytest.param(1500, marks=[pytest.mark.long, pytest.mark.timeout(1500)])]
)

places = st.floats(0, 1, exclude_max=True)
#: Where bytes are changed, and to what; and how much is left of them.
changes = st.tuples(
    st.lists(st.tuples(places, st.integers(1, 255)), max_size=4),
    st.one_of(st.just(1.0), places),
    st.binary(max_size=3),
)


def changed(data, change):
    flips, left, more = change
    found = bytearray(data)
    for place, mask in flips:
        found[int(place * len(found))] ^= mask
    return bytes(found[: int(left * len(found))]) + more


def each(inputs, data, tried):
    """Call ``tried`` with that many versions of the data."""
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


@PARSES
def test_metadata_is_metadata_or_an_error(saved, inputs):
    data = (saved / ".metadata").read_bytes()
    assert isinstance(parse_metadata(data), Metadata)

    def tried(found):
        try:
            metadata = parse_metadata(found)
        except Exception:
            return
        assert isinstance(metadata, Metadata)

    each(inputs, data, tried)


def test_metadata_calls_nothing_of_its_choice(tmp_path):
    class Touch:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "touched",))

    import pickle

    with pytest.raises(pickle.UnpicklingError, match="it names pathlib"):
        parse_metadata(pickle.dumps(Touch()))
    assert not (tmp_path / "touched").exists()


def check_read(data, length, value):
    """Check that torch reads the value, or that the bytes are recognized as damaged."""
    if damage(data, length) is None:
        try:
            read = torch.load(io.BytesIO(data), weights_only=True)
        except RuntimeError:  # of a header that zipfile does not read
            return
        assert torch.equal(read, value)


def stored_tensor():
    buffer, value = io.BytesIO(), torch.randn(20, 10)
    torch.save(value, buffer)
    return buffer.getvalue(), value


@PARSES
def test_a_tensors_bytes_are_those_that_were_written_or_damaged(inputs):
    data, value = stored_tensor()
    assert damage(data, len(data)) is None
    each(inputs, data, lambda found: check_read(found, len(data), value))


def test_no_single_bit_changes_a_tensor_unnoticed():
    data, value = stored_tensor()
    for place in range(len(data)):
        for bit in range(8):
            found = bytearray(data)
            found[place] ^= 1 << bit
            check_read(bytes(found), len(data), value)


@LOADS
@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata"])
def test_a_load_gives_what_was_saved_or_leaves_the_model(saved, tmp_path, inputs, file):
    folder, state = tmp_path / "copy", trained(1)
    shutil.copytree(saved, folder)
    expected, model, before = trained(0), state["model"].model, contents(state)
    checkpoint.load(expected, saved)
    after = contents(expected)

    def tried(found):
        (folder / file).write_bytes(found)
        try:
            checkpoint.load(state, folder)
        except CheckpointError:
            assert same(contents(state), before)
            return
        assert same(contents(state), after)
        state["model"], state["optimizer"] = (fresh := trained(1))["model"], fresh["optimizer"]

    each(inputs, (saved / file).read_bytes(), tried)
    assert isinstance(model, torch.nn.Module)


@PARSES
@pytest.mark.parametrize("recipe", ["current", "mxfp8"])
def test_a_pickle_of_a_quantized_tensor_is_one_or_an_error(recipe, inputs):
    buffer = io.BytesIO()
    torch.save(trained(0, recipe)["model"].model[0].weight, buffer)

    def tried(found):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = torch.load(io.BytesIO(found), weights_only=True)
                if isinstance(value, fp8rs.QuantizedTensor):
                    value.dequantize()
        except Exception:
            return

    each(inputs, buffer.getvalue(), tried)
