"""Damage of every kind: a miss that says so, and a store that works again."""

from __future__ import annotations

import os
import random
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.contracts.store import (
    best_of,
    get_library,
    graph_key,
    kernel_entry,
    kernel_key,
    put_library,
    record,
)
from torch_pruner.cache import KernelStore

if TYPE_CHECKING:
    from collections.abc import Callable


def fill(root: Path) -> None:
    store = KernelStore.open(root)
    store.put_kernel(kernel_entry())
    store.put_kernel(kernel_entry(kernel_key("other"), candidate={"sketch": "other"}))
    put_library(store, graph_key(), b"library", {"n": 1})
    put_library(store, graph_key("other"), b"another library", {"n": 2})
    store.add_records(kernel_key(), [record("a"), record("b")])
    store.close()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    fill(tmp_path)
    return tmp_path


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def blank(path: Path) -> None:
    path.write_bytes(b"")


def rubbish(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(20_000))


def change_inode(path: Path) -> None:
    """Damage as ``rsync`` or an editor would do it."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data[::-1])


def moved_aside(root: Path) -> list[Path]:
    found = (root / "v2").glob("index.sqlite.damaged-*")
    return [path for path in found if not path.name.endswith(("-wal", "-shm"))]


def blob_of(root: Path, key: str) -> Path:
    found = get_library(KernelStore.open(root, read_only=True), graph_key(key))
    assert found is not None
    return found[1]


@pytest.mark.parametrize("damage", [flip, halve, blank, rubbish, Path.unlink])
def test_a_damaged_library_is_a_miss(
    root: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(blob_of(root, "net"))
    store = KernelStore.open(root)
    assert not store.verify().ok
    assert get_library(store, graph_key()) is None
    assert "damaged cache entry" in caplog.text
    assert get_library(store, graph_key("other")) is not None
    assert store.stats().libraries == 1
    put_library(store, graph_key(), b"library", {"n": 1})
    found = get_library(store, graph_key())
    assert found is not None
    assert found[1].read_bytes() == b"library"
    assert store.verify().ok


def test_swapped_libraries_are_misses(root: Path) -> None:
    one, two = blob_of(root, "net"), blob_of(root, "other")
    keep = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(keep)
    store = KernelStore.open(root)
    assert get_library(store, graph_key()) is None
    assert get_library(store, graph_key("other")) is None


def test_an_unreadable_library_is_a_miss_that_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """For instance too many open files: the entry is not at fault."""
    store = KernelStore.open(root)

    def fails(*args: object) -> None:
        raise OSError(24, "Too many open files")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store._fallback.main().blobs, "checkout", fails)
        assert get_library(store, graph_key()) is None
    assert "Too many open files" in caplog.text
    assert get_library(store, graph_key()) is not None


def rows(root: Path, *statements: str) -> None:
    with sqlite3.connect(root / "v2" / "index.sqlite") as conn:
        for statement in statements:
            assert conn.execute(statement).rowcount, statement
    conn.close()


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE kernels SET entry = replace(entry, '0.001', '0.0001')",
        "UPDATE kernels SET entry = substr(entry, 1, 100)",
        "UPDATE kernels SET entry = ''",
        "UPDATE kernels SET entry = x'ff00fe'",
        "UPDATE kernels SET entry = CAST(x'22fffe22' AS TEXT)",
        "UPDATE kernels SET entry = 7",
        "UPDATE kernels SET checksum = 'x'",
    ],
)
def test_a_damaged_row_is_a_miss(
    root: Path, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows(root, statement)
    store = KernelStore.open(root)
    assert len(store.verify().problems) == 2
    assert store.nearest(kernel_key("third")) is None
    assert store.get_kernel(kernel_key()) is None
    assert "damaged cache entry" in caplog.text
    assert store.stats().kernels == 1
    assert best_of(store, kernel_entry()) == kernel_entry()
    store.put_kernel(kernel_entry(kernel_key("other")))
    assert store.verify().ok


def test_swapped_rows_are_misses(root: Path) -> None:
    """Each is sound in itself, under the other's name."""
    one, two = kernel_key().digest(), kernel_key("other").digest()
    rows(
        root,
        f"UPDATE kernels SET digest = 'x' WHERE digest = '{one}'",
        f"UPDATE kernels SET digest = '{one}' WHERE digest = '{two}'",
        f"UPDATE kernels SET digest = '{two}' WHERE digest = 'x'",
    )
    store = KernelStore.open(root)
    assert store.get_kernel(kernel_key()) is None
    assert store.get_kernel(kernel_key("other")) is None


def test_damaged_graph_rows_and_records_are_misses(root: Path) -> None:
    rows(
        root,
        "UPDATE artifacts SET entry = replace(entry, '1', '2') WHERE bytes = 7",
        "UPDATE records SET entry = replace(entry, 'ok', 'no') WHERE candidate = 'a'",
        "UPDATE tasks SET checksum = ''",
    )
    store = KernelStore.open(root)
    assert len(store.verify().problems) == 3
    assert get_library(store, graph_key()) is None
    assert store.records(kernel_key()) == [record("b")]
    assert list(store.export_records()) == []


@pytest.mark.parametrize("running", [False, True])
def test_an_emptied_index_is_begun_anew(
    root: Path, running: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """As a process leaves it that was killed when it made it: there is nothing to keep of it."""
    store = KernelStore.open(root)
    if running:
        assert store.get_kernel(kernel_key()) is not None
        store.close()
    blank(root / "v2" / "index.sqlite")
    if not running:
        store = KernelStore.open(root)
    assert get_library(store, graph_key()) is None
    assert best_of(store, kernel_entry()) == kernel_entry()
    assert store.degraded is None
    assert store.verify().ok
    assert "is empty" in caplog.text
    assert not moved_aside(root)


@pytest.mark.parametrize("damage", [rubbish, halve, change_inode])
@pytest.mark.parametrize("running", [False, True])
def test_a_damaged_index_is_moved_aside(
    root: Path,
    damage: Callable[[Path], None],
    running: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = KernelStore.open(root)
    if running:
        assert store.get_kernel(kernel_key()) is not None
        store.close()
    damage(root / "v2" / "index.sqlite")
    if not running:
        store = KernelStore.open(root)
    store.get_kernel(kernel_key())
    get_library(store, graph_key())
    store.records(kernel_key())
    assert best_of(store, kernel_entry()) == kernel_entry()
    put_library(store, graph_key(), b"library", {"n": 1})
    assert get_library(store, graph_key()) is not None
    assert store.degraded is None
    (problem,) = store.verify().problems
    assert "index: a damaged one is kept as" in problem
    assert "index" in caplog.text
    assert len(moved_aside(root)) == 1
    assert KernelStore.open(root).get_kernel(kernel_key()) == kernel_entry()
    store.clear()
    assert not moved_aside(root)


def test_any_flipped_byte_of_the_index_is_survived(root: Path) -> None:
    """Wherever it is: nothing wrong is returned, and putting works."""
    index = root / "v2" / "index.sqlite"
    sound = index.read_bytes()
    positions = [*range(0, 100, 3), *random.Random(0).sample(range(100, len(sound)), 30)]
    for at in positions:
        index.unlink()
        index.write_bytes(sound)
        flip(index, at)
        store = KernelStore.open(root)
        assert store.get_kernel(kernel_key()) in (None, kernel_entry()), at
        get_library(store, graph_key())
        for found in store.records(kernel_key()):
            assert found in (record("a"), record("b")), at
        assert best_of(store, kernel_entry()) == kernel_entry(), at
        store.verify()
        store.close()
        for left in (root / "v2").glob("index.sqlite?*"):
            left.unlink()


def test_a_foreign_database_is_moved_aside(root: Path) -> None:
    for statement in ("DROP TABLE kernels", "PRAGMA user_version = 99"):
        with sqlite3.connect(root / "v2" / "index.sqlite") as conn:
            conn.execute(statement)
        conn.close()
        store = KernelStore.open(root)
        assert best_of(store, kernel_entry()) == kernel_entry()
        assert store.degraded is None
    assert len(moved_aside(root)) == 2


def test_two_stores_move_a_damaged_index_aside_once(root: Path) -> None:
    one, two = KernelStore.open(root), KernelStore.open(root)
    for store in (one, two):
        assert store.get_kernel(kernel_key()) is not None
    one.close()
    two.close()
    rubbish(root / "v2" / "index.sqlite")
    one.put_kernel(kernel_entry())
    assert two.get_kernel(kernel_key()) == kernel_entry()
    assert len(moved_aside(root)) == 1


def test_a_journal_of_another_index_is_not_replayed(root: Path) -> None:
    """The journal of a damaged index goes with it."""
    store = KernelStore.open(root)
    store.put_kernel(kernel_entry(kernel_key("third")))
    copy = {p.name: p.read_bytes() for p in (root / "v2").glob("index.sqlite*")}
    assert copy["index.sqlite-wal"]
    store.close()
    for name, data in copy.items():
        (root / "v2" / name).write_bytes(data)
    flip(root / "v2" / "index.sqlite", 3)
    (root / "v2" / "index.sqlite-shm").unlink()
    store = KernelStore.open(root)
    best_of(store, kernel_entry())
    (problem,) = store.verify().problems
    assert str(moved_aside(root)[0]) in problem
    assert os.listdir(root / "v2" / "blobs")
