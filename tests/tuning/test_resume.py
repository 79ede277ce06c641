"""Tuning that is killed goes on where it was; a damaged cache is rebuilt with a warning."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import torch_pruner as tp
from tests.compile.agreement import assert_equal
from torch_pruner.cache import Artifact, ArtifactEntry, ArtifactKind, KernelStore
from torch_pruner.compiler import stores

pytestmark = pytest.mark.tvm
ROOT = Path(__file__).resolve().parents[2]
TRIALS = 12

# Tunes two kernels. After `kill_after` new records the process kills itself, as an out-of-memory
# killer would: nothing is flushed, closed or cleaned up. Prints what the last run knows.
SCRIPT = """
import json, os, signal, sys
import torch, torch_pruner as tp
from torch_pruner.cache import KernelStore

kill_after, cache = int(sys.argv[1]), sys.argv[2]
measured = 0
add = KernelStore.add_records

def children():
    found = []
    for thread in os.listdir("/proc/self/task"):
        found += open(f"/proc/self/task/{thread}/children").read().split()
    return found

def counted(self, key, records):
    global measured
    add(self, key, records)
    measured += len(records)
    if measured == kill_after:
        print(json.dumps({"workers": children()}), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

KernelStore.add_records = counted
def fn(x, w):
    return torch.softmax(x @ w, -1)
torch.manual_seed(0)
x, w = torch.randn(24, 40), torch.randn(40, 56)
options = {"effort": "quick", "trials": TRIALS, "time_budget_s": 300.0, "library": False,
           "cache_dir": cache, "strict": True, "threads": 1}
torch.testing.assert_close(torch.compile(fn, backend="pruner", options=options)(x, w), fn(x, w))
tasks = [t for g in tp.last_report().graphs for t in g.tasks]
print(json.dumps({"measured": measured, "sources": sorted(t.source for t in tasks),
                  "trials": sum(t.trials for t in tasks)}))
""".replace("TRIALS", str(TRIALS))


def tune(cache: Path, kill_after: int = 0) -> tuple[int, dict]:
    """The script's exit status and what it printed last."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(kill_after), str(cache)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr[-3000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def records(cache: Path) -> int:
    with sqlite3.connect(cache / "v2" / "index.sqlite") as conn:
        return int(conn.execute("SELECT count(*) FROM records").fetchone()[0])


def gone(pid: str, patience_s: float = 20.0) -> bool:
    """Whether a process ends by itself soon (zombies have ended)."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.rotated(6)
def test_killed_tuning_goes_on_where_it_was(tmp_path):
    cache = tmp_path / "cache"
    status, said = tune(cache, kill_after=5)
    assert status == -signal.SIGKILL
    kept = records(cache)
    assert kept == 5
    assert said["workers"]
    assert all(gone(pid) for pid in said["workers"])

    status, said = tune(cache)
    assert status == 0
    assert said["measured"] == TRIALS - kept
    assert records(cache) == TRIALS
    assert said["sources"] == ["tuned", "tuned"]
    assert said["trials"] == TRIALS

    status, said = tune(cache)
    assert said["measured"] == 0
    assert said["sources"] == ["cache", "cache"]


def mlp(x, w):
    return torch.relu(x @ w) + 1


X, W = torch.randn(5, 7), torch.randn(7, 9)


def forget_stores() -> None:
    """Close what this process has open, as its end would."""
    while stores._stores:
        stores._stores.popitem()[1].close()


def compile_again(backend, caplog, **options) -> list[str]:
    """Compile as a new process would, check the result, and return the warnings."""
    torch._dynamo.reset()
    forget_stores()
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="torch_pruner"):
        assert_equal(backend.compile(mlp, **options)(X, W), mlp(X, W))
    return [r.getMessage() for r in caplog.records if r.name.startswith("torch_pruner")]


def sources() -> set[str]:
    return {t.source for g in tp.last_report().graphs for t in g.tasks}


def blobs(cache: Path) -> list[Path]:
    found = [p for p in (cache / "v2" / "blobs").rglob("*") if p.is_file()]
    assert found
    return found


def rewrite(blob: Path, data: bytes) -> None:
    """Other content in a file of its own: this process has the old one mapped."""
    other = blob.with_name("other")
    other.write_bytes(data)
    os.replace(other, blob)


def truncate(cache: Path) -> None:
    for blob in blobs(cache):
        rewrite(blob, blob.read_bytes()[: blob.stat().st_size // 2])


def empty(cache: Path) -> None:
    for blob in blobs(cache):
        rewrite(blob, b"")


def flip_a_bit(cache: Path) -> None:
    for blob in blobs(cache):
        data = bytearray(blob.read_bytes())
        if data:  # a verdict has no bytes
            data[len(data) // 2] ^= 1
            rewrite(blob, bytes(data))


def remove(cache: Path) -> None:
    for blob in blobs(cache):
        blob.unlink()


def change_every_row(cache: Path) -> None:
    """The checksums of rows notice one changed byte."""
    with sqlite3.connect(cache / "v2" / "index.sqlite") as conn:
        for table in ("kernels", "artifacts"):
            conn.execute(f"UPDATE {table} SET entry = replace(entry, '1', '2')")
    conn.close()


def flip_bytes_of_the_index(cache: Path) -> None:
    index = cache / "v2" / "index.sqlite"
    for beside in (cache / "v2").glob("index.sqlite-*"):
        beside.unlink()
    data = bytearray(index.read_bytes())
    for at in range(40, len(data), 97):
        data[at] ^= 0xFF
    index.write_bytes(data)


def truncate_the_index(cache: Path) -> None:
    for beside in (cache / "v2").glob("index.sqlite-*"):
        beside.unlink()
    os.truncate(cache / "v2" / "index.sqlite", 5000)


def replace_the_index(cache: Path) -> None:
    for beside in (cache / "v2").glob("index.sqlite-*"):
        beside.unlink()
    (cache / "v2" / "index.sqlite").write_text("something else altogether")


DAMAGE = [
    truncate, empty, flip_a_bit, remove, change_every_row, flip_bytes_of_the_index,
    truncate_the_index, replace_the_index,
]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("damage", DAMAGE, ids=lambda f: f.__name__)
def test_damage_is_repaired_with_a_warning(cold, caplog, damage):
    assert not compile_again(cold, caplog)
    assert not compile_again(cold, caplog)
    assert sources() == {"cache"}
    forget_stores()
    damage(cold.cache_dir)
    said = compile_again(cold, caplog)
    if damage is not remove:  # a file that `clear` took away is no damage
        assert said, "damage went unnoticed"
    assert not compile_again(cold, caplog), "not repaired"
    assert sources() == {"cache"}


def test_a_library_that_cannot_be_loaded_is_rebuilt(cold, caplog):
    """Its digest is right, so the cache cannot know: the loader finds out."""
    compile_again(cold, caplog)
    forget_stores()
    store = KernelStore.open(cold.cache_dir)
    entries = [e.entry for e in store.ls() if isinstance(e.entry, ArtifactEntry)]
    (library,) = [e for e in entries if e.kind is ArtifactKind.LIBRARY]
    store.drop(ArtifactKind.LIBRARY, library.key)
    store.put(Artifact(ArtifactKind.LIBRARY, library.key, b"\x7fELF but not for long"))
    store.close()
    said = compile_again(cold, caplog)
    assert len(said) == 1
    assert "rebuilding" in said[0]
    assert not compile_again(cold, caplog)


def test_a_cache_that_disappears_while_in_use(cold, caplog):
    compile_again(cold, caplog)
    shutil.rmtree(cold.cache_dir)
    torch._dynamo.reset()
    assert_equal(cold.compile(mlp)(X, W), mlp(X, W))
    assert_equal(cold.compile(lambda x: x * 3)(X), X * 3)
