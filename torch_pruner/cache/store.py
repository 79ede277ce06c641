"""The kernel store: what the rest of the package sees of the cache.

In: keys, entries of kernels, artifacts of graphs. Out: the same, later, in this process or another.
Nothing that a disk does makes a method fail: what cannot be written is kept in memory for this
process, with one warning, and damage is a miss. The one error is a cache directory that another
user owns (``CacheDirectoryError``).
"""

from __future__ import annotations

import functools
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from torch_pruner import exc
from torch_pruner.cache import location, maintenance
from torch_pruner.cache.entry import (
    Artifact,
    ArtifactEntry,
    ArtifactKind,
    KernelEntry,
    artifact_digest,
    keep_best,
)
from torch_pruner.cache.fork_hooks import renew_after_fork
from torch_pruner.cache.indexed_blobs import IndexedBlobs, Table
from torch_pruner.cache.memory_fallback import MemoryFallback
from torch_pruner.cache.records import TuningRecord, as_json_lines, sound
from torch_pruner.cache.single_flight import SingleFlight

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator, Sequence

    from torch_pruner.cache.key import GraphKey, KernelKey

T = TypeVar("T")

DEFAULT_MAX_BYTES: Final = 10 << 30


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The amount that is stored, how often this object was asked, and why it is degraded, if so."""

    root: str
    kernels: int
    libraries: int
    captured: int
    verdicts: int
    records: int
    bytes: int
    max_bytes: int
    hits: int
    misses: int
    puts: int
    read_only: bool
    degraded: str | None


class KernelStore:
    """Kernels, artifacts of graphs and tuning records of one cache root.

    Contract: methods may be called from any thread and after a fork, and one root may be open in
    many processes. What was put is found by every later ``get`` of any process, unless the store is
    degraded (then of this process only) or read-only (then of none). Damage is a miss with a
    warning.
    """

    def __init__(
        self,
        layout: location.Layout | None,
        *,
        max_bytes: int,
        read_only: bool,
        clock: Callable[[], float],
    ) -> None:
        """Use ``open``. ``layout=None`` keeps everything in memory."""
        self.root = None if layout is None else layout.root
        self.max_bytes = max_bytes
        self._clock = clock
        self._asked: tuple[Any, ...] = (self.root, max_bytes, read_only)
        self._fallback = MemoryFallback(layout, read_only=read_only, clock=clock)
        self._flights = SingleFlight(None if layout is None or read_only else layout.locks)
        self._lock = threading.Lock()
        self._hits = self._misses = self._puts = 0
        renew_after_fork(self)

    @classmethod
    def open(
        cls,
        root: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int = DEFAULT_MAX_BYTES,
        read_only: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> KernelStore:
        """Open or create the cache at ``root``, by default in the user's cache directory.

        A root that cannot be written is read; one that cannot be read either is replaced by memory,
        and ``degraded`` says why. Raises CacheDirectoryError if ``root`` was given and another user
        owns it.
        """
        asked = (None if root is None else os.fspath(root), max_bytes, read_only)
        where = "" if root is None else f" {root}"
        try:
            path = location.default_root() if root is None else location.absolute(root)
            where = f" {path}"
            layout = location.Layout(path)
            writable = location.prepare(layout, read_only=read_only)
            store = cls(layout, max_bytes=max_bytes, read_only=not writable, clock=clock)
            store._asked = asked
            maintenance.count(store._fallback.main(), "kernels")
        except exc.CacheDirectoryError as err:
            if root is not None:
                raise
            reason = err.reason
        except OSError as err:
            reason = str(err)
        else:
            return store
        store = cls(None, max_bytes=max_bytes, read_only=False, clock=clock)
        store._asked = asked
        store._fallback.start_degraded(where, reason)
        return store

    @property
    def degraded(self) -> str | None:
        """Why the store keeps new entries in memory only; None if it does not."""
        return self._fallback.degraded

    @property
    def read_only(self) -> bool:
        """Whether the root can only be read."""
        return self._fallback.read_only

    def get_kernel(self, key: KernelKey) -> KernelEntry | None:
        """The best known entry of ``key``."""
        return self._counted(self._best(key))

    def put_kernel(self, entry: KernelEntry, *, chosen: bool = False) -> KernelEntry:
        """Store what is best of ``entry`` and the known entry; the result of the merge (see
        ``keep_best``). ``chosen``: by a search that knew what is stored.

        Raises ValueError for an entry that could not be read back.
        """
        entry = KernelEntry.from_text(entry.to_text())
        merged = self._fallback.write(lambda indexed: indexed.put_kernel(entry, chosen=chosen))
        if merged is None:
            return entry
        return self._put(self._best(entry.key) or merged if self.degraded else merged)

    def get(
        self, kind: ArtifactKind, key: GraphKey, *, mine: bool = False
    ) -> tuple[ArtifactEntry, Path] | None:
        """An artifact and the path of its bytes, whose digest was just verified.

        With ``mine`` only one that this user has signed.

        ``prune`` leaves the file alone until it can be loaded. If loading fails all the same
        (someone cleared the cache), ``drop`` it and build again.
        """
        find = functools.partial(IndexedBlobs.get_artifact, kind=kind, key=key, mine=mine)
        return self._counted(self._fallback.find(find, artifact_digest(kind, key)))

    def put(self, artifact: Artifact) -> Path | None:
        """Store an artifact in place of an earlier one; the path of its bytes, None if not stored.

        Raises ValueError for one that could not be read back, OSError where ``data`` is a path that
        cannot be read.
        """
        data = artifact.data
        payload = data if isinstance(data, bytes) else Path(data).read_bytes()
        entry = ArtifactEntry(artifact.kind, artifact.key, "0" * 64, artifact.meta)
        ArtifactEntry.from_text(entry.to_text())
        path = self._fallback.write(lambda indexed: indexed.put_artifact(artifact, payload))
        return None if path is None else self._put(path)

    def drop_kernel(self, key: KernelKey) -> None:
        """Forget a kernel and its records. If the root cannot be written, hide them here."""
        self._drop("kernels", key.digest())

    def drop(self, kind: ArtifactKind, key: GraphKey) -> None:
        """Forget an artifact. If the root cannot be written, hide it here."""
        self._drop("artifacts", artifact_digest(kind, key))

    def nearest(self, key: KernelKey) -> KernelKey | None:
        """The stored key that explains a miss of ``key`` best; never ``key`` itself.

        One of the same workload if there is any, else one of the same target or device, with the
        fewest differing fields.
        """
        return self._fallback.find(lambda indexed: indexed.nearest(key))

    def add_records(self, key: KernelKey, records: Sequence[TuningRecord]) -> None:
        """Append measurements of ``key``. A candidate keeps its record; ok beats failed."""
        checked = [sound(record) for record in records]
        self._fallback.write(lambda indexed: indexed.add_records(key, checked))

    def records(self, key: KernelKey) -> list[TuningRecord]:
        """The measurements of ``key`` in the order they were added, each candidate once."""
        merged: dict[str, TuningRecord] = {}
        for found in self._fallback.collect(lambda indexed: indexed.records(key), key.digest()):
            for record in found:
                if record.digest not in merged or merged[record.digest].status != "ok":
                    merged[record.digest] = record
        return list(merged.values())

    def export_records(self) -> Iterator[str]:
        """All tuning records as JSON lines: each kernel's line, then those of its records."""
        found = self._fallback.collect(IndexedBlobs.recorded)
        for _, key in sorted({key.digest(): key for keys in found for key in keys}.items()):
            entry = self._best(key)
            text, finalists = (entry.workload_text, entry.finalists) if entry else ("", ())
            yield from as_json_lines(key, text, self.records(key), finalists)

    def claim(
        self, key_digest: str, timeout_s: float | None = None
    ) -> contextlib.AbstractContextManager[bool]:
        """``with store.claim(digest) as mine``, then look again; see ``SingleFlight``."""
        return self._flights.claim(key_digest, timeout_s)

    def ls(self) -> list[maintenance.Listed]:
        """Every entry that can be read, most recently used first, kernels before artifacts."""

        def shown(indexed: IndexedBlobs) -> dict[str, maintenance.Listed]:
            items = maintenance.listing(indexed)
            return {i.digest: i for i in items if self._fallback.shows(indexed, i.digest)}

        found: dict[str, maintenance.Listed] = {}
        for items in self._fallback.collect(shown):
            found |= items
        return list(found.values())

    def stats(self) -> StoreStats:
        """Counts and sizes now, and the hits, misses and puts of this object."""

        def total(measure: Callable[[IndexedBlobs], int]) -> int:
            return sum(self._fallback.collect(measure))

        def of_kind(kind: ArtifactKind) -> int:
            return total(lambda indexed: maintenance.count_kind(indexed, kind))

        return StoreStats(
            root=str(self.root or ""),
            kernels=total(lambda indexed: maintenance.count(indexed, "kernels")),
            libraries=of_kind(ArtifactKind.LIBRARY),
            captured=of_kind(ArtifactKind.CAPTURED),
            verdicts=of_kind(ArtifactKind.VERDICT),
            records=total(lambda indexed: maintenance.count(indexed, "records")),
            bytes=total(maintenance.bytes_on_disk),
            max_bytes=self.max_bytes,
            hits=self._hits,
            misses=self._misses,
            puts=self._puts,
            read_only=self.read_only,
            degraded=self.degraded,
        )

    def verify(self) -> maintenance.VerifyReport:
        """Parse every row and hash every blob. Removes nothing."""
        return self._look_after(maintenance.verify)

    def adopt(self) -> int:
        """Sign what others put here, if it is sound, as if this user had made it; how many rows.

        Raises CacheDirectoryError if the root cannot be written.
        """
        return self._look_after(maintenance.adopt, writes=True)

    def prune(self) -> maintenance.PruneReport:
        """Remove left-overs, and the least recently used above ``max_bytes``.

        Raises CacheDirectoryError if the root cannot be written.
        """
        work = functools.partial(maintenance.prune, max_bytes=self.max_bytes)
        return self._look_after(work, writes=True)

    def clear(self) -> maintenance.PruneReport:
        """Remove everything, also what was set aside and what earlier formats left.

        Raises CacheDirectoryError if the root cannot be written.
        """
        report = self._look_after(maintenance.clear, writes=True)
        if self.root is not None:
            location.remove_unused_formats(location.Layout(self.root))
        self._fallback.clear_memory()
        return report

    def close(self) -> None:
        """Let go of files, and of libraries not loaded yet. A later call opens what it needs."""
        self._fallback.close()

    def after_fork(self) -> None:
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        """In another process the store is opened anew."""
        return _open, self._asked

    def _drop(self, table: Table, digest: str) -> None:
        if not self.read_only:
            self._fallback.write(lambda indexed: indexed.drop(table, digest))
        self._fallback.hide(digest)

    def _best(self, key: KernelKey) -> KernelEntry | None:
        entries = self._fallback.collect(lambda indexed: indexed.get_kernel(key), key.digest())
        return functools.reduce(keep_best, entries) if entries else None

    def _look_after(self, work: Callable[[IndexedBlobs], T], *, writes: bool = False) -> T:
        root = str(self.root or "in memory")
        if writes and self.read_only:
            raise exc.CacheDirectoryError(root, "it is read-only")
        try:
            return work(self._fallback.main())
        except OSError as err:
            raise exc.CacheDirectoryError(root, str(err)) from err

    def _counted(self, found: T | None) -> T | None:
        with self._lock:
            if found is None:
                self._misses += 1
            else:
                self._hits += 1
        return found

    def _put(self, stored: T) -> T:
        with self._lock:
            self._puts += 1
        return stored


def _open(root: str | None, max_bytes: int, read_only: bool) -> KernelStore:
    return KernelStore.open(root, max_bytes=max_bytes, read_only=read_only)
