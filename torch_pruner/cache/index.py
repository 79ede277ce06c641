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
from torch_pruner.cache import salvage, schema, userkey
from torch_pruner.cache.files import FILE_MODE, no_link
from torch_pruner.cache.fork_hooks import close_at_exit, renew_after_fork
from torch_pruner.cache.location import make_private, shares_memory
from torch_pruner.cache.trust import JOURNALS, doubt

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

BUSY_S: Final = 60.0
MOVED: Final = ".damaged-"  # in the name of an index that was moved aside
_DAMAGE: Final = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
CHECKPOINT_S: Final = 1.0  # how long what was committed may lie in the write-ahead log alone
CHECKPOINT_BYTES: Final = 1 << 20

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
        self._logs = False  # whether there is a write-ahead log
        self._settled_s = 0.0  # when it was last empty
        renew_after_fork(self)
        close_at_exit(self)

    def run(
        self, work: Callable[[sqlite3.Connection], T], *, write: bool = False, wait: bool = True
    ) -> T:
        """Do ``work`` on the connection. Raises OSError when the index is unusable.

        ``wait=False`` gives up at once when another process is writing.
        """
        with self._lock:
            try:
                return self._attempt(work, write=write, wait=wait)
            except (sqlite3.DatabaseError, UnicodeDecodeError) as err:
                if not _is_damage(err) or self.path is None or self.read_only:
                    raise self._unusable(err) from err
                aside = self._move_aside(self.path, str(err))
            try:
                if aside is not None:
                    self._salvage(aside)
                return self._attempt(work, write=write, wait=wait)
            except (sqlite3.DatabaseError, UnicodeDecodeError) as err:
                raise self._unusable(err) from err

    def close(self) -> None:
        """Close the connection; the next ``run`` opens another. The log is emptied before."""
        with self._lock:
            if self._connected is not None and self._stale():
                # Closing it would remove the journals of the file that took this one's name.
                _abandoned.append(self._connected)
            elif self._connected is not None:
                self._settle(self._connected)
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
        for suffix in ("", *JOURNALS):
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
        if time.monotonic() - self._settled_s >= CHECKPOINT_S or self._log_is_long():
            self._settle(conn)
        return result

    def _settle(self, conn: sqlite3.Connection) -> None:
        """Move what the write-ahead log holds into the index, unless another process is in the way.

        A log is read up to its first flaw, so what lies in it alone is lost as a whole; and one
        that was left behind half valid would be mixed with what is newer in the index.
        """
        if not self._logs or self.read_only:
            return
        with contextlib.suppress(sqlite3.Error):
            conn.execute("PRAGMA busy_timeout = 0")
            try:
                conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                conn.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
        self._settled_s = time.monotonic()

    def _log_is_long(self) -> bool:
        try:
            return self._logs and os.stat(f"{self.path}-wal").st_size > CHECKPOINT_BYTES
        except OSError:
            return False

    def _stale(self) -> bool:
        return self.path is not None and _inode(self.path) != self._inode

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
            return schema.create(_open(":memory:"), "MEMORY")
        for suffix in ("", *JOURNALS):
            if found := doubt(self.path.with_name(f"{self.path.name}{suffix}")):
                raise IndexUnusable(f"{found.path}: {found.reason}")
        if self.read_only:
            return _open_read_only(self.path)
        if self._inode is not None:
            conn = _open(str(self.path))
            if not schema.problem(conn):
                return self._tuned(conn)
            conn.close()
        return self._start(self.path)

    def _start(self, path: Path) -> sqlite3.Connection:
        """Create the tables, one process at a time, and the directories if someone removed them."""
        assert self._file_lock is not None
        make_private(path.parent.parent)
        if make_private(path.parent):
            userkey.note_own(path.parent)
        make_private(self._file_lock.parent)
        with self._exclusive():
            fresh = _create_private(path) or (_is_unborn(path) and _create_anew(path))
            self._inode = _inode(path)
            conn = _open(str(path))
            if fresh:
                schema.create(conn, "WAL" if shares_memory(path.parent) else "DELETE")
            elif reason := schema.problem(conn):
                conn.close()
                raise sqlite3.DatabaseError(reason)
            return self._tuned(conn)

    def _tuned(self, conn: sqlite3.Connection) -> sqlite3.Connection:
        (mode,) = conn.execute("PRAGMA journal_mode").fetchone()
        self._logs = mode == "wal"
        conn.execute(f"PRAGMA synchronous = {'NORMAL' if self._logs else 'FULL'}")
        conn.execute("PRAGMA cell_size_check = ON")
        conn.execute("PRAGMA trusted_schema = OFF")
        self._settle(conn)  # what a killed process left
        return conn

    def _move_aside(self, path: Path, reason: str) -> Path | None:
        """Rename the damaged file that this connection was opened on, if nobody else did."""
        damaged = self._inode
        with self._exclusive():
            self.close()
            if _inode(path) != damaged:
                return None
            aside = f"{path}{MOVED}{time.time_ns()}-{os.getpid()}"
            # The journals go first: sqlite would replay a left-over journal into the fresh file.
            for suffix in (*JOURNALS, ""):
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{path}{suffix}", f"{aside}{suffix}")
        _log.warning("the cache index %s is damaged (%s); moved it to %s", path, reason, aside)
        return None if reason.startswith(schema.FOREIGN) else Path(aside)

    def _salvage(self, aside: Path) -> None:
        """Take over what is legible of a damaged file."""

        def carry_over(conn: sqlite3.Connection) -> int:
            return salvage.carry_over(lambda uri: _open(uri, uri=True), aside, conn)

        count = self._attempt(carry_over, write=True, wait=True)
        _log.warning("%d rows of the damaged cache index could be read and are kept", count)

    def _exclusive(self) -> FileLock:
        assert self._file_lock is not None
        return FileLock(no_link(self._file_lock), timeout=BUSY_S, mode=FILE_MODE)

    def _unusable(self, err: sqlite3.DatabaseError | UnicodeDecodeError) -> Exception:
        if isinstance(err, sqlite3.ProgrammingError | sqlite3.IntegrityError):
            return err
        return IndexUnusable(f"{err} ({self.path or 'in memory'})")


def _open(database: str, *, uri: bool = False) -> sqlite3.Connection:
    conn = sqlite3.connect(
        database, timeout=BUSY_S, isolation_level=None, check_same_thread=False, uri=uri
    )
    # Bytes that are no text become text with a wrong checksum, instead of an error without a code.
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
            schema.version(conn)
        except sqlite3.OperationalError:
            conn.close()
            conn = _open_without_writer(path)
    if reason := schema.problem(conn):
        conn.close()
        raise IndexUnusable(f"{reason} ({path})")
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


def _is_damage(err: sqlite3.DatabaseError | UnicodeDecodeError) -> bool:
    """Whether the file is at fault: no database, malformed, or not with our tables.

    An error whose text is no text quotes what lies in the file.
    """
    if isinstance(err, UnicodeDecodeError):
        return True
    if isinstance(err, sqlite3.ProgrammingError | sqlite3.IntegrityError):
        return False
    if str(err).startswith(("no such table", "no such column", schema.FOREIGN)):
        return True
    code: int = getattr(err, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code & 0xFF in _DAMAGE


def _inode(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _is_unborn(path: Path) -> bool:
    with contextlib.closing(_open(str(path))) as conn:
        return schema.is_unborn(conn)


def _create_anew(path: Path) -> bool:
    _log.warning("the cache index %s is empty; it is begun anew", path)
    for suffix in (*JOURNALS, ""):
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
