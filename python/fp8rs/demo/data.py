"""Real text that every machine has: the Python standard library's sources and docs, as installed.

The corpus is bytes, so the vocabulary is 256. Files are taken in sorted order of their relative
paths and split into training and held-out text by whole file, so no held-out line was trained on
in its own context. Everything is a pure function of the installed files and a seed: each rank
builds the same corpus and the same global batch, and takes its own rows of it.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

#: Byte values.
VOCABULARY = 256
#: One file in this many is held out.
HELD_OUT_EVERY = 16
#: Sources and the text files beside them (licence, notes, grammar files).
_SUFFIXES = {".py", ".pyi", ".txt", ".rst"}
#: Not the library proper: other people's packages, caches, tests (absent from many installs) and
#: tables of data written as Python (one of them a third of what is left).
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "__pycache__",
    "test",
    "tests",
    "idle_test",
    "lib-dynload",
    "encodings",
}
#: Shorter files are mostly empty `__init__.py`s.
_SHORTEST = 256


@dataclass(frozen=True)
class Corpus:
    """Training and held-out text as flat uint8 tensors."""

    train: torch.Tensor
    held_out: torch.Tensor
    files: int

    def batch(self, seed: int, step: int, rows: int, length: int) -> torch.Tensor:
        """The global training batch of a step: int64 (rows, length + 1), the same on every rank."""
        return _windows(self.train, seed * 1_000_003 + step, rows, length)

    def held_out_batch(self, index: int, rows: int, length: int) -> torch.Tensor:
        """A held-out batch: int64 (rows, length + 1); the same text at every evaluation."""
        return _windows(self.held_out, -1 - index, rows, length)


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def load_corpus(root: Path | None = None) -> Corpus:
    """Reads the corpus below ``root`` (default: the standard library).

    Raises:
        ValueError: there is too little text there to train on.
    """
    root = standard_library() if root is None else root
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    files = 0
    for name in _text_files(root):
        content = (root / name).read_bytes()
        if len(content) < _SHORTEST:
            continue
        parts[_is_held_out(name)].append(content)
        files += 1
    train, held_out = b"\n".join(parts[False]), b"\n".join(parts[True])
    if len(held_out) < 1 << 15 or len(train) < 1 << 18:
        raise ValueError(
            f"too little text below {root}: {len(train)} training bytes in {files} files; "
            "the demo wants an installed Python standard library with its sources"
        )
    return Corpus(_as_tensor(train), _as_tensor(held_out), files)


def _text_files(root: Path) -> list[str]:
    names = []
    for folder, subfolders, entries in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for entry in entries:
            path = Path(folder, entry)
            if path.suffix in _SUFFIXES and path.is_file():
                names.append(path.relative_to(root).as_posix())
    return sorted(names)


def _is_held_out(name: str) -> bool:
    # By a hash of the path and not by position: one more installed file moves no other file.
    return zlib.crc32(name.encode()) % HELD_OUT_EVERY == 0


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: torch.Tensor, seed: int, rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, text.numel() - length - 1, (rows, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()
