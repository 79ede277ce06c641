"""The store in a directory that this process may read and not write."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.contracts.store import (
    get_library,
    graph_key,
    kernel_entry,
    kernel_key,
    put_library,
    record,
)
from torch_pruner import exc
from torch_pruner.cache import ArtifactKind, KernelStore

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    store = KernelStore.open(tmp_path)
    store.put_kernel(kernel_entry())
    put_library(store, graph_key(), b"library", {"n": 1})
    store.add_records(kernel_key(), [record("a")])
    store.close()
    return tmp_path


def test_it_reads(filled: Path) -> None:
    before = _tree(filled)
    store = KernelStore.open(filled, read_only=True)
    assert store.read_only
    assert store.degraded is None
    assert store.get_kernel(kernel_key()) == kernel_entry()
    found = get_library(store, graph_key())
    assert found is not None
    assert found[1].read_bytes() == b"library"
    assert store.records(kernel_key()) == [record("a")]
    assert store.nearest(kernel_key(threads=9)) == kernel_key()
    assert store.verify().ok
    assert len(store.ls()) == 2
    assert store.stats().kernels == 1
    with store.claim(kernel_key().digest()) as mine:
        assert mine
    store.close()
    assert _tree(filled) == before


def test_puts_do_nothing_and_say_so_once(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = KernelStore.open(filled, read_only=True)
    better = kernel_entry(latency_s=1e-9)
    assert store.put_kernel(better) == better
    assert put_library(store, graph_key("new"), b"new", {}) is None
    store.add_records(kernel_key(), [record("b")])
    assert store.get_kernel(kernel_key()) == kernel_entry()
    assert get_library(store, graph_key("new")) is None
    assert store.records(kernel_key()) == [record("a")]
    assert store.stats().puts == 0
    (warning,) = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert "read-only" in warning.getMessage()


def test_dropped_entries_are_hidden_from_this_store_only(filled: Path) -> None:
    store = KernelStore.open(filled, read_only=True)
    store.drop_kernel(kernel_key())
    store.drop(ArtifactKind.LIBRARY, graph_key())
    assert store.get_kernel(kernel_key()) is None
    assert store.records(kernel_key()) == []
    assert get_library(store, graph_key()) is None
    assert store.ls() == []
    assert KernelStore.open(filled, read_only=True).get_kernel(kernel_key()) is not None


def test_looking_after_it_is_refused(filled: Path) -> None:
    store = KernelStore.open(filled, read_only=True)
    for look_after in (store.prune, store.clear):
        with pytest.raises(exc.CacheDirectoryError, match="read-only"):
            look_after()


def test_damage_is_a_miss_that_stays(filled: Path, caplog: pytest.LogCaptureFixture) -> None:
    (blob,) = filled.rglob("*.so")
    blob.write_bytes(b"librarY")
    store = KernelStore.open(filled, read_only=True)
    assert get_library(store, graph_key()) is None
    assert "damaged" in caplog.text
    assert store.stats().libraries == 1


def test_a_damaged_index_is_left_alone_and_done_without(filled: Path) -> None:
    (filled / "v2" / "index.sqlite").write_bytes(b"rubbish" * 1000)
    store = KernelStore.open(filled, read_only=True)
    assert "not a database" in str(store.degraded)
    assert store.get_kernel(kernel_key()) is None
    assert (filled / "v2" / "index.sqlite").read_bytes() == b"rubbish" * 1000


def test_nothing_to_read_is_memory(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "absent"):
        store = KernelStore.open(root, read_only=True)
        assert store.degraded is not None
        store.put_kernel(kernel_entry())
        assert store.get_kernel(kernel_key()) == kernel_entry()
        assert not (tmp_path / "absent").exists()


_AS_NOBODY = """
import os, sys
from tests.contracts.store import get_library, graph_key, kernel_entry, kernel_key, put_library
from torch_pruner.cache import KernelStore
os.setgid(65534); os.setuid(65534)  # after the imports: nobody may not read every interpreter
store = KernelStore.open(sys.argv[1])
assert store.degraded is None, store.degraded
assert store.read_only
assert store.get_kernel(kernel_key()) == kernel_entry()
assert get_library(store, graph_key())[1].read_bytes() == b"library"
store.put_kernel(kernel_entry(latency_s=1e-9))
store.drop_kernel(kernel_key())
assert store.get_kernel(kernel_key()) is None
"""


@pytest.fixture
def baked() -> Iterator[Path]:
    """A cache that root put into an image for other users to read."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as another user")
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    yield root
    shutil.rmtree(root)


@pytest.mark.parametrize("writer", ["gone", "present", "killed"])
def test_the_cache_of_an_image_is_read_by_any_user(baked: Path, writer: str) -> None:
    store = KernelStore.open(baked)
    store.put_kernel(kernel_entry())
    put_library(store, graph_key(), b"library", {"n": 1})
    if writer == "gone":
        store.close()
    root = baked
    if writer == "killed":  # the journal is there and nobody holds it
        root = baked / "copy"
        shutil.copytree(baked / "v2", root / "v2")
        (root / "v2" / "index.sqlite-shm").unlink()
    for path in [root, *root.rglob("*")]:
        path.chmod(0o755 if path.is_dir() else 0o644)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _AS_NOBODY, str(root)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _tree(root: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
