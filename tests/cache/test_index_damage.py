"""An index that was forged or damaged: rows are misses, other schemas are refused, and what was
committed does not lie in a log that one flaw ends."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
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
from tests.stress.writer import check, write
from torch_pruner.cache import KernelEntry, KernelStore, TuningRecord, index
from torch_pruner.cache.key import parse_object
from torch_pruner.cache.row_checksum import checksum_of

if TYPE_CHECKING:
    from pathlib import Path

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    store = KernelStore.open(tmp_path)
    store.put_kernel(kernel_entry())
    store.put_kernel(kernel_entry(kernel_key("other")))
    put_library(store, graph_key(), b"library", {"n": 1})
    store.add_records(kernel_key(), [record("a"), record("b")])
    store.close()
    return tmp_path


def execute(root: Path, *statements: str) -> None:
    conn = sqlite3.connect(root / "v2" / "index.sqlite")
    with conn:
        for statement in statements:
            conn.execute(statement)
    conn.close()


def with_right_checksum(root: Path, old: str, new: str) -> None:
    """Change the text of every kernel as somebody would who knows how rows are checksum."""
    conn = sqlite3.connect(root / "v2" / "index.sqlite")
    with conn:
        for digest, text in conn.execute("SELECT digest, entry FROM kernels").fetchall():
            forged = text.replace(old, new)
            assert forged != text
            values = (forged, checksum_of(digest, forged), digest)
            conn.execute("UPDATE kernels SET entry = ?, checksum = ? WHERE digest = ?", values)
    conn.close()


def moved_aside(root: Path) -> list[str]:
    found = (root / "v2").glob("index.sqlite.damaged-*")
    return [p.name for p in found if not p.name.endswith(("-wal", "-shm"))]


@pytest.mark.parametrize(
    "number", ["1" + "0" * 400, "1e400", "NaN", "Infinity", "-Infinity", str(1 << 63)]
)
def test_numbers_that_nobody_can_hold_are_misses(root: Path, number: str) -> None:
    """A latency of 10^400 ended in an OverflowError."""
    with_right_checksum(root, '"latency_s":0.001', f'"latency_s":{number}')
    store = KernelStore.open(root)
    assert store.get_kernel(kernel_key()) is None
    assert store.ls() == [item for item in store.ls() if not isinstance(item.entry, KernelEntry)]
    assert not store.verify().ok
    assert best_of(store, kernel_entry()) == kernel_entry()


def test_text_without_a_utf8_form_is_a_miss(root: Path) -> None:
    with_right_checksum(root, '"task":"fused_matmul"', '"task":"\\ud800"')
    assert KernelStore.open(root).get_kernel(kernel_key()) is None


def test_what_is_parsed_can_be_written() -> None:
    for bad in ('{"a": 1e999}', '{"a": [NaN]}', '{"\\udfff": 1}', '{"a": -9223372036854775809}'):
        with pytest.raises(ValueError, match=r"number|surrogates"):
            parse_object(bad)
    good = {"a": [1.5, -(1 << 63), (1 << 63) - 1], "b": "\U0001f600 é"}
    assert parse_object(json.dumps(good)) == good


def test_records_of_impossible_times_are_refused() -> None:
    sound = record("a").to_json()
    for changes in ({"run_secs": [10**400]}, {"time": 10**400}, {"run_secs": [True]}):
        with pytest.raises(ValueError, match=r"seconds"):
            TuningRecord.from_json({**sound, **changes})


@pytest.mark.parametrize("value", ["'yesterday'", "x'ff'", "9e999", "-9e999"])
def test_a_time_of_use_that_is_none_is_repaired(root: Path, value: str) -> None:
    """Text in ``used`` ended in a TypeError."""
    for table in ("kernels", "artifacts"):
        execute(root, f"UPDATE {table} SET used = {value}, created = {value}")
    execute(root, "UPDATE artifacts SET bytes = 'many'")
    now = 1.7e9
    store = KernelStore.open(root, clock=lambda: now)
    assert {(item.created, item.used) for item in store.ls()} == {(0.0, 0.0)}
    assert store.get_kernel(kernel_key()) == kernel_entry()
    assert get_library(store, graph_key()) is not None
    assert store.put_kernel(kernel_entry(kernel_key("other"))).latency_s == 1e-3
    assert sorted(item.used for item in store.ls()) == [now] * 3
    store.prune()
    assert store.verify().ok


def test_bytes_that_are_no_text_are_damage(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the name of a broken table they ended in a UnicodeDecodeError."""
    execute(
        root,
        "PRAGMA writable_schema = ON",
        "UPDATE sqlite_master SET name = CAST(x'ff' AS TEXT), sql = 'CREATE TABLE' "
        "WHERE name = 'kernels'",
    )
    store = KernelStore.open(root)
    assert store.degraded is None
    assert store.get_kernel(kernel_key()) is None
    assert best_of(store, kernel_entry()) == kernel_entry()
    assert len(moved_aside(root)) == 1
    assert caplog.text.count("moved it to") == 1


@pytest.mark.parametrize(
    "statement",
    [
        "CREATE TRIGGER t AFTER UPDATE ON kernels BEGIN DELETE FROM artifacts; END",
        "CREATE VIEW v AS SELECT * FROM kernels",
        "CREATE TABLE more (x)",
        "DROP INDEX artifacts_by_blob",
        "CREATE INDEX kernels_by_hex ON kernels (hex(entry))",
    ],
)
def test_what_we_did_not_create_is_refused(
    root: Path, statement: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A trigger would run with whatever is written."""
    execute(root, statement)
    assert "unknown schema" in str(KernelStore.open(root, read_only=True).degraded)
    store = KernelStore.open(root)
    assert store.get_kernel(kernel_key()) is None
    assert best_of(store, kernel_entry()) == kernel_entry()
    assert len(moved_aside(root)) == 1
    assert "unknown schema" in caplog.text


def test_a_damaged_page_costs_what_lies_on_it(tmp_path: Path) -> None:
    store = KernelStore.open(tmp_path)
    for n in range(60):
        store.put_kernel(kernel_entry(kernel_key(f"kernel {n}"), workload_text="x" * 3000))
    store.close()
    path = tmp_path / "v2" / "index.sqlite"
    data = bytearray(path.read_bytes())
    page = len(data) // 4096 // 2 * 4096
    data[page : page + 8] = b"\xff" * 8
    path.write_bytes(data)
    store = KernelStore.open(tmp_path)
    store.verify()
    found = [store.get_kernel(kernel_key(f"kernel {n}")) for n in range(60)]
    assert sum(entry is not None for entry in found) >= 50
    assert store.degraded is None
    for n in range(60):
        key = kernel_key(f"kernel {n}")
        assert best_of(store, kernel_entry(key, workload_text="x" * 3000)).key == key


_WRITES = """
import sys, threading
from tests.stress.writer import write
from torch_pruner.compiler.stores import store_for
from torch_pruner.config import Config
store = store_for(Config.from_options(options={"cache_dir": sys.argv[1]}))
for n in range(5):
    write(store, n)
# As in a server: somebody holds the store until the very end.
threading.Thread(target=lambda kept: threading.Event().wait(), daemon=True, args=(store,)).start()
"""


def test_the_log_is_empty_when_a_process_has_ended(tmp_path: Path) -> None:
    """It held everything, and one flipped bit ended it."""
    subprocess.run([sys.executable, "-c", _WRITES, str(tmp_path)], env=ENV, check=True)
    assert not (tmp_path / "v2" / "index.sqlite-wal").exists()
    store = KernelStore.open(tmp_path, read_only=True)
    assert all(check(store, n) for n in range(5))


def test_the_log_is_emptied_while_a_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "v2" / "index.sqlite-wal"
    monkeypatch.setattr(index, "CHECKPOINT_S", 0.0)
    store = KernelStore.open(tmp_path)
    write(store, 0)
    assert log.stat().st_size == 0
    monkeypatch.setattr(index, "CHECKPOINT_S", 1e9)
    write(store, 1)
    assert log.stat().st_size > 0
    monkeypatch.setattr(index, "CHECKPOINT_BYTES", 0)
    write(store, 2)
    assert log.stat().st_size == 0


def test_what_a_killed_process_left_is_settled_by_the_next(tmp_path: Path) -> None:
    script = _WRITES.replace("range(5)", "range(5)", 1) + "import os; os.kill(os.getpid(), 9)\n"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=ENV)
    assert done.returncode == -signal.SIGKILL
    log = tmp_path / "v2" / "index.sqlite-wal"
    store = KernelStore.open(tmp_path)
    assert all(check(store, n) for n in range(5))
    assert not log.exists() or log.stat().st_size == 0
