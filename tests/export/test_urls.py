"""Exports to URLs of stores."""

import json
import os
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

import fp8rs
from distributed import ranks
from distributed.folders import shared_folder
from distributed.models import make, shard
from fp8rs import export
from fp8rs.export import save_pretrained, tensors

pytest.importorskip("safetensors")

from safetensors.torch import load, load_file


@pytest.fixture
def store():
    """An empty in-memory store of fsspec."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield MemoryFileSystem()
    MemoryFileSystem.store.clear()


def model(layers=3):
    torch.manual_seed(layers)
    unconverted = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(layers)))
    return fp8rs.convert_to_float8_training(unconverted, recipe="current")


def files(store):
    return {name.rpartition("/")[2]: store.cat_file(name) for name in store.find("/bucket")}


def read(contents):
    return {
        n: t
        for name in contents
        if name.endswith(".safetensors")
        for n, t in load(contents[name]).items()
    }


def equal(left, right):
    return left.keys() == right.keys() and all(
        torch.equal(left[n].view(torch.uint8), right[n].view(torch.uint8)) for n in left
    )


@pytest.mark.parametrize("size", [5 * 10**9, 20_000])
def test_a_store_gets_the_files_of_a_local_export(store, size, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_pretrained(model(), "memory://bucket/model", max_shard_bytes=size)
    # No local folder "memory:" is created.
    assert os.listdir(tmp_path) == []
    save_pretrained(model(), tmp_path / "model", max_shard_bytes=size)
    local = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    assert files(store) == local
    assert equal(read(files(store)), dict(tensors(model())))
    assert ("model.safetensors.index.json" in local) == (size == 20_000)


def test_an_export_to_a_store_replaces_the_files_of_an_earlier_one(store):
    others = ["model.fp16.safetensors", "model_ema.safetensors", "tokenizer.json"]
    for name in others:
        store.pipe_file(f"/bucket/model/{name}", b"{}")
    save_pretrained(model(3), "memory://bucket/model", max_shard_bytes=20_000)
    save_pretrained(model(1), "memory://bucket/model/")
    contents = files(store)
    assert all(contents.pop(name) == b"{}" for name in others)
    assert sorted(contents) == ["config.json", "model.safetensors"]
    assert equal(read(contents), dict(tensors(model(1))))


@pytest.mark.parametrize("file", ["0.safetensors", "1.safetensors", "config.json"])
def test_a_failed_export_to_a_store_leaves_the_earlier_one(store, file, monkeypatch):
    class StoreError(Exception):
        """An error of a store."""

    save_pretrained(model(3), "memory://bucket/model", max_shard_bytes=20_000)
    before = files(store)
    put = MemoryFileSystem.put_file
    pipe = MemoryFileSystem.pipe_file

    def fail(original):
        def write(self, source, target, *args, **kwargs):
            if str(target).endswith(f"/{file}") or str(source).endswith(f"/{file}"):
                raise StoreError("quota exceeded")
            return original(self, source, target, *args, **kwargs)

        return write

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", fail(put))
        patch.setattr(MemoryFileSystem, "pipe_file", fail(pipe))
        with pytest.raises(OSError, match="StoreError: quota exceeded"):
            save_pretrained(model(2), "memory://bucket/model", max_shard_bytes=20_000)
    assert files(store) == before


@pytest.mark.parametrize("layers", [[3, 3], [3, 1], [1, 3], [1, 1]])
def test_an_interrupted_replacement_leaves_no_file_of_the_earlier_export(
    layers, tmp_path, monkeypatch
):
    """The process dies before each of the moves."""
    before, after = (model(n) for n in layers)
    with torch.no_grad():
        for layer in after:
            layer.weight.mul_(2)
    wanted = dict(tensors(after))
    moves = 0
    while True:
        folder = tmp_path / str(moves)
        save_pretrained(before, folder, max_shard_bytes=20_000)
        move = LocalFileSystem.mv
        allowed = iter(range(moves))

        def fail(self, *args, move=move, allowed=allowed):
            if next(allowed, None) is None:
                raise OSError("killed")
            move(self, *args)

        with monkeypatch.context() as patch, suppress(OSError):
            patch.setattr(LocalFileSystem, "mv", fail)
            save_pretrained(after, folder, max_shard_bytes=20_000)
            break
        assert not (folder / "config.json").exists()
        remaining = {
            n: t for path in folder.glob("*.safetensors") for n, t in load_file(path).items()
        }
        assert equal(remaining, {name: wanted[name] for name in remaining})
        moves += 1
    assert moves == (2 if layers[1] == 1 else 5)
    loaded = model(layers[1])
    export.load(loaded, folder)
    assert equal(dict(tensors(loaded)), wanted)


def test_a_url_that_fsspec_cannot_open_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"directory is 'nosuch://a/b'.*Protocol not known"):
        save_pretrained(model(), "nosuch://a/b")
    assert os.listdir(tmp_path) == []


@ranks(2)
def test_sharded_models_are_exported_to_a_file_url(rig):
    folder = shared_folder(rig)
    sharded = make([256, 128], recipe="current", device=rig.device)
    shard(sharded)
    save_pretrained(sharded, f"file://{folder}/model")
    expected = {name: tensor.cpu() for name, tensor in tensors(sharded)}
    assert equal(load_file(f"{folder}/model/model.safetensors"), expected)
    config = Path(folder, "model", "config.json").read_text()
    assert "quantization_config" in json.loads(config)
