"""Pruning: what is old, unnamed or least recently used goes; what may be in use stays."""

from __future__ import annotations

import os
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
from torch_pruner.cache import ArtifactKind, KernelStore

if TYPE_CHECKING:
    from pathlib import Path

HOUR = 3600.0


class Clock:
    def __init__(self) -> None:
        self.now = 2e9

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def age(path: Path, clock: Clock, seconds: float) -> None:
    os.utime(path, (clock.now - seconds,) * 2)


def put(root: Path, clock: Clock, *names: str, size: int = 100_000) -> None:
    """Put libraries in this order and let go of them."""
    store = KernelStore.open(root, clock=clock)
    for name in names:
        put_library(store, graph_key(name), name.encode() * (size // len(name)), {})
    store.close()


def kept(root: Path) -> set[str]:
    return {str(getattr(i.entry.key, "graph", "")) for i in KernelStore.open(root).ls()}


def test_a_cache_that_fits_loses_nothing(tmp_path: Path, clock: Clock) -> None:
    put(tmp_path, clock, "a", "b")
    store = KernelStore.open(tmp_path, clock=clock)
    store.put_kernel(kernel_entry())
    store.add_records(kernel_key(), [record("a")])
    report = store.prune()
    assert (report.kernels, report.artifacts, report.blobs, report.temporaries) == (0, 0, 0, 0)
    assert store.stats().libraries == 2
    assert store.verify().ok


def test_the_least_recently_used_go_first(tmp_path: Path, clock: Clock) -> None:
    put(tmp_path, clock, "a", "b", "c", "d")
    store = KernelStore.open(tmp_path, max_bytes=320_000, clock=clock)
    clock.now += HOUR
    assert get_library(store, graph_key("a")) is not None
    store.close()
    report = store.prune()
    assert report.artifacts == 2
    assert report.bytes <= 320_000
    assert report.freed_bytes >= 200_000
    assert kept(tmp_path) == {"a", "d"}
    assert store.stats().bytes == report.bytes
    assert store.verify().ok
    assert len(list(tmp_path.rglob("*.so"))) == 2


def test_libraries_in_use_stay(tmp_path: Path, clock: Clock) -> None:
    """Checked out by another store: to the locks, that is the same as another process."""
    put(tmp_path, clock, "a", "b")
    user = KernelStore.open(tmp_path)
    assert get_library(user, graph_key("a")) is not None
    report = KernelStore.open(tmp_path, max_bytes=0, clock=clock).prune()
    assert (report.artifacts, report.in_use) == (1, 1)
    found = get_library(user, graph_key("a"))
    assert found is not None
    assert found[1].exists()
    user.close()
    assert KernelStore.open(tmp_path, max_bytes=0, clock=clock).prune().artifacts == 1
    assert kept(tmp_path) == set()


def test_where_locks_do_not_work_nothing_is_evicted(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, clock, "a")

    def unsupported(fd: int, how: int) -> None:
        raise OSError(38, "Function not implemented")

    store = KernelStore.open(tmp_path, max_bytes=0, clock=clock)
    monkeypatch.setattr("torch_pruner.cache.blobs.fcntl.flock", unsupported)
    assert store.prune().in_use == 1
    assert get_library(store, graph_key("a")) is not None


def test_a_library_of_two_graphs_goes_with_the_second(tmp_path: Path, clock: Clock) -> None:
    store = KernelStore.open(tmp_path, clock=clock)
    for name in ("a", "b"):
        put_library(store, graph_key(name), b"x" * 100_000, {})
    store.close()
    store.drop(ArtifactKind.LIBRARY, graph_key("a"))
    assert store.prune().artifacts == 0
    assert get_library(store, graph_key("b")) is not None
    store.close()
    store.max_bytes = 0
    assert store.prune().artifacts == 1
    assert not list(tmp_path.rglob("*.so"))


def test_kernels_go_with_their_records(tmp_path: Path, clock: Clock) -> None:
    store = KernelStore.open(tmp_path, max_bytes=0, clock=clock)
    store.put_kernel(kernel_entry())
    store.add_records(kernel_key(), [record("a")])
    store.add_records(kernel_key("never put"), [record("a")])
    assert store.prune().kernels == 1
    assert store.records(kernel_key()) == []
    assert store.stats().records == 0


def test_what_killed_writers_left_goes_after_an_hour(tmp_path: Path, clock: Clock) -> None:
    put(tmp_path, clock, "a")
    directory = next(tmp_path.rglob("*.so")).parent
    young, old = directory / ".tmp-young", directory / ".tmp-old"
    aside = tmp_path / "v2" / "index.sqlite.damaged-1-1"
    for path, seconds in ((young, HOUR / 2), (old, 2 * HOUR), (aside, 2 * HOUR)):
        path.write_bytes(b"half a library")
        age(path, clock, seconds)
    report = KernelStore.open(tmp_path, clock=clock).prune()
    assert report.temporaries == 2
    assert young.exists()
    assert not old.exists()
    assert kept(tmp_path) == {"a"}


def test_unnamed_libraries_go_after_an_hour(tmp_path: Path, clock: Clock) -> None:
    put(tmp_path, clock, "young", "old", "named")
    store = KernelStore.open(tmp_path, clock=clock)
    paths = {}
    for name in ("young", "old", "named"):
        found = get_library(store, graph_key(name))
        assert found is not None
        paths[name] = found[1]
    store.close()
    for name, path in paths.items():
        age(path, clock, HOUR / 2 if name == "young" else 2 * HOUR)
        if name != "named":
            store.drop(ArtifactKind.LIBRARY, graph_key(name))
    assert store.prune().blobs == 1
    assert {name for name, path in paths.items() if path.exists()} == {"young", "named"}


def test_files_that_are_not_ours_stay(tmp_path: Path, clock: Clock) -> None:
    put(tmp_path, clock, "a")
    strangers = [tmp_path / "v2" / "blobs" / "README", next(tmp_path.rglob("*.so")).parent / "x.so"]
    for path in strangers:
        path.write_text("mine")
        age(path, clock, 9 * HOUR)
    store = KernelStore.open(tmp_path, max_bytes=0, clock=clock)
    store.prune()
    store.clear()
    assert all(path.exists() for path in strangers)


def test_a_publish_during_a_prune_is_repaired(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blob is written, removed as unnamed, and only then named."""
    store = KernelStore.open(tmp_path, clock=clock)
    indexed = store._fallback.main()
    publish = indexed.blobs.publish
    calls = []

    def publish_and_lose(digest: str, data: bytes) -> None:
        publish(digest, data)
        calls.append(digest)
        if len(calls) == 1:
            indexed.blobs.path(digest).unlink()

    monkeypatch.setattr(indexed.blobs, "publish", publish_and_lose)
    assert put_library(store, graph_key(), b"library", {}) is not None
    assert len(calls) == 2
    assert get_library(store, graph_key()) is not None


def test_a_library_removed_during_checkout_is_a_miss(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, clock, "a")
    store = KernelStore.open(tmp_path)
    blobs = store._fallback.main().blobs
    share = blobs._share

    def removed(fd: int, path: Path) -> None:
        path.unlink()
        share(fd, path)

    monkeypatch.setattr(blobs, "_share", removed)
    assert get_library(store, graph_key("a")) is None
