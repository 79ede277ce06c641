"""Several processes in one cache: writing at once, killed, forked, waiting for a claim."""

from __future__ import annotations

import multiprocessing
import os
import signal
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
from tests.stress.writer import check, latency
from torch_pruner.cache import KernelStore

if TYPE_CHECKING:
    from pathlib import Path

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def start_writer(root: Path, first: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.stress.writer", str(root), str(first), str(count)]
    return subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True)


def test_two_processes_write_at_once(tmp_path: Path) -> None:
    """The directory does not exist before either; both put better and better kernels."""
    root = tmp_path / "cache"
    writers = [start_writer(root, first, 30) for first in (0, 30)]
    for writer in writers:
        writer.communicate()
        assert writer.returncode == 0
    store = KernelStore.open(root)
    assert all(check(store, n) for n in range(60))
    best = store.get_kernel(kernel_key())
    assert best is not None
    assert best.latency_s == latency(59)
    assert {r.time for r in store.records(kernel_key())} == {float(n) for n in range(60)}
    assert store.verify().ok
    assert not list((root / "v2").glob("*.damaged-*"))


def test_a_writer_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    """Killed after different numbers of rounds, in the middle of whatever it does next."""
    first = 0
    for rounds in (0, 1, 3):
        writer = start_writer(tmp_path, first, 100_000)
        assert writer.stdout is not None
        done = [int(writer.stdout.readline()) for _ in range(rounds)]
        writer.kill()
        done += [int(line) for line in writer.stdout.read().split("\n") if line.isdigit()]
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
        store = KernelStore.open(tmp_path)
        assert store.degraded is None
        assert all(check(store, n) for n in done)
        assert store.verify().ok
        first += 1000
    assert not list((tmp_path / "v2").glob("*.damaged-*"))


def test_a_forked_child_uses_the_store_it_inherits(tmp_path: Path) -> None:
    store = KernelStore.open(tmp_path)
    store.put_kernel(kernel_entry())
    put_library(store, graph_key(), b"library", {})
    with store.claim(kernel_key("claimed by the parent").digest()):
        assert fork(lambda: _use(store)) == 0
    assert store.get_kernel(kernel_key("child")) is not None
    assert best_of(store, kernel_entry(latency_s=1e-9)).latency_s == 1e-9
    assert store.verify().ok
    assert get_library(KernelStore.open(tmp_path), graph_key()) is not None


def _use(store: KernelStore) -> None:
    assert store.get_kernel(kernel_key()) == kernel_entry()
    assert get_library(store, graph_key()) is not None
    store.put_kernel(kernel_entry(kernel_key("child")))
    with store.claim(kernel_key().digest(), timeout_s=0) as mine:
        assert mine
    with store.claim(kernel_key("claimed by the parent").digest(), timeout_s=0) as mine:
        assert not mine
    store.close()


def test_a_child_of_a_degraded_store_starts_empty(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store = KernelStore.open(tmp_path / "file")
    store.put_kernel(kernel_entry())
    path = put_library(store, graph_key(), b"library", {})
    assert path is not None

    def use() -> None:
        assert store.get_kernel(kernel_key()) is None
        store.put_kernel(kernel_entry())
        assert store.get_kernel(kernel_key()) is not None
        assert put_library(store, graph_key(), b"library", {}) == path

    assert fork(use) == 0
    assert store.get_kernel(kernel_key()) == kernel_entry()
    assert path.exists()


def fork(work: object) -> int | None:
    process = multiprocessing.get_context("fork").Process(target=work)  # type: ignore[arg-type]
    process.start()
    process.join()
    return process.exitcode


_CLAIM = """
import sys
from torch_pruner.cache import KernelStore
store = KernelStore.open(sys.argv[1])
with store.claim(sys.argv[2], timeout_s=0) as mine:
    print("mine" if mine else "taken", flush=True)
    sys.stdin.read()
"""


def start_claimer(root: Path, digest: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _CLAIM, str(root), digest],
        env=ENV,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_a_claim_excludes_other_processes(tmp_path: Path) -> None:
    store, digest = KernelStore.open(tmp_path), kernel_key().digest()
    with store.claim(digest) as mine:
        assert mine
        assert start_claimer(tmp_path, digest).communicate()[0] == "taken\n"
    assert start_claimer(tmp_path, digest).communicate()[0] == "mine\n"


def test_the_claim_of_a_dead_process_is_free(tmp_path: Path) -> None:
    store, digest = KernelStore.open(tmp_path), kernel_key().digest()
    holder = start_claimer(tmp_path, digest)
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == "mine\n"
    with store.claim(digest, timeout_s=0) as mine:
        assert not mine
    holder.kill()
    holder.wait()
    with store.claim(digest, timeout_s=0) as mine:
        assert mine
    holder.stdout.close()
    holder.stdin.close()


def test_a_killed_tuning_run_resumes(tmp_path: Path) -> None:
    """What was measured before the kill is known after it, in another process."""
    writer = start_writer(tmp_path, 0, 100_000)
    assert writer.stdout is not None
    writer.stdout.readline()
    writer.kill()
    writer.wait()
    writer.stdout.close()
    store = KernelStore.open(tmp_path)
    known = {r.digest for r in store.records(kernel_key())}
    assert "candidate 0" in known
    store.add_records(kernel_key(), [record("candidate 0", time=99.0)])
    assert store.records(kernel_key())[0].time == 0.0


@pytest.mark.parametrize("timeout_s", [0, 0.0])
def test_a_store_without_lock_files_still_excludes_threads(
    tmp_path: Path, timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where files cannot be locked, tuning goes on: at worst twice."""
    store, digest = KernelStore.open(tmp_path), kernel_key().digest()

    def fails(self: object, **kwargs: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr("torch_pruner.cache.single_flight.FileLock.acquire", fails)
    with store.claim(digest, timeout_s=timeout_s) as mine:
        assert mine
