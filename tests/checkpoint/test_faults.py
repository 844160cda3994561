"""Failed saves and loads raise on every live rank and damage neither model nor checkpoints."""

import errno
import io
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemReader, filesystem
from torch.distributed.checkpoint.planner import SavePlan

from checkpoint.layouts import batch, contents, lay_out, state_of
from distributed import ranks
from distributed.folders import shared_folder
from distributed.models import UNEVEN, same_bytes, train
from fp8rs import checkpoint
from fp8rs.checkpoint import CheckpointError
from fp8rs.checkpoint.files import Writer

FP8 = "FP8 weights, AdamW with masters"


def same(left, right):
    return left.keys() == right.keys() and all(same_bytes(left[n], right[n]) for n in left)


def trained(rig, recipe="delayed", weight_kind=FP8, seed=0):
    model, optimizer, _ = lay_out(rig, "FSDP of 2", recipe, weight_kind, UNEVEN, seed)
    train(model, optimizer, [batch(rig, n) for n in range(2)])
    return model, optimizer


def largest(folder, suffix=".distcp"):
    names = [os.path.join(folder, n) for n in os.listdir(folder) if n.endswith(suffix)]
    return max(names, key=os.path.getsize)


def cut_short(path):
    os.truncate(path, os.path.getsize(path) // 2)


def tensor_bytes(folder):
    """Return where each tensor's data lie: file, offset and length.

    Each tensor is an archive of its own. For a small tensor most bytes are headers and padding,
    some of which are never read.
    """
    path = largest(folder)
    metadata = FileSystemReader(folder).read_metadata()
    stored = [
        i for i in metadata.storage_data.values() if i.relative_path == os.path.basename(path)
    ]
    info = max(stored, key=lambda info: info.length)
    data = Path(path).read_bytes()[info.offset : info.offset + info.length]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        member = max(archive.infolist(), key=lambda member: member.file_size)
    assert member.compress_type == zipfile.ZIP_STORED
    header = data[member.header_offset :]
    name, extra = struct.unpack("<HH", header[26:30])
    return path, info.offset + member.header_offset + 30 + name + extra, member.file_size


def flip(folder, where):
    path, offset, length = tensor_bytes(folder)
    with open(path, "r+b") as file:
        file.seek(offset + int(where * (length - 1)))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 0x10]))


DAMAGE = {
    "a file is missing": lambda folder: os.remove(largest(folder)),
    "a file is cut short": lambda folder: cut_short(largest(folder)),
    "a bit of a tensor is flipped": lambda folder: flip(folder, 0.5),
    "the first byte of a tensor is changed": lambda folder: flip(folder, 0.0),
    "the last byte of a tensor is changed": lambda folder: flip(folder, 1.0),
    "the metadata is missing": lambda folder: os.remove(f"{folder}/.metadata"),
    "the metadata is cut short": lambda folder: cut_short(f"{folder}/.metadata"),
}


@ranks(2)
@pytest.mark.parametrize("weight_kind", [FP8, "master weights, torch's AdamW"])
@pytest.mark.filterwarnings("ignore")
def test_a_damaged_checkpoint_raises_on_all_ranks_and_leaves_the_model(rig, weight_kind):
    folder = shared_folder(rig)
    checkpoint.save(state_of(*trained(rig, weight_kind=weight_kind)), f"{folder}/whole")
    model, optimizer = trained(rig, weight_kind=weight_kind, seed=1)
    before = contents(model, optimizer)
    for number, (damage_name, damage) in enumerate(DAMAGE.items()):
        copy = f"{folder}/{number}"
        if rig.rank == 0:
            shutil.copytree(f"{folder}/whole", copy)
            damage(copy)
        dist.barrier()
        with pytest.raises(CheckpointError, match=f"{copy} was not loaded\\n.*DamagedError"):
            checkpoint.load(state_of(model, optimizer), copy)
        assert same(contents(model, optimizer), before), damage_name
    checkpoint.load(state_of(model, optimizer), f"{folder}/whole")
    assert not same(contents(model, optimizer), before)


@ranks(2)
def test_loading_a_directory_that_does_not_exist_names_it_on_all_ranks(rig):
    absent = f"{shared_folder(rig)}/absent"
    state = {"a": torch.ones(2)}
    says = f"^{absent} was not loaded\\nrank 0, 1: FileNotFoundError: {absent} does not exist"
    with pytest.raises(CheckpointError, match=says) as raised:
        checkpoint.load(state, absent)
    assert {type(cause) for cause in raised.value.causes.values()} == {FileNotFoundError}
    # The message says it all. Without suppression, torch's error prints a traceback of each rank.
    assert raised.value.__suppress_context__
    assert raised.value.__cause__ is None
    assert torch.equal(state["a"], torch.ones(2))


def saved(method, state, folder, group):
    if method == "save":
        checkpoint.save(state, folder)
    else:
        checkpoint.async_save(state, folder, process_group=group).result()


@ranks(2)
@pytest.mark.parametrize("method", ["save", "async_save"])
@pytest.mark.parametrize("full", ["a disk", "the disk, at the metadata"])
def test_a_full_disk_leaves_the_previous_checkpoint(rig, method, full):
    folder = shared_folder(rig)
    model, optimizer = trained(rig)
    checkpoint.save(state_of(model, optimizer), f"{folder}/first")
    previous = contents(model, optimizer)
    train(model, optimizer, [batch(rig, 7)])
    original = filesystem.FileSystem.create_stream
    group = dist.new_group(backend="gloo")

    def create_stream(self, path, mode):
        at_metadata = ".metadata" in str(path)
        if mode == "wb" and at_metadata == ("metadata" in full) and (at_metadata or rig.rank == 1):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        return original(self, path, mode)

    filesystem.FileSystem.create_stream = create_stream
    try:
        state = state_of(model, optimizer)
        with pytest.raises(CheckpointError, match=r"second was not saved[^!]*No space left"):
            saved(method, state, f"{folder}/second", group)
    finally:
        filesystem.FileSystem.create_stream = original
    dist.barrier()
    assert os.listdir(folder) == ["first"]
    # A rank that continues creates a directory for its next save.
    dist.barrier()
    with pytest.raises(CheckpointError, match="checkpoints are not overwritten"):
        checkpoint.save(state_of(model, optimizer), f"{folder}/first")
    checkpoint.save(state_of(model, optimizer), f"{folder}/second")
    other, resumed = trained(rig, seed=1)
    checkpoint.load(state_of(other, resumed), f"{folder}/first")
    assert same(contents(other, resumed), previous)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("method", ["save", "async_save"])
@pytest.mark.parametrize("place", ["path", "memory://"])
def test_a_second_save_to_a_name_leaves_the_unfinished_one(tmp_path, monkeypatch, method, place):
    folder = tmp_path / "saved" if place == "path" else f"memory://{tmp_path}/saved"
    writing = threading.Event()
    finish = Writer.finish

    def slow_finish(*args, **kwargs):
        writing.set()
        time.sleep(0.5)
        finish(*args, **kwargs)

    monkeypatch.setattr(Writer, "finish", slow_finish)
    first = checkpoint.async_save({"x": torch.ones(3)}, folder, process_group=None)
    assert writing.wait(60)
    with pytest.raises(CheckpointError, match="checkpoints are not overwritten"):
        saved(method, {"x": torch.zeros(3)}, folder, None)
    first.result()
    state = {"x": torch.zeros(3)}
    checkpoint.load(state, folder)
    assert torch.equal(state["x"], torch.ones(3))


@ranks(2)
def test_two_asynchronous_saves_share_a_process_group(rig):
    folder = shared_folder(rig)
    group = dist.new_group(backend="gloo")
    prepare = Writer.set_up_storage_writer

    def slow_on_one_rank(self, *args, **kwargs):
        if rig.rank == 1 and "first" in str(self.path):
            time.sleep(0.5)
        return prepare(self, *args, **kwargs)

    Writer.set_up_storage_writer = slow_on_one_rank
    try:
        states = {"first": {"x": torch.ones(3)}, "second": {"y": torch.zeros(5)}}
        saves = [
            checkpoint.async_save(state, f"{folder}/{name}", process_group=group)
            for name, state in states.items()
        ]
        for save in saves:
            save.result()
    finally:
        Writer.set_up_storage_writer = prepare
    dist.barrier()
    for name, state in states.items():
        loaded = {key: torch.full_like(value, 7) for key, value in state.items()}
        checkpoint.load(loaded, f"{folder}/{name}")
        assert same(loaded, state)


@ranks(2)
def test_ranks_that_disagree_raise_on_both(rig):
    folder = shared_folder(rig)
    state = {"table": torch.ones(2 + rig.rank)}
    with pytest.raises(CheckpointError, match=r"ranks save different tensors[^!]*table"):
        checkpoint.save(state, f"{folder}/saved")
    assert not os.path.exists(f"{folder}/saved")
    checkpoint.save({"table": torch.zeros(2)}, f"{folder}/saved")
    with pytest.raises(CheckpointError, match=r"the checkpoint does not match[^!]*\(rank 1\)"):
        checkpoint.load(state, f"{folder}/saved")
    assert (state["table"] == 1).all()


@ranks(2)
def test_ranks_with_different_recipes_raise_on_both(rig):
    """Before any forward has compared their conversions."""
    model, _, _ = lay_out(rig, "FSDP of 2", ["block", "mxfp8"][rig.rank], FP8, UNEVEN)
    with pytest.raises(CheckpointError, match=r"rank 0, 1: .*is .*on rank 0 and .* on rank 1"):
        checkpoint.save({"model": checkpoint.Model(model)}, f"{shared_folder(rig)}/saved")


class NoState(Exception):
    def __init__(self, name, lock):
        super().__init__(name)
        self.lock = lock


class Failing:
    """A ``Stateful`` object without a state on one rank."""

    def __init__(self, rank):
        self.rank = rank

    def state_dict(self):
        if self.rank == 1:
            raise NoState("loader", threading.Lock())  # cannot be pickled
        return {"value": 1}

    def load_state_dict(self, state_dict):
        raise AssertionError


@ranks(2)
def test_an_object_that_fails_on_one_rank_raises_on_both(rig):
    model, _, _ = lay_out(rig, "FSDP of 2", "current", FP8, UNEVEN)
    folder = shared_folder(rig)
    state = {"x": Failing(rig.rank), "model": checkpoint.Model(model)}
    group = dist.new_group(backend="gloo")
    checkpoint.save({"x": {"value": 2}}, f"{folder}/saved", process_group=group)
    message = "not {}\nrank 1: (RuntimeError: )?NoState: loader"
    with pytest.raises(CheckpointError, match=message.format("saved")):
        checkpoint.save(state, f"{folder}/second", process_group=group)
    with pytest.raises(CheckpointError, match=message.format("saved")):
        checkpoint.async_save(state, f"{folder}/second", process_group=group)
    with pytest.raises(CheckpointError, match=message.format("loaded")):
        checkpoint.load(state, f"{folder}/saved", process_group=group)
    assert os.listdir(folder) == ["saved"]


def test_checksums_that_are_off_are_refused_before_a_save(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        with pytest.raises(ValueError, match="Call it with True"):
            checkpoint.save({"x": torch.ones(3)}, tmp_path / "saved")
    finally:
        torch.serialization.set_crc32_options(True)
    assert os.listdir(tmp_path) == []


# The thread of the save warns too. The filters of warnings are per process, so that the one of
# `async_save` may have ended by then.
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_an_asynchronous_save_to_a_relative_path_keeps_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write = Writer.write_data
    entered = threading.Event()
    moved = threading.Event()

    def late(self, *args):
        entered.set()
        moved.wait(60)
        return write(self, *args)

    monkeypatch.setattr(Writer, "write_data", late)
    saving = checkpoint.async_save({"x": torch.ones(3)}, "saved", process_group=None)
    entered.wait(60)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    moved.set()
    saving.result()
    assert (tmp_path / "saved" / ".metadata").exists()


DIES = """
import os, signal, sys, time, datetime, torch, torch.distributed as dist
from torch.distributed.checkpoint import filesystem
import fp8rs
from fp8rs import checkpoint
from fp8rs.optim import AdamW
from torch.distributed.fsdp import fully_shard
rank, port, folder, when = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
store = dist.TCPStore("127.0.0.1", port)
dist.init_process_group(
    "gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=20)
)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
fp8rs.convert_to_float8_training(model, recipe="current", fp8_weights=True)
fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
optimizer = AdamW(model.parameters(), lr=1e-3)
model(torch.ones(4, 64)).sum().backward()
optimizer.step()
state = {"model": checkpoint.Model(model), "optimizer": checkpoint.Optimizer(model, optimizer)}
checkpoint.save(state, folder + "/first")
def values():
    # Not a state dict, which would need the other rank.
    return {n: p.to_local().dequantize() if "weight" in n else p.to_local().clone()
            for n, p in model.named_parameters()}
before = values()
original = filesystem.FileSystem.create_stream
def create_stream(self, path, mode):
    if rank == 1 and mode == {"save": "wb", "load": "rb"}[when] and ".metadata" not in str(path):
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, path, mode)
filesystem.FileSystem.create_stream = create_stream
start = time.monotonic()
try:
    if when == "save":
        checkpoint.save(state, folder + "/second")
    else:
        checkpoint.load(state, folder + "/first")
except Exception as error:
    assert all(torch.equal(value, before[name]) for name, value in values().items())
    print("caught", type(error).__name__, time.monotonic() - start < 25, flush=True)
    os._exit(0)
print("nothing happened", flush=True)
os._exit(1)
"""


@pytest.mark.parametrize("when", ["save", pytest.param("load", marks=pytest.mark.long)])
def test_other_ranks_raise_when_one_dies(tmp_path, when):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "ignore",
                "-c",
                DIES,
                str(rank),
                str(store.port),
                tmp_path,
                when,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=150) for process in processes]
    assert processes[1].returncode == -signal.SIGKILL, outputs[1]
    assert processes[0].returncode == 0, outputs[0]
    word, _kind, in_time = outputs[0][0].split()
    assert (word, in_time) == ("caught", "True"), outputs[0]
    assert (tmp_path / "first" / ".metadata").exists()
    assert not (tmp_path / "second" / ".metadata").exists()


@pytest.mark.parametrize("file", [".metadata", "notes.txt"])
def test_a_refused_save_removes_nothing(tmp_path, file):
    """A directory with other files than an unfinished save leaves is not written to."""
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / file).touch()
    (folder / "__0_0.distcp").touch()
    with pytest.raises(checkpoint.CheckpointError, match="not overwritten"):
        checkpoint.save({"x": torch.ones(3)}, folder)
    assert sorted(os.listdir(folder)) == sorted([file, "__0_0.distcp"])


def test_a_save_replaces_the_remains_of_a_killed_save(tmp_path):
    """The directory has no metadata, so a load refuses it."""
    folder = tmp_path / "saved"
    checkpoint.save({"x": torch.ones(3)}, folder)
    (folder / ".metadata").rename(folder / ".metadata.tmp")
    shutil.copy(folder / "__0_0.distcp", folder / "__7_0.distcp")
    state = {"x": torch.zeros(3)}
    with pytest.raises(CheckpointError, match="is not a checkpoint, or is incomplete"):
        checkpoint.load(state, folder)
    checkpoint.save(state, folder)
    assert sorted(os.listdir(folder)) == [".metadata", "__0_0.distcp"]


def test_ranks_create_the_directory_after_an_unfinished_save_is_removed(tmp_path, monkeypatch):
    """Creating a directory fails if it exists first and is removed before Python looks again."""
    folder = tmp_path / "saved"
    folder.mkdir()
    (folder / "__7_0.distcp").touch()
    coordinator = Writer(folder)
    other = Writer(folder)
    mkdir = os.mkdir

    def mkdir_while_coordinator_starts(path, *args, **kwargs):
        try:
            mkdir(path, *args, **kwargs)
        except FileExistsError:
            coordinator.set_up_storage_writer(True)
            raise

    monkeypatch.setattr(os, "mkdir", mkdir_while_coordinator_starts)
    other.set_up_storage_writer(False)
    plans = [writer.prepare_local_plan(SavePlan([])) for writer in (other, coordinator)]
    plans = coordinator.prepare_global_plan(plans)
    for writer, plan in zip((other, coordinator), plans, strict=True):
        writer.write_data(plan, DefaultSavePlanner()).wait()
    assert sorted(os.listdir(folder)) == ["__0_0.distcp", "__1_0.distcp"]
