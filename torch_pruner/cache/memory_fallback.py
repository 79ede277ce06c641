"""Reads and writes on the disk, and in memory once the disk fails.

In: functions of an index with its blobs. Out: what they return, whatever the disk does. While all
is well there is the disk alone; after the first failed write, an index in memory takes the writes
and is read before the disk; after a failed read, the disk is left alone for good.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch_pruner import log
from torch_pruner.cache import location
from torch_pruner.cache.blobs import BlobDir
from torch_pruner.cache.fork_hooks import renew_after_fork
from torch_pruner.cache.index import Index
from torch_pruner.cache.indexed_blobs import IndexedBlobs
from torch_pruner.cache.row_checksum import RowChecksums

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.cache.location import Layout

T = TypeVar("T")

_log = log.logger(__name__)


class MemoryFallback:
    """The indexes of one store, on disk and in memory. ``layout=None`` is a store in memory.

    Contract: neither ``find``, ``collect`` nor ``write`` lets an OSError through; the first one is
    a warning and becomes ``degraded``. Writing to a read-only disk does nothing, and says so once.
    """

    def __init__(
        self, layout: Layout | None, *, read_only: bool, clock: Callable[[], float]
    ) -> None:
        self.read_only, self.degraded = read_only, None if layout else "it has no directory"
        self._layout, self._clock = layout, clock
        self._lock = threading.RLock()
        self._hidden: set[str] = set()
        self._disk: IndexedBlobs | None = None
        self._memory: IndexedBlobs | None = None
        renew_after_fork(self)
        if layout is None:
            self._memory = _in_memory(clock)
        else:
            index = Index(layout.index, lock=layout.locks / "index.lock", read_only=read_only)
            checksums = location.checksums_of(layout, read_only=read_only)
            self._disk = IndexedBlobs(index, BlobDir(layout.blobs), checksums, clock=clock)

    def main(self) -> IndexedBlobs:
        """The index on disk if there is one; OSError is the caller's to handle."""
        with self._lock:
            indexed = self._disk or self._memory
        assert indexed is not None
        return indexed

    def find(self, work: Callable[[IndexedBlobs], T | None], digest: str = "") -> T | None:
        """The first answer, memory before disk. The disk is not asked for hidden digests."""
        for indexed in reversed(self._places(digest)):
            if (found := self._ask(indexed, work)) is not None:
                return found
        return None

    def collect(self, work: Callable[[IndexedBlobs], T | None], digest: str = "") -> list[T]:
        """All answers, disk before memory."""
        answers = [self._ask(indexed, work) for indexed in self._places(digest)]
        return [answer for answer in answers if answer is not None]

    def write(self, work: Callable[[IndexedBlobs], T]) -> T | None:
        """Do ``work`` where writing is possible; None if it is not."""
        if self.degraded is None and self.read_only:
            root = "" if self._layout is None else str(self._layout.root)
            msg = "the cache directory %s is read-only: nothing that is tuned now will be kept"
            log.warn_once(_log, f"read-only {root}", msg, root)
            return None
        disk = self._disk
        if self.degraded is None and disk is not None:
            try:
                return work(disk)
            except OSError as err:
                self.degrade(str(err))
        with self._lock:
            memory = self._memory
        assert memory is not None
        try:
            return work(memory)
        except OSError as err:
            _log.debug("not kept, not even in memory: %s", err)
            return None

    def hide(self, digest: str) -> None:
        """Behave as if the disk did not hold ``digest``, if it cannot be removed there."""
        if self.degraded is not None or self.read_only:
            with self._lock:
                self._hidden.add(digest)

    def shows(self, indexed: IndexedBlobs, digest: str) -> bool:
        """Whether ``digest`` is not hidden in this index."""
        return indexed is not self._disk or digest not in self._hidden

    def degrade(self, reason: str, *, lose_disk: bool = False) -> None:
        """Go on in memory. Says so the first time."""
        with self._lock:
            first = self.degraded is None
            self.degraded = self.degraded or reason
            if self._memory is None:
                self._memory = _in_memory(self._clock)
            if lose_disk:
                self._disk = None
        if first:
            _warn_degraded("" if self._layout is None else f" {self._layout.root}", reason)

    def start_degraded(self, root: str, reason: str) -> None:
        """Say why a store starts out in memory."""
        self.degraded = reason
        _warn_degraded(root, reason)

    def clear_memory(self) -> None:
        """Forget what is kept in memory, if the disk is still the main place."""
        with self._lock:
            if self._memory is not None and self._disk is not None:
                self._memory = _in_memory(self._clock)

    def close(self) -> None:
        """Let go of the files of the disk; they are opened again when needed. Memory stays."""
        if self._disk is not None:
            self._disk.close()

    def after_fork(self) -> None:
        self._lock = threading.RLock()

    def _places(self, digest: str) -> list[IndexedBlobs]:
        with self._lock:
            disk = None if digest in self._hidden else self._disk
            return [indexed for indexed in (disk, self._memory) if indexed is not None]

    def _ask(self, indexed: IndexedBlobs, work: Callable[[IndexedBlobs], T | None]) -> T | None:
        try:
            return work(indexed)
        except OSError as err:
            if indexed is self._disk:
                self.degrade(str(err), lose_disk=True)
            return None


def _warn_degraded(root: str, reason: str) -> None:
    """The one warning about a store that cannot use its directory."""
    log.warn_once(
        _log,
        f"degraded{root}",
        "cannot use the cache directory%s: %s; what is tuned now is kept in memory until this"
        " process ends; free some space, or set TORCH_PRUNER_CACHE_DIR to a directory that can be"
        " written",
        root,
        reason,
    )


def _in_memory(clock: Callable[[], float]) -> IndexedBlobs:
    """An index in memory; blobs in a private temporary directory, since loaders want a path."""
    blobs = BlobDir(_temporary_directory())
    weakref.finalize(blobs, _remove_tree, blobs.root, os.getpid())
    return IndexedBlobs(Index(None), blobs, RowChecksums(os.urandom(32), own=True), clock=clock)


def _temporary_directory() -> Path:
    for parent in (None, "/dev/shm"):
        with contextlib.suppress(OSError):
            return Path(tempfile.mkdtemp(prefix="torch_pruner-", dir=parent))
    return Path(os.devnull, "none")  # publishing fails, and then libraries are not kept


def _remove_tree(path: Path, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
