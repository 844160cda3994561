"""Locate directories of users, local paths or URLs of stores, and replace files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: A URL that pathlib has collapsed: ``Path("s3://bucket/x")`` is ``s3:/bucket/x``.
COLLAPSED_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)")


def locate(directory: str | os.PathLike[str]) -> Path | str:
    """Return an absolute local path, or the URL of a store.

    A ``file://`` URL is the local path that it names.

    Args:
        directory: a local path, or a URL of a scheme that fsspec supports, as a str.

    Raises:
        ValueError: fsspec does not support the scheme, or a package that it needs for the scheme is
            not installed, or the URL was passed through pathlib.
    """
    text = os.fspath(directory)
    if COLLAPSED_URL.match(text):
        raise ValueError(
            f"directory is {directory!r}, a URL whose slashes pathlib has collapsed. Pass the URL "
            "as a str"
        )
    if "://" not in text:
        return Path(text).absolute()
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    try:
        store, path = url_to_fs(text)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"directory is {text!r}, which fsspec cannot open: {error}. Pass a local path, or a "
            "URL of a scheme whose package is installed (s3fs for s3://, gcsfs for gs://)"
        ) from error
    return Path(path) if isinstance(store, LocalFileSystem) else text


def open_store(located: Path | str) -> tuple[Any, str]:
    """Return fsspec's file system for a location of `locate`, and the path in it."""
    from fsspec.core import url_to_fs
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(located, Path):
        return LocalFileSystem(), os.path.abspath(located)
    store, path = url_to_fs(located)
    return store, path.rstrip("/")


@contextmanager
def replace_atomically(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces ``path`` when the context ends.

    If the context raises an error, ``path`` stays as it is, and the temporary file is removed.
    """
    # matplotlib chooses the file format by the suffix.
    temporary = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
