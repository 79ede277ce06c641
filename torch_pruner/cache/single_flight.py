"""Single flight: of all threads and processes that want to tune one kernel, one does.

In: digests of keys. Out: context managers that say whether the claim was got in time. The operating
system lets go of a dead holder's file lock. Lock files stay where they are: removing one would
split its waiters.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from torch_pruner import log
from torch_pruner.cache.files import FILE_MODE, no_link
from torch_pruner.cache.fork_hooks import renew_after_fork
from torch_pruner.cache.key import is_digest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_log = log.logger(__name__)


@dataclass(slots=True)
class _Flight:
    """A thread lock, how many want it, how deep its holder is nested, and if it has the file."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    wanted: int = 0
    depth: int = 0
    mine: bool = False


class SingleFlight:
    """SingleFlight on digests, among threads (``directory=None``) or among processes too.

    Contract: while a claim is held, nobody else who uses the same directory holds it. A claim may
    be nested in itself within one thread.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self._guard = threading.Lock()
        self._flights: dict[str, _Flight] = {}
        renew_after_fork(self)

    @contextlib.contextmanager
    def claim(self, digest: str, timeout_s: float | None = None) -> Iterator[bool]:
        """Hold ``digest`` during the ``with`` body; False if someone else still held it after
        ``timeout_s``.

        None waits for as long as it takes, 0 does not wait.
        """
        if not is_digest(digest):
            raise ValueError(f"not the digest of a key: {digest!r}")
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._guard:
            claim = self._flights.setdefault(digest, _Flight())
            claim.wanted += 1
        try:
            if not claim.lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
                yield False
                return
            claim.depth += 1
            try:
                if claim.depth > 1:
                    yield claim.mine
                    return
                with self._file(digest, deadline) as claim.mine:
                    yield claim.mine
            finally:
                claim.depth -= 1
                claim.lock.release()
        finally:
            with self._guard:
                claim.wanted -= 1
                if not claim.wanted and self._flights.get(digest) is claim:
                    del self._flights[digest]

    def after_fork(self) -> None:
        """The child holds no claims: they are the parent's."""
        self._guard, self._flights = threading.Lock(), {}

    @contextlib.contextmanager
    def _file(self, digest: str, deadline: float | None) -> Iterator[bool]:
        if self.directory is None:
            yield True
            return
        left = -1 if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            lock = FileLock(no_link(self.directory / f"{digest}.lock"), mode=FILE_MODE)
            lock.acquire(timeout=left)
        except Timeout:
            yield False
            return
        except OSError as err:
            log.warn_once(
                _log,
                "claims",
                "cannot lock files in %s: processes may tune the same kernel (%s)",
                self.directory,
                err,
            )
            yield True
            return
        try:
            yield True
        finally:
            lock.release()
