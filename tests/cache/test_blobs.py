"""Blobs whose files come and go while they are opened."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from torch_pruner.cache.blobs import BlobDir, sha256

if TYPE_CHECKING:
    from pathlib import Path

DATA = b"library"
DIGEST = sha256(DATA)


@pytest.fixture
def blobs(tmp_path: Path) -> BlobDir:
    blobs = BlobDir(tmp_path)
    blobs.publish(DIGEST, DATA)
    return blobs


def meddle(monkeypatch: pytest.MonkeyPatch, action: object, times: int = 1) -> list[int]:
    """Do ``action`` between opening a file and locking it, ``times`` times; the locks asked."""
    asked: list[int] = []

    def flock(fd: int, operation: int, real: object = fcntl.flock) -> None:
        asked.append(operation)
        if len(asked) <= times:
            action()  # type: ignore[operator]
        real(fd, operation)  # type: ignore[operator]

    monkeypatch.setattr(fcntl, "flock", flock)
    return asked


def test_a_blob_that_another_writer_renames_over_is_found(
    blobs: BlobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both writers saw no file, both publish; the reader opened the first one's."""

    def replace() -> None:
        fresh = blobs.root / "fresh"
        fresh.write_bytes(DATA)
        os.replace(fresh, blobs.path(DIGEST))

    asked = meddle(monkeypatch, replace, times=3)
    assert blobs.checkout(DIGEST).read_bytes() == DATA
    assert len(asked) == 4
    assert not BlobDir(blobs.root).unused(DIGEST), "the file under the name is the one locked"


def test_a_blob_that_is_removed_meanwhile_is_gone(
    blobs: BlobDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    meddle(monkeypatch, blobs.remove_all)
    with pytest.raises(FileNotFoundError):
        blobs.checkout(DIGEST)


def test_a_blob_that_is_being_removed_is_gone(blobs: BlobDir) -> None:
    with open(blobs.path(DIGEST), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(FileNotFoundError, match="being removed"):
            blobs.checkout(DIGEST)
    assert blobs.checkout(DIGEST) == blobs.path(DIGEST)
