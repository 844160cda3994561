"""Text that every machine has: the sources of the Python standard library, as installed.

The corpus is bytes, so the vocabulary is 256. Batches depend only on the installed files, a seed
and the step. Each rank computes the global batch and takes its own rows.
"""

from __future__ import annotations

import os
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

#: Number of byte values.
VOCABULARY = 256
#: One file in this many is held out.
HELD_OUT_EVERY = 16
_SUFFIXES = {".py", ".pyi", ".txt", ".rst"}
#: Other packages, tests, which many installs lack, and tables of data.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
#: Bytes. Shorter files are mostly empty `__init__.py` files.
_SHORTEST = 256


@dataclass(frozen=True)
class Corpus:
    """Training text and held-out text, as flat tensors of token ids."""

    train: torch.Tensor
    held_out: torch.Tensor

    def batch(self, seed: int, step: int, rows: int, length: int) -> torch.Tensor:
        """Return the global training batch of a step: int64 (rows, length + 1)."""
        return _windows(self.train, seed * 1_000_003 + step, rows, length)

    def held_out_batch(self, index: int, rows: int, length: int) -> torch.Tensor:
        """Return a held-out batch: int64 (rows, length + 1)."""
        return _windows(self.held_out, -1 - index, rows, length)


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the corpus below ``root``, by default the standard library.

    Raises:
        ValueError: there is too little text.
    """
    if root is None:
        root = Path(sysconfig.get_paths()["stdlib"])

    train_files = []
    held_out_files = []
    for name in _text_files(root):
        content = (root / name).read_bytes()
        if len(content) < _SHORTEST:
            continue
        # With a hash of the path, another installed file does not move the others.
        if zlib.crc32(name.encode()) % HELD_OUT_EVERY == 0:
            held_out_files.append(content)
        else:
            train_files.append(content)

    train = b"\n".join(train_files)
    held_out = b"\n".join(held_out_files)
    if len(held_out) < 1 << 15 or len(train) < 1 << 18:
        raise ValueError(
            f"too little text below {root}: {len(train)} training bytes. The demo needs an "
            "installed Python standard library with its sources"
        )
    return Corpus(_as_tensor(train), _as_tensor(held_out))


def _text_files(root: Path) -> list[str]:
    names = []
    for folder, subfolders, entries in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        for entry in entries:
            path = Path(folder, entry)
            if path.suffix in _SUFFIXES and path.is_file():
                names.append(path.relative_to(root).as_posix())
    return sorted(names)


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _windows(text: torch.Tensor, seed: int, rows: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, text.numel() - length - 1, (rows, 1), generator=generator)
    return text[starts + torch.arange(length + 1)].long()
