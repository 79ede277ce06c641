"""Looking after a shelf: verify it, shrink it, empty it.

In: a shelf. Out: reports. Removal of a blob happens inside a transaction that holds the index's
write lock, so that no row that refers to it can appear meanwhile.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from torch_pruner.cache.entry import CHECKED, GraphEntry, KernelEntry
from torch_pruner.cache.index import MOVED
from torch_pruner.cache.indexed_blobs import Shelf, delete_records
from torch_pruner.cache.key import KernelKey, is_digest, is_number, parse_object
from torch_pruner.cache.records import TuningRecord
from torch_pruner.cache.row_checksum import Seals

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable
    from pathlib import Path

STALE_S: Final = 3600.0
_LATEST_S: Final = 1e11  # seconds since the epoch, of the year 5138
_PARSERS: Final[dict[str, Callable[[str], object]]] = {
    "kernels": KernelEntry.from_text,
    "graphs": GraphEntry.from_text,
    "tasks": lambda text: KernelKey.from_json(parse_object(text)),
    "records": lambda text: TuningRecord.from_json(parse_object(text)),
}


@dataclass(frozen=True, slots=True)
class Listed:
    """One entry as ``cache ls`` shows it. ``bytes`` counts its row and its blob."""

    digest: str
    entry: KernelEntry | GraphEntry
    bytes: int
    created: float
    used: float


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What is sound, by table (and "blobs"), and what is not, in words."""

    sound: dict[str, int] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What was removed. ``in_use`` counts graphs that had to stay in a cache too large."""

    kernels: int = 0
    graphs: int = 0
    blobs: int = 0
    temporaries: int = 0
    in_use: int = 0
    freed_bytes: int = 0
    bytes: int = 0


@dataclass(slots=True)
class _Tally:
    kernels: int = 0
    graphs: int = 0
    blobs: int = 0
    temporaries: int = 0
    in_use: int = 0

    def report(self, before: int, after: int) -> PruneReport:
        return PruneReport(
            self.kernels,
            self.graphs,
            self.blobs,
            self.temporaries,
            self.in_use,
            max(0, before - after),
            after,
        )


def bytes_on_disk(shelf: Shelf) -> int:
    """The size of the index, the blobs, and what writers left."""
    files = [found.st_size for _, found in shelf.blobs]
    files += [found.st_size for _, found in shelf.blobs.temporaries()]
    return shelf.index.bytes_on_disk() + sum(files)


def listing(shelf: Shelf) -> list[Listed]:
    """Every entry that can be read, most recently used first, kernels before graphs."""
    found: list[Listed] = []
    for table, size in (("kernels", "length(entry)"), ("graphs", "length(entry) + bytes")):
        query = f"SELECT digest, entry, seal, {size}, created, used FROM {table} ORDER BY used DESC"
        for digest, text, sealed, n, created, used in _all(shelf, query):
            with contextlib.suppress(ValueError):
                plain = shelf.seals.unseal(table, digest, text, sealed)
                parse = KernelEntry.from_text if table == "kernels" else GraphEntry.from_text
                found.append(Listed(digest, parse(plain), _size(n), _when(created), _when(used)))
    return found


def count(shelf: Shelf, table: str) -> int:
    return int(_all(shelf, f"SELECT count(*) FROM {table}")[0][0])


def verify(shelf: Shelf) -> VerifyReport:
    """Parse every row and hash every blob. Removes nothing."""
    problems: list[str] = []
    sound: dict[str, int] = {}
    for (verdict,) in _all(shelf, "PRAGMA quick_check"):
        if verdict != "ok":
            problems.append(f"index: {verdict}")
    for table, parse in _PARSERS.items():
        name = "task" if table == "records" else "digest"
        rows = _all(shelf, f"SELECT {name}, entry, seal FROM {table}")
        bad = [p for row in rows if (p := _problem(shelf.seals, table, parse, *row))]
        sound[table] = len(rows) - len(bad)
        problems += bad
    present = {digest for digest, _ in shelf.blobs}
    problems += [f"blob {digest}: missing" for digest in _missing(shelf, present)]
    bad = [p for digest in sorted(present) if (p := shelf.blobs.verify(digest))]
    sound["blobs"] = len(present) - len(bad)
    aside = [
        f"index: a damaged one is kept as {path}"
        for path in sorted(_moved_aside(shelf))
        if not path.name.endswith(("-wal", "-shm", "-journal"))
    ]
    return VerifyReport(sound, tuple(problems + bad + aside))


def adopt(shelf: Shelf) -> int:
    """Sign every sound row that this user has not signed; how many.

    What others say was compared with eager is forgotten: it is compared again.
    """
    if shelf.seals.key is None:
        raise OSError("this user has no key to sign entries with")
    lenient = Seals(shelf.seals.key)

    def sign(conn: sqlite3.Connection) -> int:
        count = 0
        for table, parse in _PARSERS.items():
            name = "task" if table == "records" else "digest"
            rows = conn.execute(f"SELECT rowid, {name}, entry, seal FROM {table}").fetchall()
            for row, key, text, sealed in rows:
                if _problem(lenient, table, parse, key, text, sealed):
                    continue
                if lenient.signed(table, key, text, sealed):
                    continue
                if table == "graphs" and CHECKED in GraphEntry.from_text(text).meta:
                    conn.execute("DELETE FROM graphs WHERE rowid = ?", (row,))
                    continue
                values = (lenient.seal(table, key, text), row)
                conn.execute(f"UPDATE {table} SET seal = ? WHERE rowid = ?", values)
                count += 1
        return count

    return shelf.index.run(sign, write=True)


def prune(shelf: Shelf, max_bytes: int) -> PruneReport:
    """Remove left-overs older than an hour, then least recently used entries until the rest fits.

    A graph whose library any process has just taken out stays, and so does everything that cannot
    be proved unused.
    """
    shelf.index.shrink()
    tally, before = _Tally(), bytes_on_disk(shelf)
    _remove_leftovers(shelf, tally)
    size = bytes_on_disk(shelf)
    while size > max_bytes and _evict(shelf, size - max_bytes, tally):
        shelf.index.shrink()
        size = bytes_on_disk(shelf)
    return tally.report(before, bytes_on_disk(shelf))


def clear(shelf: Shelf) -> PruneReport:
    """Remove every entry, record and file, also those in use: a loaded library stays mapped."""
    shelf.index.shrink()
    tally, before = _Tally(), bytes_on_disk(shelf)

    def delete(conn: sqlite3.Connection) -> None:
        tally.kernels = conn.execute("DELETE FROM kernels").rowcount
        tally.graphs = conn.execute("DELETE FROM graphs").rowcount
        conn.execute("DELETE FROM records")
        conn.execute("DELETE FROM tasks")
        tally.blobs = shelf.blobs.remove_all()

    shelf.index.run(delete, write=True)
    shelf.index.shrink()
    for path in _moved_aside(shelf):
        os.unlink(path)
    return tally.report(before, bytes_on_disk(shelf))


def _remove_leftovers(shelf: Shelf, tally: _Tally) -> None:
    """Temporary files, damaged indexes and blobs without a row, each if older than an hour."""
    stale = shelf.clock() - STALE_S
    old = [path for path, found in shelf.blobs.temporaries() if found.st_mtime < stale]
    old += [path for path in _moved_aside(shelf) if path.stat().st_mtime < stale]
    for path in old:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
            tally.temporaries += 1

    def unnamed(conn: sqlite3.Connection) -> None:
        named = {blob for (blob,) in conn.execute("SELECT blob FROM graphs").fetchall()}
        for digest, found in shelf.blobs:
            if digest not in named and found.st_mtime < stale:
                tally.blobs += bool(shelf.blobs.remove_unused(digest))

    shelf.index.run(unnamed, write=True)


def _evict(shelf: Shelf, excess: int, tally: _Tally) -> bool:
    """Remove least recently used entries of about ``excess`` bytes; whether anything went.

    Rows first and, when they are gone for good, their blobs: killed in between, a process leaves a
    blob without a row, which goes in an hour, and never a row without its blob.
    """
    unnamed: list[str] = []

    def evict(conn: sqlite3.Connection) -> bool:
        freed, stayed, gone = 0, 0, 0
        rows = conn.execute(
            """SELECT used, 'graphs' AS kind, digest, blob, length(entry) + bytes FROM graphs
               UNION ALL SELECT used, 'kernels', digest, '', length(entry) +
                   (SELECT total(length(entry)) FROM records WHERE task = kernels.digest) FROM
                   kernels
               UNION ALL SELECT used, 'tasks', digest, '',
                   (SELECT total(length(entry)) FROM records WHERE task = tasks.digest) FROM tasks
                   WHERE digest NOT IN (SELECT digest FROM kernels)
               ORDER BY used, kind, digest"""
        )
        for _, table, digest, blob, size in rows.fetchall():
            if freed >= excess:
                break
            if _remove_entry(shelf, conn, table, digest, blob, unnamed):
                freed, gone = freed + _size(size), gone + 1
                tally.graphs += table == "graphs"
                tally.kernels += table == "kernels"
            else:
                stayed += 1
        tally.in_use = stayed
        return gone > 0

    def sweep(conn: sqlite3.Connection) -> None:
        for blob in unnamed:
            query = "SELECT 1 FROM graphs WHERE blob = ?"
            if conn.execute(query, (blob,)).fetchone() is None:
                shelf.blobs.remove_unused(blob)

    removed = shelf.index.run(evict, write=True)
    if unnamed:
        shelf.index.run(sweep, write=True)
    return removed


def _remove_entry(
    shelf: Shelf,
    conn: sqlite3.Connection,
    table: str,
    digest: str,
    blob: str,
    unnamed: list[str],
) -> bool:
    """Remove one row with what belongs to it; False if it stays because its blob must.

    A blob that no other row names is added to ``unnamed``.
    """
    if table != "graphs":
        delete_records(conn, digest)
    elif is_digest(blob):
        query = "SELECT 1 FROM graphs WHERE blob = ? AND digest != ?"
        shared = conn.execute(query, (blob, digest)).fetchone() is not None
        if not shared and shelf.blobs.exists(blob):
            if not shelf.blobs.unused(blob):
                return False
            unnamed.append(blob)
    conn.execute(f"DELETE FROM {table} WHERE digest = ?", (digest,))
    return True


def _size(found: object) -> int:
    """A sum of a row's sizes, one of which has no seal."""
    return max(0, int(found)) if is_number(found) else 0  # type: ignore[call-overload]


def _when(found: object) -> float:
    """A row's time, which has no seal: 0 if it is none."""
    sound = is_number(found) and 0 <= found < _LATEST_S  # type: ignore[operator]
    return float(found) if sound else 0.0  # type: ignore[arg-type]


def _missing(shelf: Shelf, present: set[str]) -> list[str]:
    """Blobs that rows name and that are not there. Rows and blobs may come and go meanwhile."""
    query = "SELECT DISTINCT blob FROM graphs"
    named = {str(blob) for (blob,) in _all(shelf, query)} - present
    gone = {digest for digest in named if not (is_digest(digest) and shelf.blobs.exists(digest))}
    return sorted(gone & {str(blob) for (blob,) in _all(shelf, query)}) if gone else []


def _problem(
    seals: Seals,
    table: str,
    parse: Callable[[str], object],
    name: str,
    text: object,
    sealed: object,
) -> str:
    try:
        parse(seals.unseal(table, name, text, sealed))
    except ValueError as err:
        return f"{table} {name}: {err}"
    return ""


def _moved_aside(shelf: Shelf) -> list[Path]:
    path = shelf.index.path
    return [] if path is None else list(path.parent.glob(f"{path.name}{MOVED}*"))


def _all(shelf: Shelf, query: str) -> list[tuple[Any, ...]]:
    rows: list[tuple[Any, ...]] = shelf.index.run(lambda conn: conn.execute(query).fetchall())
    return rows
