"""The store where there is no working disk: it goes on in memory, and says so once."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.store import (
    StoreContract,
    best_of,
    get_library,
    graph_key,
    kernel_entry,
    kernel_key,
    put_library,
    record,
)
from torch_pruner import exc
from torch_pruner.cache import ArtifactKind, KernelStore


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


class TestWithoutDirectory(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> KernelStore:
        """The root is a file."""
        (tmp_path / "file").write_text("not a directory")
        store = KernelStore.open(tmp_path / "file")
        assert store.degraded is not None
        return store


class TestDiskFillsUp(StoreContract):
    """The first write fails; the disk, still empty, is read on."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelStore:
        store = KernelStore.open(tmp_path / "cache")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", _no_space)
            put_library(store, graph_key("gone"), b"library", {})
        store.drop(ArtifactKind.LIBRARY, graph_key("gone"))
        assert "No space left" in str(store.degraded)
        store._puts = 0
        return store

    def test_listing_verify_and_clear(self, store: KernelStore) -> None:
        """Verify and clear look after the disk."""
        store.put_kernel(kernel_entry())
        assert store.verify().sound["kernels"] == 0
        store.clear()
        assert store.ls() == []


def _no_space(fd: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("bad", ["/proc/nothing-here", "/dev/null/cache"])
def test_an_impossible_root_is_one_warning(bad: str, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        store = KernelStore.open(bad)
        assert best_of(store, kernel_entry()) == kernel_entry()
    (warning,) = warnings_of(caplog)
    assert "TORCH_PRUNER_CACHE_DIR" in warning


def test_a_full_disk_keeps_what_it_has(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = KernelStore.open(tmp_path)
    store.put_kernel(kernel_entry(latency_s=1e-3, effort="full"))
    store.add_records(kernel_key(), [record("a"), record("b", "timeout")])
    put_library(store, graph_key(), b"library", {})
    _fill(store)
    store.put_kernel(kernel_entry(kernel_key("new", numerics="x" * 5000)))
    assert "full" in str(store.degraded)
    (warning,) = warnings_of(caplog)
    assert "kept in memory" in warning

    assert store.put_kernel(kernel_entry(latency_s=1.0)).latency_s == 1e-3
    store.put_kernel(kernel_entry(latency_s=1e-4, effort="quick"))
    store.add_records(kernel_key(), [record("c"), record("b")])
    found = store.get_kernel(kernel_key())
    assert found is not None
    assert (found.latency_s, found.effort) == (1e-4, "full")
    assert [(r.digest, r.status) for r in store.records(kernel_key())] == [
        ("a", "ok"),
        ("b", "ok"),
        ("c", "ok"),
    ]
    assert get_library(store, graph_key()) is not None
    store.drop_kernel(kernel_key())
    assert store.get_kernel(kernel_key()) is None
    store.drop(ArtifactKind.LIBRARY, graph_key())
    assert get_library(store, graph_key()) is None
    assert len(warnings_of(caplog)) == 1
    other = KernelStore.open(tmp_path).get_kernel(kernel_key())
    assert other is not None
    assert other.latency_s == 1e-3


def _fill(store: KernelStore) -> None:
    """Let the index have no page more than now."""
    store._fallback.main().index.run(
        lambda conn: conn.execute("PRAGMA max_page_count = 1").fetchall()
    )


def test_a_disk_that_cannot_be_read_any_more_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KernelStore.open(tmp_path)
    store.put_kernel(kernel_entry())

    def fails(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(store._fallback.main().index, "run", fails)
    assert store.get_kernel(kernel_key()) is None
    assert "Input/output error" in str(store.degraded)
    assert best_of(store, kernel_entry()) == kernel_entry()
    assert store.stats().kernels == 1


def test_a_disk_that_lies_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes back from the disk is not what was written."""
    store = KernelStore.open(tmp_path)
    replace = os.replace

    def flip(source: Any, target: Any) -> None:
        Path(source).write_bytes(b"rubbish")
        replace(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", flip)
        put_library(store, graph_key(), b"library", {})
    assert "what was written" in str(store.degraded)
    assert get_library(KernelStore.open(tmp_path), graph_key()) is None


def test_without_any_temporary_directory_libraries_are_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **kwargs: _no_space(0))
    store = KernelStore.open("/proc/nothing-here")
    assert put_library(store, graph_key(), b"library", {}) is None
    assert get_library(store, graph_key()) is None
    assert best_of(store, kernel_entry()) == kernel_entry()


def test_looking_after_a_broken_disk_says_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = KernelStore.open(tmp_path)
    monkeypatch.setattr(store._fallback.main().index, "run", lambda *a, **k: _no_space(0))
    for look_after in (store.verify, store.prune, store.clear):
        with pytest.raises(exc.CacheDirectoryError, match="No space left"):
            look_after()


_LIMITED = """
import logging, resource, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
from tests.contracts.store import get_library, graph_key, kernel_entry, kernel_key, put_library
from torch_pruner.cache import KernelStore
store = KernelStore.open(sys.argv[1])
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
for i in range(40):
    key = kernel_key(f"kernel {i}", numerics="x" * 4000)
    store.put_kernel(kernel_entry(key))
    assert store.get_kernel(key) is not None, i
put_library(store, graph_key(), b"x" * 200_000, {})
assert store.degraded
store.clear
"""


@pytest.mark.parametrize("limit", [0, 20_000, 150_000])
def test_a_limit_on_file_sizes_loses_nothing(tmp_path: Path, limit: int) -> None:
    """Real failing writes, to the index and to a blob, at several points."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _LIMITED, str(tmp_path), str(limit)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("WARNING") == 1, done.stdout
    store = KernelStore.open(tmp_path)
    assert store.degraded is None
    assert store.verify().ok
    assert not list(tmp_path.rglob(".tmp-*"))
