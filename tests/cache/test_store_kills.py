"""SIGKILL at 200 random moments of publishing, recording, evicting and loading; and other clocks.

What was committed is there, what is there is right, and the store opens and verifies every time.
"""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import time
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
from tests.stress.writer import check, library, write
from torch_pruner.cache import KernelStore

if TYPE_CHECKING:
    from pathlib import Path

KILLS = [30, pytest.param(100, marks=pytest.mark.stress)]  # with eviction, as many without
ROUNDS = 3  # that a child finishes at most, about
SMALL = 150_000  # bytes: five libraries, so that eviction always has something to do


def child(root: Path, first: int, told: int, *, evict: bool) -> None:
    """Write, load and perhaps evict until killed; ``told`` hears of every finished round."""
    store = KernelStore.open(root, max_bytes=SMALL if evict else 1 << 30)
    for n in range(first, first + 10**6):
        write(store, n)
        os.write(told, f"{n}\n".encode())
        check(store, n)
        if evict:
            store.prune()


def killed(root: Path, first: int, after_s: float, *, evict: bool) -> list[int]:
    """The rounds that a child finished before it was killed."""
    heard, told = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(heard)
            child(root, first, told, evict=evict)
        finally:
            os._exit(1)
    os.close(told)
    time.sleep(after_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(heard) as file:
        done = [int(line) for line in file if line.endswith("\n")]
    assert os.WTERMSIG(status) == signal.SIGKILL
    return done


def seconds_of_a_round(root: Path, *, evict: bool) -> float:
    """What a child takes for one, with its start, on this machine and now."""
    samples = []
    for k in range(5):
        heard, told = os.pipe()
        begin = time.monotonic()
        pid = os.fork()
        if not pid:
            try:
                child(root, 1000 * k, told, evict=evict)
            finally:
                os._exit(1)
        os.close(told)
        os.read(heard, 1)
        samples.append(time.monotonic() - begin)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(heard)
    return sorted(samples)[2]


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("evict", [False, True])
def test_kills_at_random_moments(tmp_path: Path, evict: bool, kills: int) -> None:
    rng = random.Random(int(evict))
    most_s = ROUNDS * seconds_of_a_round(tmp_path / "other", evict=evict)
    done: list[int] = []
    for k in range(kills):
        done += killed(tmp_path, 1000 * k, most_s * rng.random(), evict=evict)
        if k % 10 == 9:
            store = KernelStore.open(tmp_path)
            assert store.degraded is None
            report = store.verify()
            assert report.ok, report.problems
            found = [check(store, n) for n in done]
            assert evict or all(found)
            store.close()
    assert len(done) > kills // 10  # else nothing was tested
    assert not list((tmp_path / "v2").glob("*.damaged-*"))
    store = KernelStore.open(tmp_path)
    if not evict:
        digests = {r.digest for r in store.records(kernel_key())}
        assert {f"candidate {n}" for n in done} <= digests
    store.prune()
    assert store.verify().ok


def test_a_clock_that_goes_backwards_loses_nothing(tmp_path: Path) -> None:
    """A machine whose clock was wrong, and was put right by years."""
    now = [2e9]
    store = KernelStore.open(tmp_path, clock=lambda: now[0])
    write(store, 0)
    now[0] = 1e9
    write(store, 1)
    assert check(store, 0)
    assert check(store, 1)
    store.prune()
    assert check(store, 0)
    assert check(store, 1)
    now[0] = 0.0
    assert check(store, 1)
    assert store.verify().ok
    assert len(store.records(kernel_key())) == 2
    with store.claim("a" * 64) as mine:
        assert mine


def test_two_versions_of_the_package_share_a_directory(tmp_path: Path) -> None:
    """Each finds its own kernels and libraries, and never the other's."""
    old = kernel_key(codegen="tvm 1 + codegen 1")
    new = kernel_key(codegen="tvm 2 + codegen 2")
    stores = [KernelStore.open(tmp_path), KernelStore.open(tmp_path)]
    for store, key, latency_s in zip(stores, (old, new), (1e-3, 2e-3), strict=True):
        store.put_kernel(kernel_entry(key, latency_s=latency_s))
        put_library(store, graph_key(codegen=key.codegen), library(len(key.codegen)), {})
        store.add_records(key, [record("a")])
    for store in stores:
        for key, latency_s in ((old, 1e-3), (new, 2e-3)):
            entry = store.get_kernel(key)
            assert entry is not None
            assert entry.latency_s == latency_s
            assert len(store.records(key)) == 1
            assert get_library(store, graph_key(codegen=key.codegen)) is not None
    assert stores[0].nearest(kernel_key(codegen="tvm 3")) in (old, new)


@pytest.mark.parametrize("left", ["", "PRAGMA journal_mode = WAL", "PRAGMA auto_vacuum = 2"])
def test_an_index_that_was_never_finished_is_begun_anew(tmp_path: Path, left: str) -> None:
    """Killed before the tables were there: nothing is damaged, and nothing is moved aside."""
    KernelStore.open(tmp_path).close()
    (path,) = (tmp_path / "v2").glob("index.sqlite")
    for file in (tmp_path / "v2").glob("index.sqlite*"):
        file.unlink()
    path.touch()
    if left:
        connection = sqlite3.connect(path)
        connection.execute(left).fetchall()
        connection.close()
    store = KernelStore.open(tmp_path)
    write(store, 0)
    assert check(store, 0)
    assert store.verify().ok
    assert not list((tmp_path / "v2").glob("*.damaged-*"))
