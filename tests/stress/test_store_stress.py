"""Processes, threads and kill -9 in one cache, for minutes. Run with ``pytest -m stress``."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.contracts.store import get_library, graph_key, kernel_key, run_threads
from tests.stress.writer import check, write
from torch_pruner.cache import KernelStore

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.stress

ENV = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def start_writer(root: Path, first: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.stress.writer", str(root), str(first), str(count)]
    return subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True)


def finished(writer: subprocess.Popen[str]) -> list[int]:
    """The rounds that a writer reported, once it has ended."""
    assert writer.stdout is not None
    text = writer.stdout.read()
    writer.stdout.close()
    writer.wait()
    return [int(line) for line in text.split("\n")[:-1]]


def test_kill_nine_in_a_loop(tmp_path: Path) -> None:
    """Two writers at a time, one of them killed after a random number of rounds, 40 times."""
    rng, first, done = random.Random(0), 0, set()
    for _ in range(40):
        victim, other = start_writer(tmp_path, first, 10**6), start_writer(tmp_path, first + 500, 5)
        assert victim.stdout is not None
        for _ in range(rng.randrange(6)):
            done.add(int(victim.stdout.readline()))
        victim.kill()
        done |= {*finished(victim), *finished(other)}
        assert (victim.returncode, other.returncode) == (-signal.SIGKILL, 0)
        first += 1000
    store = KernelStore.open(tmp_path)
    assert all(check(store, n) for n in done)
    assert {f"candidate {n}" for n in done} <= {r.digest for r in store.records(kernel_key())}
    assert store.verify().ok
    assert not list((tmp_path / "v2").glob("*.damaged-*"))


def test_processes_times_threads_while_pruning(tmp_path: Path) -> None:
    """What is there is right, whatever is being evicted; nobody degrades."""
    writers = [start_writer(tmp_path, 10_000 * (i + 1), 100) for i in range(4)]
    store = KernelStore.open(tmp_path, max_bytes=400_000)

    def work(thread: int) -> None:
        for i in range(60):
            n = thread * 1000 + i
            write(store, n)
            check(store, n)
            check(store, 10_000 + i)

    def prune() -> None:
        for _ in range(60):
            store.prune()

    run_threads(*[lambda t=t: work(t) for t in range(3)], prune)  # type: ignore[misc]
    for writer in writers:
        assert len(finished(writer)) == 100
        assert writer.returncode == 0
    assert store.degraded is None
    assert store.verify().ok
    store.close()
    assert store.prune().bytes <= 400_000 or store.ls() == []


def test_clearing_while_others_write(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path, 10_000 * i, 100) for i in range(3)]
    store = KernelStore.open(tmp_path)
    while any(writer.poll() is None for writer in writers):
        store.clear()
        get_library(store, graph_key("net 0"))
    for writer in writers:
        assert len(finished(writer)) == 100
        assert writer.returncode == 0
    assert store.verify().ok


def test_removing_the_root_while_others_write(tmp_path: Path) -> None:
    """``rm -rf`` of a cache in use: at worst a writer goes on in memory, nothing crashes."""
    root = tmp_path / "cache"
    writers = [start_writer(root, 10_000 * i, 50) for i in range(3)]
    for i in range(20):
        KernelStore.open(root).get_kernel(kernel_key())
        if root.exists():
            root.rename(tmp_path / f"gone {i}")
    for writer in writers:
        writer.communicate()
    store = KernelStore.open(root)
    write(store, 1)
    assert check(store, 1)
    assert store.verify().ok
