"""Checkpoints at URLs of stores, and in directories that ranks do not share."""

import os
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations

from checkpoint.layouts import batch, contents, lay_out, state_of
from distributed import ranks
from distributed.folders import shared_folder
from distributed.models import UNEVEN, same_bytes, train
from fp8rs import checkpoint
from fp8rs.checkpoint import CheckpointError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

FP8 = "FP8 weights, AdamW with masters"


def same(left, right):
    return left.keys() == right.keys() and all(same_bytes(left[n], right[n]) for n in left)


def saved(method, state, directory, group):
    if method == "save":
        checkpoint.save(state, directory)
    else:
        checkpoint.async_save(state, directory, process_group=group).result()


@pytest.fixture
def store():
    """The URL of an empty folder in fsspec's in-memory store."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield "memory://bucket/run"
    MemoryFileSystem.store.clear()


def files(url):
    store, path = fsspec.core.url_to_fs(url)
    return sorted(name.rpartition("/")[2] for name in store.find(path))


@pytest.mark.parametrize("method", ["save", "async_save"])
def test_a_store_returns_what_was_saved(store, method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"weights": torch.randn(8, 8), "step": 3}
    saved(method, state, f"{store}/1", None)
    loaded = {"weights": torch.zeros(8, 8), "step": 0}
    checkpoint.load(loaded, f"{store}/1")
    assert torch.equal(loaded["weights"], state["weights"]) and loaded["step"] == 3
    assert files(f"{store}/1") == [".metadata", "__0_0.distcp"]
    # No local folder "memory:" is created.
    assert os.listdir(tmp_path) == []


# torch's own save warns of this.
@pytest.mark.filterwarnings("ignore:fsync not supported")
def test_torch_loads_our_checkpoints_from_a_store_and_we_load_torchs(store):
    values = torch.randn(8)
    checkpoint.save({"a": values}, f"{store}/ours")
    dcp.save({"a": values}, checkpoint_id=f"{store}/torchs")
    read = {"a": torch.zeros(8)}
    ours = {"a": torch.zeros(8)}
    dcp.load(read, checkpoint_id=f"{store}/ours")
    checkpoint.load(ours, f"{store}/torchs")
    assert torch.equal(read["a"], values) and torch.equal(ours["a"], values)


def test_a_checkpoint_in_a_store_is_not_overwritten(store):
    values = torch.randn(8)
    checkpoint.save({"a": values}, f"{store}/1")
    with pytest.raises(CheckpointError, match="checkpoints are not overwritten"):
        checkpoint.save({"a": torch.zeros(8)}, f"{store}/1")
    with pytest.raises(CheckpointError, match="checkpoints are not overwritten"):
        # The folder contains files that are not a checkpoint.
        checkpoint.save({"a": torch.zeros(8)}, store)
    read = {"a": torch.zeros(8)}
    checkpoint.load(read, f"{store}/1")
    assert torch.equal(read["a"], values)


@pytest.mark.parametrize("file", [".distcp", ".metadata"])
def test_a_failed_save_leaves_nothing_in_a_store(store, file, monkeypatch):
    original = MemoryFileSystem._open

    def full(self, path, mode="rb", **kwargs):
        if mode == "wb" and file in path:
            raise OSError(28, "No space left on device", path)
        return original(self, path, mode, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "_open", full)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint.save({"a": torch.ones(8)}, f"{store}/1")
    assert files(f"{store}/1") == []
    checkpoint.save({"a": torch.ones(8)}, f"{store}/1")


def test_a_save_replaces_the_remains_of_a_killed_save_in_a_store(store):
    """The directory has no metadata, so a load refuses it."""
    checkpoint.save({"a": torch.ones(8)}, f"{store}/1")
    memory, path = fsspec.core.url_to_fs(f"{store}/1")
    memory.mv(f"{path}/.metadata", f"{path}/.metadata.tmp")
    memory.copy(f"{path}/__0_0.distcp", f"{path}/__7_0.distcp")
    with pytest.raises(CheckpointError, match="is not a checkpoint, or is incomplete"):
        checkpoint.load({"a": torch.ones(8)}, f"{store}/1")
    checkpoint.save({"a": torch.ones(8)}, f"{store}/1")
    assert files(f"{store}/1") == [".metadata", "__0_0.distcp"]


def test_loading_what_a_store_does_not_have_names_it(store):
    with pytest.raises(CheckpointError, match="FileNotFoundError: memory://bucket/run/1 does not"):
        checkpoint.load({"a": torch.ones(8)}, f"{store}/1")


def test_a_store_that_fails_twice_raises_its_first_error(store, monkeypatch):
    def fail(*args, **kwargs):
        raise ConnectionError("the store is not reachable")

    monkeypatch.setattr(MemoryFileSystem, "exists", fail)
    with pytest.raises(CheckpointError, match=r"run/1 is not a checkpoint.*FileNotFoundError"):
        checkpoint.load({"a": torch.ones(8)}, f"{store}/1")


def test_damage_in_a_store_is_detected(store):
    checkpoint.save({"a": torch.ones(64)}, f"{store}/1")
    memory, path = fsspec.core.url_to_fs(f"{store}/1/__0_0.distcp")
    data = bytearray(memory.cat_file(path))
    data[data.index(torch.ones(64).numpy().tobytes()) + 3] ^= 1
    memory.pipe_file(path, bytes(data))
    with pytest.raises(CheckpointError, match=r"memory://bucket/run/1/__0_0.distcp is damaged"):
        checkpoint.load({"a": torch.zeros(64)}, f"{store}/1")


CALLS = {
    "save": lambda url: checkpoint.save({"a": torch.ones(1)}, url),
    "async_save": lambda url: checkpoint.async_save({"a": torch.ones(1)}, url, process_group=None),
    "load": lambda url: checkpoint.load({"a": torch.ones(1)}, url),
}


@pytest.mark.parametrize("call", list(CALLS))
def test_a_url_that_fsspec_cannot_open_is_refused(call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    missing = {"class": "package_that_is_missing.Store", "err": "Install package-that-is-missing"}
    monkeypatch.setitem(known_implementations, "absent", missing)
    with pytest.raises(ValueError, match=r"directory is 'nosuch://a/b'.*Protocol not known"):
        CALLS[call]("nosuch://a/b")
    with pytest.raises(ValueError, match=r"directory is 'absent://a/b'.*Install package-that"):
        CALLS[call]("absent://a/b")
    with pytest.raises(ValueError, match="pathlib has collapsed"):
        CALLS[call](Path("memory://a/b"))
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_a_file_url_is_a_local_directory(rig):
    folder = shared_folder(rig)
    model, optimizer, _ = lay_out(rig, "FSDP of 2", "mxfp8", FP8, UNEVEN)
    train(model, optimizer, [batch(rig, 0)])
    checkpoint.save(state_of(model, optimizer), f"file://{folder}/saved")
    assert os.listdir(folder) == ["saved"]
    other, resumed, _ = lay_out(rig, "FSDP of 2", "mxfp8", FP8, UNEVEN, seed=1)
    checkpoint.load(state_of(other, resumed), f"file://{folder}/saved")
    assert same(contents(other, resumed), contents(model, optimizer))


@ranks(2, cuda=False)
@pytest.mark.parametrize("method", ["save", "async_save"])
@pytest.mark.parametrize("where", ["disks", "memory"])
def test_a_save_to_an_unshared_path_fails_on_all_ranks(rig, method, where):
    """Each rank has its own disk, or fsspec's store in its own memory."""
    folder = shared_folder(rig)
    rank_path = (
        f"{folder}/disk-of-{rig.rank}/saved" if where == "disks" else f"memory://{folder}/saved"
    )
    model, optimizer, _ = lay_out(rig, "FSDP of 2", "current", FP8, UNEVEN)
    state = state_of(model, optimizer)
    error = r"1 of 2 files in [^ ]* are not visible to the first rank: __1_0.distcp \(rank 1, 0 of"
    group = dist.new_group(backend="gloo")
    with pytest.raises(
        CheckpointError,
        match=error + r" \d+ bytes\). Pass a directory on a file system that all ranks share",
    ):
        saved(method, state, rank_path, group)
    if where == "disks":
        assert os.listdir(os.path.dirname(rank_path)) == []
