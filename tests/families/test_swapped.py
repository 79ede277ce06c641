"""Libraries and captured graphs under each other's rows: what comes out is eager's all the same."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest
import torch

from torch_pruner.cache import ArtifactEntry, ArtifactKind, KernelStore
from torch_pruner.cache.row_checksum import checksum_of
from torch_pruner.compiler import stores

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.tvm


def plus(x: torch.Tensor) -> torch.Tensor:
    return x + 1.5


def times(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5


def run(function: Callable[[torch.Tensor], torch.Tensor], cache: Path) -> None:
    """Compile as a process would that knows what is in the cache and nothing else."""
    torch._dynamo.reset()
    stores._stores.clear()
    options = {"effort": "none", "cache_dir": str(cache), "strict": False}
    compiled = torch.compile(function, backend="pruner", options=options)
    x = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(x), function(x))


def swap(cache: Path, kind: ArtifactKind) -> None:
    """Exchange the blobs of two rows, with the checksums that anybody can compute."""
    entries = {item.digest: item.entry for item in KernelStore.open(cache, read_only=True).ls()}
    pair = [
        digest
        for digest, entry in entries.items()
        if isinstance(entry, ArtifactEntry) and entry.kind is kind
    ]
    assert len(pair) == 2, list(entries.values())
    conn = sqlite3.connect(cache / "v2" / "index.sqlite")
    with conn:
        query = "SELECT blob, entry FROM artifacts WHERE digest = ?"
        (one, first), (two, second) = (conn.execute(query, (d,)).fetchone() for d in pair)
        for digest, old, new, text in ((pair[0], one, two, first), (pair[1], two, one, second)):
            forged = text.replace(old, new)
            values = (new, forged, checksum_of(digest, forged), digest)
            conn.execute(
                "UPDATE artifacts SET blob = ?, entry = ?, checksum = ? WHERE digest = ?", values
            )
    conn.close()


@pytest.mark.parametrize(
    ("kind", "home"),
    [
        (ArtifactKind.LIBRARY, "the same"),
        (ArtifactKind.LIBRARY, "another"),
        (ArtifactKind.CAPTURED, "another"),
    ],
)
def test_a_swapped_blob_gives_no_wrong_number(
    tmp_path: Path, kind: ArtifactKind, home: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A verdict about a program and its kernels said nothing of the library that was loaded."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    cache = tmp_path / "cache"
    for function in (plus, times, plus, times):
        run(function, cache)
    for store in stores._stores.values():
        store.close()
    swap(cache, kind)
    if home == "another":  # where nobody's signature is expected
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "another"))
    for function in (plus, times):
        run(function, cache)


@pytest.mark.parametrize("kind", [ArtifactKind.LIBRARY, ArtifactKind.CAPTURED])
def test_neither_the_verdict_nor_the_text_needs_a_signature(
    tmp_path: Path, kind: ArtifactKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has the key himself and swaps two rows gets no wrong number either."""
    cache = tmp_path / "cache"
    for function in (plus, times, plus, times):
        run(function, cache)
    swap(cache, kind)
    KernelStore.open(cache).adopt()
    for function in (plus, times):
        run(function, cache)
