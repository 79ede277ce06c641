"""Looking after an index with its blobs: verify it, shrink it, empty it.

Out: reports. Removal of a blob happens inside a transaction that holds the index's write lock, so
that no row that refers to it can appear meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from torch_pruner.cache.entry import ArtifactEntry, ArtifactKind, KernelEntry
from torch_pruner.cache.index import MOVED
from torch_pruner.cache.indexed_blobs import IndexedBlobs, delete_records
from torch_pruner.cache.key import KernelKey, is_digest, is_number, parse_object
from torch_pruner.cache.records import TuningRecord
from torch_pruner.cache.row_checksum import RowChecksums

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from pathlib import Path

STALE_S: Final = 3600.0
_LATEST_S: Final = 1e11  # seconds since the epoch, of the year 5138
_PARSERS: Final[dict[str, Callable[[str], object]]] = {
    "kernels": KernelEntry.from_text,
    "artifacts": ArtifactEntry.from_text,
    "tasks": lambda text: KernelKey.from_json(parse_object(text)),
    "records": lambda text: TuningRecord.from_json(parse_object(text)),
}


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry as ``cache ls`` shows it. ``bytes`` counts its row and its blob."""

    digest: str
    entry: KernelEntry | ArtifactEntry
    bytes: int
    created: float
    used: float


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The number of sound rows of each table (and of "blobs"), and each problem in words."""

    sound: dict[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class PruneReport:
    """How much was removed. ``in_use`` counts artifacts that had to stay in a cache too large."""

    kernels: int = 0
    artifacts: int = 0
    blobs: int = 0
    temporaries: int = 0
    in_use: int = 0
    freed_bytes: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Tally:
    kernels: int = 0
    artifacts: int = 0
    blobs: int = 0
    temporaries: int = 0
    in_use: int = 0

    def report(self, before: int, after: int) -> PruneReport:
        return PruneReport(
            self.kernels,
            self.artifacts,
            self.blobs,
            self.temporaries,
            self.in_use,
            max(0, before - after),
            after,
        )


def bytes_on_disk(indexed: IndexedBlobs) -> int:
    """The size of the index, the blobs, and what writers left."""
    files = [found.st_size for _, found in indexed.blobs]
    files += [found.st_size for _, found in indexed.blobs.temporaries()]
    return indexed.index.bytes_on_disk() + sum(files)


def listing(indexed: IndexedBlobs) -> list[Listed]:
    """Every entry that can be read, most recently used first, kernels before artifacts."""
    found: list[Listed] = []
    for table, size in (("kernels", "length(entry)"), ("artifacts", "length(entry) + bytes")):
        columns = f"digest, entry, checksum, {size}, created, used"
        rows = _all(indexed, f"SELECT {columns} FROM {table} ORDER BY used DESC")
        for digest, text, checksum, n, created, used in rows:
            with contextlib.suppress(ValueError):
                plain = indexed.checksums.verify(table, digest, text, checksum)
                parse = KernelEntry.from_text if table == "kernels" else ArtifactEntry.from_text
                found.append(Listed(digest, parse(plain), _size(n), _when(created), _when(used)))
    return found


def count(indexed: IndexedBlobs, table: str) -> int:
    return int(_all(indexed, f"SELECT count(*) FROM {table}")[0][0])


def count_kind(indexed: IndexedBlobs, kind: ArtifactKind) -> int:
    return int(_all(indexed, "SELECT count(*) FROM artifacts WHERE kind = ?", kind)[0][0])


def verify(indexed: IndexedBlobs) -> VerifyReport:
    """Parse every row and hash every blob. Removes nothing."""
    problems: list[str] = []
    sound: dict[str, int] = {}
    for (verdict,) in _all(indexed, "PRAGMA quick_check"):
        if verdict != "ok":
            problems.append(f"index: {verdict}")
    for table, parse in _PARSERS.items():
        name = "task" if table == "records" else "digest"
        rows = _all(indexed, f"SELECT {name}, entry, checksum FROM {table}")
        bad = [p for row in rows if (p := _problem(indexed.checksums, table, parse, *row))]
        sound[table] = len(rows) - len(bad)
        problems += bad
    present = {digest for digest, _ in indexed.blobs}
    problems += [f"blob {digest}: missing" for digest in _missing(indexed, present)]
    bad = [p for digest in sorted(present) if (p := indexed.blobs.verify(digest))]
    sound["blobs"] = len(present) - len(bad)
    aside = [
        f"index: a damaged one is kept as {path}"
        for path in sorted(_moved_aside(indexed))
        if not path.name.endswith(("-wal", "-shm", "-journal"))
    ]
    return VerifyReport(sound, tuple(problems + bad + aside))


def adopt(indexed: IndexedBlobs) -> int:
    """Sign every sound row that this user has not signed; how many.

    Verdicts of others are forgotten: their graphs are compared with eager again.
    """
    if indexed.checksums.key is None:
        raise OSError("this user has no key to sign entries with")
    lenient = RowChecksums(indexed.checksums.key)

    def sign(conn: sqlite3.Connection) -> int:
        count = 0
        for table, parse in _PARSERS.items():
            name = "task" if table == "records" else "digest"
            rows = conn.execute(f"SELECT rowid, {name}, entry, checksum FROM {table}").fetchall()
            for row, key, text, checksum in rows:
                if _problem(lenient, table, parse, key, text, checksum):
                    continue
                if lenient.is_signed(table, key, text, checksum):
                    continue
                if table == "artifacts" and _kind(text) is ArtifactKind.VERDICT:
                    conn.execute("DELETE FROM artifacts WHERE rowid = ?", (row,))
                    continue
                values = (lenient.compute(table, key, text), row)
                conn.execute(f"UPDATE {table} SET checksum = ? WHERE rowid = ?", values)
                count += 1
        return count

    return indexed.index.run(sign, write=True)


def prune(indexed: IndexedBlobs, max_bytes: int) -> PruneReport:
    """Remove left-overs older than an hour, then least recently used entries until the rest fits.

    An artifact whose bytes any process has just taken out stays, and so does everything that cannot
    be proved unused.
    """
    indexed.index.shrink()
    tally, before = _Tally(), bytes_on_disk(indexed)
    _remove_leftovers(indexed, tally)
    size = bytes_on_disk(indexed)
    while size > max_bytes and _evict(indexed, size - max_bytes, tally):
        indexed.index.shrink()
        size = bytes_on_disk(indexed)
    return tally.report(before, bytes_on_disk(indexed))


def clear(indexed: IndexedBlobs) -> PruneReport:
    """Remove every entry, record and file, also those in use: a loaded library stays mapped."""
    indexed.index.shrink()
    tally, before = _Tally(), bytes_on_disk(indexed)

    def delete(conn: sqlite3.Connection) -> None:
        tally.kernels = conn.execute("DELETE FROM kernels").rowcount
        tally.artifacts = conn.execute("DELETE FROM artifacts").rowcount
        conn.execute("DELETE FROM records")
        conn.execute("DELETE FROM tasks")
        tally.blobs = indexed.blobs.remove_all()

    indexed.index.run(delete, write=True)
    indexed.index.shrink()
    for path in _moved_aside(indexed):
        os.unlink(path)
    return tally.report(before, bytes_on_disk(indexed))


def _remove_leftovers(indexed: IndexedBlobs, tally: _Tally) -> None:
    """Temporary files, damaged indexes and blobs without a row, each if older than an hour."""
    stale = indexed.clock() - STALE_S
    old = [path for path, found in indexed.blobs.temporaries() if found.st_mtime < stale]
    old += [path for path in _moved_aside(indexed) if path.stat().st_mtime < stale]
    for path in old:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            tally.temporaries += 1

    def unnamed(conn: sqlite3.Connection) -> None:
        named = {blob for (blob,) in conn.execute("SELECT blob FROM artifacts").fetchall()}
        for digest, found in indexed.blobs:
            if digest not in named and found.st_mtime < stale:
                tally.blobs += bool(indexed.blobs.remove_unused(digest))

    indexed.index.run(unnamed, write=True)


def _evict(indexed: IndexedBlobs, excess: int, tally: _Tally) -> bool:
    """Remove least recently used entries of about ``excess`` bytes; whether anything went.

    Rows first and, when they are gone for good, their blobs: killed in between, a process leaves a
    blob without a row, which goes in an hour, and never a row without its blob.
    """
    unnamed: list[str] = []

    def evict(conn: sqlite3.Connection) -> bool:
        freed, stayed, gone = 0, 0, 0
        rows = conn.execute(
            """SELECT used, 'artifacts' AS source, digest, blob, length(entry) + bytes
                   FROM artifacts
               UNION ALL SELECT used, 'kernels', digest, '', length(entry) +
                   (SELECT total(length(entry)) FROM records WHERE task = kernels.digest) FROM
                   kernels
               UNION ALL SELECT used, 'tasks', digest, '',
                   (SELECT total(length(entry)) FROM records WHERE task = tasks.digest) FROM tasks
                   WHERE digest NOT IN (SELECT digest FROM kernels)
               ORDER BY used, source, digest"""
        )
        for _, table, digest, blob, size in rows.fetchall():
            if freed >= excess:
                break
            if _remove_entry(indexed, conn, table, digest, blob, unnamed):
                freed, gone = freed + _size(size), gone + 1
                tally.artifacts += table == "artifacts"
                tally.kernels += table == "kernels"
            else:
                stayed += 1
        tally.in_use = stayed
        return gone > 0

    def sweep(conn: sqlite3.Connection) -> None:
        for blob in unnamed:
            query = "SELECT 1 FROM artifacts WHERE blob = ?"
            if conn.execute(query, (blob,)).fetchone() is None:
                indexed.blobs.remove_unused(blob)

    removed = indexed.index.run(evict, write=True)
    if unnamed:
        indexed.index.run(sweep, write=True)
    return removed


def _remove_entry(
    indexed: IndexedBlobs,
    conn: sqlite3.Connection,
    table: str,
    digest: str,
    blob: str,
    unnamed: list[str],
) -> bool:
    """Remove one row with what belongs to it; False if it stays because its blob must.

    A blob that no other row names is added to ``unnamed``.
    """
    if table != "artifacts":
        delete_records(conn, digest)
    elif is_digest(blob):
        query = "SELECT 1 FROM artifacts WHERE blob = ? AND digest != ?"
        shared = conn.execute(query, (blob, digest)).fetchone() is not None
        if not shared and indexed.blobs.exists(blob):
            if not indexed.blobs.unused(blob):
                return False
            unnamed.append(blob)
    conn.execute(f"DELETE FROM {table} WHERE digest = ?", (digest,))
    return True


def _size(found: object) -> int:
    """A sum of a row's sizes, one of which no checksum covers."""
    return max(0, int(found)) if is_number(found) else 0  # type: ignore[call-overload]


def _when(found: object) -> float:
    """A row's time, which no checksum covers: 0 if it is none."""
    sound = is_number(found) and 0 <= found < _LATEST_S  # type: ignore[operator]
    return float(found) if sound else 0.0  # type: ignore[arg-type]


def _missing(indexed: IndexedBlobs, present: set[str]) -> list[str]:
    """Blobs that rows name and that are not there. Rows and blobs may come and go meanwhile."""
    query = "SELECT DISTINCT blob FROM artifacts"
    named = {str(blob) for (blob,) in _all(indexed, query)} - present
    gone = {digest for digest in named if not (is_digest(digest) and indexed.blobs.exists(digest))}
    return sorted(gone & {str(blob) for (blob,) in _all(indexed, query)}) if gone else []


def _problem(
    checksums: RowChecksums,
    table: str,
    parse: Callable[[str], object],
    name: str,
    text: object,
    checksum: object,
) -> str:
    try:
        parse(checksums.verify(table, name, text, checksum))
    except ValueError as err:
        return f"{table} {name}: {err}"
    return ""


def _moved_aside(indexed: IndexedBlobs) -> list[Path]:
    path = indexed.index.path
    return [] if path is None else list(path.parent.glob(f"{path.name}{MOVED}*"))


def _kind(text: str) -> ArtifactKind:
    return ArtifactEntry.from_text(text).kind


def _all(indexed: IndexedBlobs, query: str, *values: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = indexed.index.run(
        lambda conn: conn.execute(query, values).fetchall()
    )
    return rows
