"""One index with its blobs: everything the store can do with one place.

In: keys and entries. Out: entries that were checked, or None. A damaged row is a miss that says so,
and is dropped where that is possible. OSError means that the place itself does not work; what then
is the store's business.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any, Final, Literal

from torch_pruner import exc, log
from torch_pruner.cache import records as tuning_records
from torch_pruner.cache.blobs import BlobDir, sha256
from torch_pruner.cache.entry import ArtifactEntry, KernelEntry, artifact_digest, keep_best
from torch_pruner.cache.key import is_number
from torch_pruner.cache.row_checksum import RowChecksums, UnsignedRow

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from torch_pruner.cache.entry import Artifact, ArtifactKind
    from torch_pruner.cache.index import Index
    from torch_pruner.cache.key import GraphKey, KernelKey
    from torch_pruner.cache.records import TuningRecord

Table = Literal["kernels", "artifacts"]

TOUCH_S: Final = 60.0  # how coarse "last used" is: a hit seldom has to write

_log = log.logger(__name__)

_SAME_WORKLOAD = """
    SELECT digest, entry, checksum FROM kernels
    WHERE digest != ? AND workload = ?
    ORDER BY (target = ?) + (device = ?) + (threads = ?) + (numerics = ?) + (codegen = ?) DESC,
        used DESC, digest
    LIMIT 8"""

_SAME_DEVICE = """
    SELECT digest, entry, checksum FROM kernels
    WHERE digest != ? AND (target = ? OR device = ?)
    ORDER BY (target = ?) + (device = ?) DESC, (threads = ?) + (numerics = ?) + (codegen = ?) DESC,
        used DESC, digest
    LIMIT 8"""


class IndexedBlobs:
    """Rows and blobs of one place. ``clock`` gives seconds since the epoch."""

    def __init__(
        self, index: Index, blobs: BlobDir, checksums: RowChecksums, *, clock: Callable[[], float]
    ) -> None:
        self.index, self.blobs, self.checksums, self.clock = index, blobs, checksums, clock

    def get_kernel(self, key: KernelKey) -> KernelEntry | None:
        digest = key.digest()
        row = self._row("kernels", digest)
        if row is None:
            return None
        try:
            entry = KernelEntry.from_text(self.checksums.verify("kernels", digest, row[0], row[1]))
            if entry.key != key:
                raise ValueError("it is about another key")
        except UnsignedRow:
            self._foreign()
            return None
        except ValueError as err:
            self._discard("kernels", digest, row, str(err))
            return None
        self._touch("kernels", digest, row[2])
        return entry

    def put_kernel(self, entry: KernelEntry, *, chosen: bool = False) -> KernelEntry:
        """Merge ``entry`` into what is known, in one transaction; what is then stored."""
        digest = entry.key.digest()

        def merge(conn: sqlite3.Connection) -> KernelEntry:
            query = "SELECT entry, checksum, created FROM kernels WHERE digest = ?"
            old, created = None, self.clock()
            if (row := conn.execute(query, (digest,)).fetchone()) is not None:
                try:
                    plain = self.checksums.verify("kernels", digest, row[0], row[1])
                    old = KernelEntry.from_text(plain)
                    created = row[2] if is_number(row[2]) else created
                except UnsignedRow:
                    self._foreign()
                except ValueError as err:
                    _log.warning("replacing damaged cache entry %s: %s", digest, err)
            best = keep_best(old, entry, chosen=chosen)
            key, text = best.key, best.to_text()
            conn.execute(
                "INSERT OR REPLACE INTO kernels VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(digest, key.workload, key.target, key.device, key.threads, key.numerics),
                    *(key.codegen, text, self.checksums.compute("kernels", digest, text)),
                    *(created, self.clock()),
                ),
            )
            return best

        return self.index.run(merge, write=True)

    def get_artifact(
        self, kind: ArtifactKind, key: GraphKey, *, mine: bool = False
    ) -> tuple[ArtifactEntry, Path] | None:
        digest = artifact_digest(kind, key)
        row = self._row("artifacts", digest)
        if row is None:
            return None
        try:
            plain = self.checksums.verify("artifacts", digest, row[0], row[1], mine=mine)
            entry = ArtifactEntry.from_text(plain)
            if (entry.kind, entry.key) != (kind, key):
                raise ValueError("it is about another key")
            path = self.blobs.checkout(entry.blob)
        except UnsignedRow:
            if self.checksums.own:
                self._foreign()
            return None
        except (ValueError, FileNotFoundError, exc.CorruptEntry) as err:
            self._discard("artifacts", digest, row, str(err))
            return None
        except OSError as err:
            _log.warning("cannot read the bytes of cache entry %s: %s", digest, err)
            return None
        self._touch("artifacts", digest, row[2])
        return entry, path

    def put_artifact(self, artifact: Artifact, data: bytes) -> Path:
        """Publish the blob, then the row; the path of the blob, in use by this process."""
        entry = ArtifactEntry(artifact.kind, artifact.key, sha256(data), artifact.meta)
        digest = entry.digest()
        text = entry.to_text()
        checksum = self.checksums.compute("artifacts", digest, text)
        self.blobs.publish(entry.blob, data)

        def insert(conn: sqlite3.Connection) -> Path:
            if not self.blobs.exists(entry.blob):  # a prune came between
                self.blobs.publish(entry.blob, data)
            now = self.clock()
            conn.execute(
                "INSERT OR REPLACE INTO artifacts VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (digest, entry.kind, entry.blob, len(data), text, checksum, now, now),
            )
            return self.blobs.checkout(entry.blob)

        try:
            return self.index.run(insert, write=True)
        except exc.CorruptEntry as err:
            raise OSError(errno.EIO, f"the disk does not return what was written: {err}") from err

    def drop(self, table: Table, digest: str) -> None:
        """Remove an entry; for a kernel, its records too: the best of them would bring it back."""

        def delete(conn: sqlite3.Connection) -> None:
            conn.execute(f"DELETE FROM {table} WHERE digest = ?", (digest,))
            if table == "kernels":
                delete_records(conn, digest)

        self.index.run(delete, write=True)

    def nearest(self, key: KernelKey) -> KernelKey | None:
        """The most similar key that is stored, other than ``key`` itself."""
        same = (key.target, key.device)
        rest = (key.threads, key.numerics, key.codegen)

        def select(conn: sqlite3.Connection) -> list[tuple[str, str, str]]:
            rows = conn.execute(_SAME_WORKLOAD, (key.digest(), key.workload, *same, *rest))
            found = rows.fetchall()
            if not found:
                found = conn.execute(_SAME_DEVICE, (key.digest(), *same, *same, *rest)).fetchall()
            return found

        for digest, text, checksum in self.index.run(select):
            try:
                plain = self.checksums.verify("kernels", digest, text, checksum)
                return KernelEntry.from_text(plain).key
            except ValueError:
                continue
        return None

    def add_records(self, key: KernelKey, records: Sequence[TuningRecord]) -> None:
        def insert(conn: sqlite3.Connection) -> None:
            tuning_records.insert(conn, self.checksums, key, records, now=self.clock())

        self.index.run(insert, write=True)

    def records(self, key: KernelKey) -> list[TuningRecord]:
        digest = key.digest()
        found, damaged = self.index.run(
            lambda conn: tuning_records.select(conn, self.checksums, digest)
        )
        if damaged:
            _log.warning("ignoring %d unusable tuning records of kernel %s", damaged, digest)
        return found

    def recorded(self) -> list[KernelKey]:
        """The keys that have tuning records."""
        found = self.index.run(lambda conn: list(tuning_records.tasks(conn, self.checksums)))
        return [key for _, key in found]

    def close(self) -> None:
        self.index.close()
        self.blobs.close()

    def _foreign(self) -> None:
        """Say once that there are entries that this user has not signed."""
        where = self.index.path
        log.warn_once(
            _log,
            f"foreign {where}",
            "entries of the cache index %s have no signature of this user, who made that cache, and"
            " are not used; if you put them there yourself, run `torch-pruner cache adopt`",
            where,
        )

    def _row(self, table: Table, digest: str) -> tuple[str, str, float] | None:
        query = f"SELECT entry, checksum, used FROM {table} WHERE digest = ?"
        row: tuple[str, str, float] | None = self.index.run(
            lambda conn: conn.execute(query, (digest,)).fetchone()
        )
        return row

    def _discard(self, table: Table, digest: str, row: tuple[str, str, float], reason: str) -> None:
        """Say that a row is damaged, and drop it if it is still the same."""
        _log.warning("ignoring damaged cache entry %s in %s: %s", digest, table, reason)
        statement = f"DELETE FROM {table} WHERE digest = ? AND checksum IS ? AND used IS ?"
        self._try_write(statement, (digest, row[1], row[2]))

    def _touch(self, table: Table, digest: str, used: float) -> None:
        """Remember that a row was used, seldom and only if nobody has to wait for it."""
        now = self.clock()
        if not is_number(used) or abs(now - used) >= TOUCH_S:
            self._try_write(f"UPDATE {table} SET used = ? WHERE digest = ?", (now, digest))

    def _try_write(self, statement: str, values: tuple[Any, ...]) -> None:
        if self.index.read_only:
            return
        try:
            self.index.run(lambda conn: conn.execute(statement, values), write=True, wait=False)
        except OSError as err:
            _log.debug("cache maintenance skipped: %s", err)


def delete_records(conn: sqlite3.Connection, task: str) -> None:
    conn.execute("DELETE FROM records WHERE task = ?", (task,))
    conn.execute("DELETE FROM tasks WHERE digest = ?", (task,))
