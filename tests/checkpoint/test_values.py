"""Values that are not tensors. A save refuses what a load would refuse."""

import collections
import copy
import dataclasses
import datetime
import pathlib
import random
import threading

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from distributed import ranks
from distributed.folders import shared_folder
from fp8rs import checkpoint
from fp8rs.checkpoint import CheckpointError
from fp8rs.checkpoint.plans import SavePlanner

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclasses.dataclass
class Config:
    lr: float = 1e-3


Point = collections.namedtuple("Point", "x y")

#: A value, and another one of its type that the load replaces.
LOADS = {
    "a numpy scalar": (np.float32(1.5), np.float32(0)),
    "a numpy bool": (np.bool_(True), np.bool_(False)),
    "a numpy array": (np.arange(6, dtype="int16").reshape(2, 3), np.zeros(1)),
    "a numpy array of str": (np.array(["a", "bc"]), None),
    "a numpy datetime": (np.datetime64("2020-01-01"), None),
    "a numpy dtype": (np.dtype("float16"), None),
    "numpy's legacy RNG state": (np.random.RandomState(3).get_state(), None),
    "a numpy generator's state": (
        np.random.default_rng(3).bit_generator.state,
        np.random.default_rng(4).bit_generator.state,
    ),
    "Python's RNG state": (random.Random(3).getstate(), None),
    "torch's RNG state": (torch.Generator().manual_seed(3).get_state(), torch.get_rng_state()),
    "a set": ({1, 2}, set()),
    "an ordered dictionary": (
        collections.OrderedDict(b=1, a=2),
        collections.OrderedDict(b=0, a=0),
    ),
    "a counter": (collections.Counter("aab"), collections.Counter("ab")),
    "int keys": ({0: 1, 1: {2: "x"}}, {0: 0, 1: {2: ""}}),
    "int keys of tensors": ({0: torch.ones(2), 1: 5}, {0: torch.zeros(2), 1: 0}),
    "int keys in a tuple": (({0: 1},), ()),
    "a list with tensors": ([torch.ones(2), 3, [4]], [torch.zeros(2), 0, [0]]),
    "a list of dictionaries": ([{"lr": 1.0}, {"lr": 2.0}], [{"lr": 0.0}, {"lr": 0.0}]),
    "a tuple with a tensor": ((torch.ones(2), 1), None),
}


def equal(left, right):
    if isinstance(left, torch.Tensor | np.ndarray):
        return (
            type(left) is type(right) and left.dtype == right.dtype and bool((left == right).all())
        )
    if isinstance(left, dict):
        return (
            type(left) is type(right)
            and left.keys() == right.keys()
            and all(equal(v, right[k]) for k, v in left.items())
        )
    if isinstance(left, list | tuple):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(equal(a, b) for a, b in zip(left, right, strict=True))
        )
    return type(left) is type(right) and left == right


SAVES = {
    "save": checkpoint.save,
    "async_save": lambda *state: checkpoint.async_save(*state, process_group=None).result(),
    "torch's save": lambda state, directory: dcp.save(state, checkpoint_id=directory),
}


@pytest.mark.parametrize("method", list(SAVES))
@pytest.mark.parametrize("name", list(LOADS))
def test_a_value_is_loaded_as_it_was_saved(name, method, tmp_path):
    saved, other = LOADS[name]
    state = {"model": torch.ones(3), "extra": {"value": saved}}
    SAVES[method](state, tmp_path / "saved")
    loaded = {"model": torch.zeros(3), "extra": {"value": other}}
    weights = loaded["model"]
    checkpoint.load(loaded, tmp_path / "saved")
    assert equal(loaded["extra"]["value"], saved), loaded["extra"]["value"]
    assert loaded["model"] is weights and torch.equal(weights, torch.ones(3))


@pytest.mark.parametrize(
    "value", [np.zeros(3), ([np.zeros(3)],), {1}], ids=["array", "tuple", "set"]
)
def test_an_asynchronous_save_copies_values_that_training_changes(value, monkeypatch, tmp_path):
    changed = threading.Event()
    flatten = SavePlanner.set_up_planner

    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        changed.wait()
        flatten(self, state_dict, storage_meta, is_coordinator)

    monkeypatch.setattr(SavePlanner, "set_up_planner", set_up_planner)
    before = copy.deepcopy(value)
    saving = checkpoint.async_save({"value": value}, tmp_path / "saved", process_group=None)
    if isinstance(value, set):
        value.add(2)
    else:
        (value if isinstance(value, np.ndarray) else value[0][0])[:] = 7
    changed.set()
    saving.result()
    loaded = {"value": None}
    checkpoint.load(loaded, tmp_path / "saved")
    assert equal(loaded["value"], before), loaded


def test_tensors_in_lists_and_under_int_keys_are_written_in_place(tmp_path):
    checkpoint.save({"a": [torch.ones(2), 1], "b": {7: torch.ones(2)}}, tmp_path / "saved")
    first = torch.zeros(2)
    second = torch.zeros(2)
    loaded = {"a": [first, 0], "b": {7: second}}
    checkpoint.load(loaded, tmp_path / "saved")
    assert loaded["a"][0] is first and loaded["b"][7] is second
    assert first.sum() == second.sum() == 2


REFUSED = {
    "datetime.datetime": datetime.datetime(2020, 1, 1),
    "collections.deque": collections.deque([1]),
    "pathlib.PosixPath": pathlib.Path("a"),
    f"{__name__}.Config": Config(),
    f"{__name__}.Point": Point(1, torch.ones(2)),
    "builtins.frozenset": frozenset([1]),
    "builtins.function": lambda: None,
    "numpy.ndarray": np.array([object()], dtype=object),
    "torch._C.Generator": torch.Generator(),
}


@pytest.mark.parametrize("method", ["save", "async_save"])
@pytest.mark.parametrize("kind", list(REFUSED))
def test_save_refuses_what_load_would_refuse(kind, method, tmp_path):
    state = {"model": torch.ones(3), "extra": [{"value": REFUSED[kind]}]}
    with pytest.raises(CheckpointError, match="was not saved") as raised:
        SAVES[method](state, tmp_path / "saved")
    message = str(raised.value)
    assert f"extra.0.value: {kind} (" in message, message
    assert "torch.serialization.add_safe_globals" in message
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["datetime.datetime", "pathlib.PosixPath", f"{__name__}.Config"])
def test_load_names_the_value_that_it_refuses_and_writes_nothing(kind, tmp_path):
    """torch's own save pickles any value."""
    dcp.save({"model": torch.ones(3), "x": {"y": REFUSED[kind]}}, checkpoint_id=tmp_path / "saved")
    loaded = {"model": torch.zeros(3), "x": {"y": None}}
    with pytest.raises(CheckpointError, match=r"x\.y cannot be loaded safely: .*add_safe_globals"):
        checkpoint.load(loaded, tmp_path / "saved")
    assert torch.equal(loaded["model"], torch.zeros(3)) and loaded["x"] == {"y": None}


def test_a_type_registered_with_torch_is_saved_and_loaded(tmp_path):
    before = torch.serialization.get_safe_globals()
    with torch.serialization.safe_globals([Config, np.ndarray]):
        checkpoint.save({"config": Config(0.5), "array": np.ones(2)}, tmp_path / "saved")
        loaded = {"config": Config(), "array": None}
        checkpoint.load(loaded, tmp_path / "saved")
        assert loaded["config"] == Config(0.5)
        # The user's own registration remains.
        assert np.ndarray in torch.serialization.get_safe_globals()
    assert set(torch.serialization.get_safe_globals()) == set(before)


@ranks(2, cuda=False)
def test_a_value_that_one_rank_cannot_save_raises_on_both(rig):
    folder = shared_folder(rig)
    state = {"mine": datetime.date(2020, 1, 1) if rig.rank == 1 else 1}
    with pytest.raises(CheckpointError, match=r"rank 1: TypeError: [^!]*mine: datetime.date \("):
        checkpoint.save(state, f"{folder}/saved")
