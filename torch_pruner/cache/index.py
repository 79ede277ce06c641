"""The sqlite index: one connection, its transactions, and what to do when the file is not what it
should be.

In: functions of a connection. Out: what they return, as if the file were always sound. A damaged
file is moved aside and a fresh one started; whatever else is wrong (full disk, no permission,
locked for a minute) is an OSError. Knows the tables, but no entry of them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from filelock import FileLock

from torch_pruner import log
from torch_pruner.cache.forking import renew_after_fork
from torch_pruner.cache.location import FILE_MODE, make_private, shares_memory

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

BUSY_S: Final = 60.0
SCHEMA_VERSION: Final = 1
MOVED: Final = ".damaged-"  # in the name of an index that was moved aside
SCHEMA: Final = (
    """CREATE TABLE kernels (
        digest TEXT PRIMARY KEY, workload TEXT NOT NULL, target TEXT NOT NULL, device TEXT NOT NULL,
        threads INTEGER NOT NULL, numerics TEXT NOT NULL, codegen TEXT NOT NULL,
        entry TEXT NOT NULL, seal TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL)""",
    "CREATE INDEX kernels_by_workload ON kernels (workload)",
    "CREATE INDEX kernels_by_device ON kernels (target, device)",
    """CREATE TABLE graphs (
        digest TEXT PRIMARY KEY, blob TEXT NOT NULL, bytes INTEGER NOT NULL,
        entry TEXT NOT NULL, seal TEXT NOT NULL, created REAL NOT NULL, used REAL NOT NULL)""",
    "CREATE INDEX graphs_by_blob ON graphs (blob)",
    """CREATE TABLE tasks (
        digest TEXT PRIMARY KEY, entry TEXT NOT NULL, seal TEXT NOT NULL, used REAL NOT NULL)""",
    """CREATE TABLE records (
        id INTEGER PRIMARY KEY, task TEXT NOT NULL, candidate TEXT NOT NULL, status TEXT NOT NULL,
        entry TEXT NOT NULL, seal TEXT NOT NULL, UNIQUE (task, candidate))""",
)
_DAMAGE: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_UNKNOWN_SCHEMA: Final = "unknown schema version"

_log = log.logger(__name__)
_abandoned: list[sqlite3.Connection] = []


class IndexUnusable(OSError):
    """The index cannot be read or written now."""


class Index:
    """The tables of one cache, on disk or (``path=None``) in memory.

    Contract: ``run`` may be called from any thread. Work with ``write=True`` is one transaction
    that holds the write lock from its start; it may run a second time, on a fresh index, if the
    first attempt met damage. A forked child gets a connection of its own; an index in memory starts
    empty there.
    """

    def __init__(
        self, path: Path | None, *, lock: Path | None = None, read_only: bool = False
    ) -> None:
        self.path, self.read_only = path, read_only
        self._file_lock = lock
        self._lock = threading.RLock()
        self._connected: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None
        renew_after_fork(self)

    def run(
        self, work: Callable[[sqlite3.Connection], T], *, write: bool = False, wait: bool = True
    ) -> T:
        """Do ``work`` on the connection. Raises OSError when the index is unusable.

        ``wait=False`` gives up at once when another process is writing.
        """
        with self._lock:
            try:
                return self._attempt(work, write=write, wait=wait)
            except sqlite3.DatabaseError as err:
                if not _is_damage(err) or self.path is None or self.read_only:
                    raise self._unusable(err) from err
                self._move_aside(self.path, str(err))
            try:
                return self._attempt(work, write=write, wait=wait)
            except sqlite3.DatabaseError as err:
                raise self._unusable(err) from err

    def close(self) -> None:
        """Close the connection; the next ``run`` opens another."""
        with self._lock:
            if self._connected is not None:
                self._connected.close()
            self._connected = None

    def after_fork(self) -> None:
        """Leave the parent's connection alone: closing it could remove files the parent uses."""
        if self._connected is not None:
            _abandoned.append(self._connected)
        self._lock, self._connected = threading.RLock(), None

    def bytes_on_disk(self) -> int:
        """The size of the index with its journals."""
        if self.path is None:
            return 0
        total = 0
        for suffix in ("", "-wal", "-shm", "-journal"):
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(f"{self.path}{suffix}").st_size
        return total

    def shrink(self) -> None:
        """Give freed pages back to the file system."""

        def vacuum(conn: sqlite3.Connection) -> None:
            conn.execute("PRAGMA incremental_vacuum").fetchall()
            conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

        self.run(vacuum)

    def _attempt(self, work: Callable[[sqlite3.Connection], T], *, write: bool, wait: bool) -> T:
        conn = self._connection()
        if not write:
            return work(conn)
        if not wait:
            conn.execute("PRAGMA busy_timeout = 0")
        try:
            conn.execute("BEGIN IMMEDIATE")
        finally:
            if not wait:
                conn.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
        try:
            result = work(conn)
            conn.execute("COMMIT")
        except BaseException:
            if conn.in_transaction:
                with contextlib.suppress(sqlite3.Error):
                    conn.execute("ROLLBACK")
            raise
        return result

    def _connection(self) -> sqlite3.Connection:
        """The open connection, if the file under its name is still the one it was opened on."""
        if self.path is not None and self._inode != (inode := _inode(self.path)):
            self.close()
            self._inode = inode
        if self._connected is None:
            self._connected = self._connect()
        return self._connected

    def _connect(self) -> sqlite3.Connection:
        if self.path is None:
            return _create(_open(":memory:"), "MEMORY")
        if self.read_only:
            return _open_read_only(self.path)
        if self._inode is not None:
            conn = _open(str(self.path))
            if _version(conn) == SCHEMA_VERSION:
                return _tuned(conn)
            conn.close()
        return self._start(self.path)

    def _start(self, path: Path) -> sqlite3.Connection:
        """Create the tables, one process at a time, and the directories if someone removed them."""
        assert self._file_lock is not None
        for directory in (path.parent.parent, path.parent, self._file_lock.parent):
            make_private(directory)
        with self._exclusive():
            fresh = _create_private(path) or (_is_unborn(path) and _create_anew(path))
            self._inode = _inode(path)
            conn = _open(str(path))
            if fresh:
                _create(conn, "WAL" if shares_memory(path.parent) else "DELETE")
            elif (version := _version(conn)) != SCHEMA_VERSION:
                conn.close()
                raise sqlite3.DatabaseError(f"{_UNKNOWN_SCHEMA} {version}")
            return _tuned(conn)

    def _move_aside(self, path: Path, reason: str) -> None:
        """Rename the damaged file that this connection was opened on, if nobody else did."""
        damaged = self._inode
        self.close()
        with self._exclusive():
            if _inode(path) != damaged:
                return
            aside = f"{path}{MOVED}{time.time_ns()}-{os.getpid()}"
            # The journals go first: sqlite would replay a left-over journal into the fresh file.
            for suffix in ("-wal", "-shm", "-journal", ""):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{path}{suffix}", f"{aside}{suffix}")
        _log.warning("the cache index %s is damaged (%s); moved it to %s", path, reason, aside)

    def _exclusive(self) -> FileLock:
        assert self._file_lock is not None
        return FileLock(self._file_lock, timeout=BUSY_S, mode=FILE_MODE)

    def _unusable(self, err: sqlite3.DatabaseError) -> Exception:
        if isinstance(err, sqlite3.ProgrammingError | sqlite3.IntegrityError):
            return err
        return IndexUnusable(f"{err} ({self.path or 'in memory'})")


def _open(database: str, *, uri: bool = False) -> sqlite3.Connection:
    conn = sqlite3.connect(
        database, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=uri
    )
    # Bytes that are no text become text that fails its seal, instead of an error without a code.
    conn.text_factory = _lenient_text
    return conn


def _lenient_text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _open_read_only(path: Path) -> sqlite3.Connection:
    """Open for queries only.

    With permission to write, sqlite can remove its journals again. Without, it needs the journals
    of a living writer; failing that, there is none, and what a killed one left is read from a copy.
    """
    if os.access(path, os.W_OK) and os.access(path.parent, os.W_OK):
        conn = _open(f"{path.as_uri()}?mode=rw", uri=True)
    else:
        conn = _open(f"{path.as_uri()}?mode=ro", uri=True)
        try:
            _version(conn)
        except sqlite3.OperationalError:
            conn.close()
            conn = _open_without_writer(path)
    version = _version(conn)
    if version != SCHEMA_VERSION:
        conn.close()
        raise IndexUnusable(f"{_UNKNOWN_SCHEMA} {version} ({path})")
    conn.execute("PRAGMA query_only = ON")
    return conn


def _open_without_writer(path: Path) -> sqlite3.Connection:
    journal = Path(f"{path}-wal")
    if not journal.exists() or not journal.stat().st_size:
        return _open(f"{path.as_uri()}?mode=ro&immutable=1", uri=True)
    conn = _open(":memory:")
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory, path.name)
        shutil.copyfile(path, copy)
        shutil.copyfile(journal, f"{copy}-wal")
        with contextlib.closing(_open(str(copy))) as source:
            source.execute("PRAGMA journal_mode = DELETE").fetchall()
            source.backup(conn)
    return conn


def _create(conn: sqlite3.Connection, journal: str) -> sqlite3.Connection:
    conn.execute("PRAGMA auto_vacuum = INCREMENTAL")
    conn.execute(f"PRAGMA journal_mode = {journal}").fetchall()
    conn.execute("BEGIN IMMEDIATE")
    for statement in SCHEMA:
        conn.execute(statement)
    conn.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    conn.execute("COMMIT")
    return conn


def _tuned(conn: sqlite3.Connection) -> sqlite3.Connection:
    (mode,) = conn.execute("PRAGMA journal_mode").fetchone()
    conn.execute(f"PRAGMA synchronous = {'NORMAL' if mode == 'wal' else 'FULL'}")
    conn.execute("PRAGMA cell_size_check = ON")
    conn.execute("PRAGMA trusted_schema = OFF")
    return conn


def _version(conn: sqlite3.Connection) -> int:
    (version,) = conn.execute("PRAGMA user_version").fetchone()
    return int(version)


def _is_damage(err: sqlite3.DatabaseError) -> bool:
    """Whether the file is at fault: no database, malformed, or not with our tables."""
    if isinstance(err, sqlite3.ProgrammingError | sqlite3.IntegrityError):
        return False
    if str(err).startswith(("no such table", "no such column", _UNKNOWN_SCHEMA)):
        return True
    code: int = getattr(err, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code & 0xFF in _DAMAGE


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _is_unborn(path: Path) -> bool:
    """Whether this is what a process leaves that was killed before it had made the tables.

    There is nothing in it that would be worth keeping.
    """
    with contextlib.closing(_open(str(path))) as conn, contextlib.suppress(sqlite3.DatabaseError):
        (tables,) = conn.execute("SELECT count(*) FROM sqlite_master").fetchone()
        return not tables and not _version(conn)
    return False


def _create_anew(path: Path) -> bool:
    _log.warning("the cache index %s is empty; it is begun anew", path)
    for suffix in ("-wal", "-shm", "-journal", ""):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}{suffix}")
    return _create_private(path)


def _create_private(path: Path) -> bool:
    """Create an empty private file; False if it is there. Journals inherit its mode."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, FILE_MODE))
    except FileExistsError:
        return False
    return True
