"""The store on a working disk."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import sqlite3
import stat
import subprocess
import sys
from typing import TYPE_CHECKING

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
from torch_pruner.cache import ArtifactKind, KernelStore, location

if TYPE_CHECKING:
    from pathlib import Path


class TestOnDisk(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> KernelStore:
        store = KernelStore.open(tmp_path / "cache")
        assert store.degraded is None
        return store


class TestOnNetworkFileSystem(StoreContract):
    """Without shared memory sqlite keeps a rollback journal instead of its write-ahead log."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> KernelStore:
        monkeypatch.setattr("torch_pruner.cache.index.shares_memory", lambda path: False)
        return KernelStore.open(tmp_path / "cache")

    def test_there_is_no_write_ahead_log(self, store: KernelStore, tmp_path: Path) -> None:
        store.put_kernel(kernel_entry())
        assert not list((tmp_path / "cache").rglob("*-wal"))


def test_what_was_put_is_found_by_another_store(tmp_path: Path) -> None:
    one, two = KernelStore.open(tmp_path), KernelStore.open(tmp_path)
    one.put_kernel(kernel_entry())
    path = put_library(one, graph_key(), b"library", {"n": 1})
    one.add_records(kernel_key(), [record("a")])
    assert two.get_kernel(kernel_key()) == kernel_entry()
    found = get_library(two, graph_key())
    assert found is not None
    assert found[1] == path
    assert two.records(kernel_key()) == [record("a")]
    assert two.stats().hits == 2


def test_a_store_survives_pickling_as_its_root(tmp_path: Path) -> None:
    store = KernelStore.open(tmp_path, max_bytes=123)
    store.put_kernel(kernel_entry())
    other = pickle.loads(pickle.dumps(store))
    assert other.get_kernel(kernel_key()) == kernel_entry()
    assert other.max_bytes == 123
    (tmp_path / "file").touch()
    memory = pickle.loads(pickle.dumps(KernelStore.open(tmp_path / "file")))
    assert memory.degraded is not None


def test_everything_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = KernelStore.open(tmp_path / "cache")
        store.put_kernel(kernel_entry())
        put_library(store, graph_key(), b"library", {})
        with store.claim(kernel_key().digest()):
            pass
    finally:
        os.umask(before)
    for path in [tmp_path / "cache", *(tmp_path / "cache").rglob("*")]:
        expected = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == expected, path


def test_a_version_directory_open_to_others_is_closed(tmp_path: Path) -> None:
    (tmp_path / "v2").mkdir()
    (tmp_path / "v2").chmod(0o777)
    KernelStore.open(tmp_path)
    assert stat.S_IMODE((tmp_path / "v2").stat().st_mode) == 0o755


def test_an_earlier_format_is_left_alone_until_everything_is_removed(tmp_path: Path) -> None:
    former = tmp_path / "v1" / "index.sqlite"
    former.parent.mkdir(mode=0o700)
    with contextlib.closing(sqlite3.connect(former)) as conn:
        conn.execute("CREATE TABLE graphs (digest TEXT PRIMARY KEY, blob TEXT NOT NULL)")
        conn.execute("PRAGMA user_version = 1")
    before = former.read_bytes()
    store = KernelStore.open(tmp_path)
    assert store.ls() == []
    assert store.get_kernel(kernel_key()) is None
    put_library(store, graph_key(), b"library", {})
    store.prune()
    assert store.verify().ok
    assert former.read_bytes() == before
    store.clear()
    assert not former.parent.exists()


def test_an_index_of_the_earlier_format_in_this_place_is_moved_aside(tmp_path: Path) -> None:
    KernelStore.open(tmp_path).close()
    index = tmp_path / "v2" / "index.sqlite"
    with contextlib.closing(sqlite3.connect(index)) as conn:
        conn.execute("ALTER TABLE artifacts DROP COLUMN kind")
        conn.execute("ALTER TABLE artifacts RENAME TO graphs")
        conn.execute("PRAGMA user_version = 1")
    store = KernelStore.open(tmp_path)
    assert get_library(store, graph_key()) is None
    put_library(store, graph_key(), b"library", {})
    assert get_library(KernelStore.open(tmp_path), graph_key()) is not None
    assert list((tmp_path / "v2").glob("index.sqlite.damaged-*"))


@pytest.fixture
def foreign_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache that another user filled: really, where the tests run as root."""
    root = tmp_path / "cache"
    KernelStore.open(root).put_kernel(kernel_entry())
    if os.geteuid() == 0:
        os.chown(root, 12345, 12345)
    else:
        monkeypatch.setattr(location.os, "geteuid", lambda: os.getuid() + 1)
    return root


def test_a_root_of_another_user_is_refused(foreign_root: Path) -> None:
    for read_only in (False, True):
        with pytest.raises(exc.CacheDirectoryError, match="belongs to user"):
            KernelStore.open(foreign_root, read_only=read_only)


def test_a_default_root_of_another_user_is_done_without(
    foreign_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(location, "default_root", lambda: foreign_root)
    store = KernelStore.open()
    assert "belongs to user" in str(store.degraded)
    assert best_of(store, kernel_entry(latency_s=1.0)).latency_s == 1.0


def test_a_root_removed_while_in_use_is_made_again(tmp_path: Path) -> None:
    root = tmp_path / "cache"
    store = KernelStore.open(root)
    store.put_kernel(kernel_entry())
    root.rename(tmp_path / "elsewhere")
    assert store.get_kernel(kernel_key()) is None
    assert best_of(store, kernel_entry()) == kernel_entry()
    put_library(store, graph_key(), b"library", {})
    assert get_library(KernelStore.open(root), graph_key()) is not None
    assert store.degraded is None


def test_hits_are_remembered_as_uses(tmp_path: Path) -> None:
    now = [1e9]
    store = KernelStore.open(tmp_path, clock=lambda: now[0])
    store.put_kernel(kernel_entry())
    now[0] += 3600
    store.get_kernel(kernel_key())
    assert [(item.created, item.used) for item in store.ls()] == [(1e9, 1e9 + 3600)]


def test_equal_libraries_are_stored_once(tmp_path: Path) -> None:
    store = KernelStore.open(tmp_path)
    paths = {put_library(store, graph_key(name), b"library", {}) for name in ("a", "b")}
    assert len(paths) == 1
    store.drop(ArtifactKind.LIBRARY, graph_key("a"))
    assert get_library(store, graph_key("b")) is not None


def test_libraries_can_be_checked_out_without_end(tmp_path: Path) -> None:
    store = KernelStore.open(tmp_path)
    for i in range(80):
        put_library(store, graph_key(f"net {i}"), b"library %d" % i, {})
    open_blobs = [
        target
        for fd in os.listdir("/proc/self/fd")
        if ".so" in (target := _readlink(f"/proc/self/fd/{fd}")) and str(tmp_path) in target
    ]
    assert len(open_blobs) == 64
    store.close()


def _readlink(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


@pytest.mark.parametrize("environment", [{}, {"HOME": ""}, {"HOME": "relative"}])
def test_a_user_without_a_home_has_a_store(tmp_path: Path, environment: dict[str, str]) -> None:
    """No HOME and a uid that no user database knows, as in many containers."""
    script = (
        "import os, pwd, tempfile\n"
        "def unknown(uid): raise KeyError(uid)\n"
        "pwd.getpwuid = unknown\n"
        "from torch_pruner.cache import KernelStore\n"
        "store = KernelStore.open()\n"
        "assert store.degraded is None, store.degraded\n"
        "assert str(store.root).startswith(tempfile.gettempdir()), store.root\n"
    )
    env = {"TMPDIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    subprocess.run([sys.executable, "-c", script], env=env, check=True, cwd=tmp_path)


def test_network_file_systems_are_told_from_local_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = f"/dev/a / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\nbroken\n"
    monkeypatch.setattr(location.Path, "read_text", lambda *args, **kwargs: mounts)
    assert not location.shares_memory(tmp_path / "cache")
    assert location.shares_memory(tmp_path.parent)


def test_a_store_is_as_good_as_its_entries_are_typed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        kernel_key().threads = 3  # type: ignore[misc]
