"""Bytes as files named by their sha256; most are shared libraries.

In: bytes. Out: paths of files whose bytes have just been hashed. A file appears under its name
complete or not at all. Knows no index: who refers to a blob is the caller's business, and so is
holding the index's write lock while one is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from torch_pruner import exc
from torch_pruner.cache.files import TEMPORARY, open_regular, written_whole
from torch_pruner.cache.fork_hooks import renew_after_fork
from torch_pruner.cache.key import is_digest
from torch_pruner.cache.location import make_private
from torch_pruner.cache.trust import doubt, doubt_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SUFFIX: Final = ".so"  # loaders choose by the suffix
_CHUNK: Final = 1 << 20
_MAX_PINS: Final = 64
_MAX_REPLACED: Final = 1000  # writers that may rename over a blob while it is opened


class BlobDir:
    """Content-addressed files below ``root``.

    Contract: ``checkout`` returns the path of a file whose digest was just verified, and keeps a
    shared lock on it (the last 64 of them, until ``close``), so that ``remove_unused`` of any
    process leaves it alone until it can be loaded. Loaded libraries stay mapped when their file
    goes.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._pins: OrderedDict[str, int] = OrderedDict()
        renew_after_fork(self)

    def path(self, digest: str) -> Path:
        assert is_digest(digest), digest
        return self.root / digest[:2] / f"{digest}{SUFFIX}"

    def publish(self, digest: str, data: bytes) -> None:
        """Write ``data`` under its digest (temporary file, fsync, rename) unless it is there."""
        path = self.path(digest)
        with contextlib.suppress(OSError, exc.CorruptEntry), _opened(path) as fd:
            if _hash_fd(fd) == digest:
                os.utime(fd)
                return
        for directory in (self.root, path.parent):
            make_private(directory)
        with written_whole(path) as file:
            file.write(data)

    def checkout(self, digest: str) -> Path:
        """The path of a verified blob, which is then in use by this process.

        Raises FileNotFoundError when it is gone (or going), CorruptEntry when its bytes are not
        what it is named after or others can change them, and any other OSError when it cannot be
        read.
        """
        path = self.path(digest)
        fd = self._open_shared(path)
        with contextlib.ExitStack() as unless_pinned:
            unless_pinned.callback(os.close, fd)
            found = _hash_fd(fd)
            if found != digest:
                raise exc.CorruptEntry(path, f"its sha256 is {found}")
            unless_pinned.pop_all()
        self._pin(digest, fd)
        return path

    def verify(self, digest: str) -> str:
        """The problem with the bytes of a blob, in words; "" if there is none, or it is gone."""
        try:
            with _opened(self.path(digest)) as fd:
                found = _hash_fd(fd)
        except FileNotFoundError:
            return ""
        except OSError as err:
            return f"blob {digest}: {err.strerror or err}"
        except exc.CorruptEntry as err:
            return f"blob {digest}: {err.reason}"
        return "" if found == digest else f"blob {digest}: its sha256 is {found}"

    def exists(self, digest: str) -> bool:
        return os.path.lexists(self.path(digest))

    def __iter__(self) -> Iterator[tuple[str, os.stat_result]]:
        """Digest and stat of every file that has a blob's name."""
        for path in self._files():
            digest = path.name.removesuffix(SUFFIX)
            if path.name.endswith(SUFFIX) and is_digest(digest) and path == self.path(digest):
                with contextlib.suppress(FileNotFoundError):
                    yield digest, os.lstat(path)

    def temporaries(self) -> Iterator[tuple[Path, os.stat_result]]:
        """Files that writers are filling, or left behind when they were killed."""
        for path in self._files():
            if path.name.startswith(TEMPORARY):
                with contextlib.suppress(FileNotFoundError):
                    yield path, os.lstat(path)

    def unused(self, digest: str) -> bool:
        """Whether ``remove_unused`` would remove a blob now."""
        return bool(self._unused(digest, remove=False))

    def remove_unused(self, digest: str) -> int:
        """Remove a blob that no process has checked out; the bytes freed, 0 if it stays.

        The caller holds the index's write lock. Where locks do not work, nothing can be proved and
        the blob stays.
        """
        return self._unused(digest, remove=True)

    def _unused(self, digest: str, *, remove: bool) -> int:
        try:
            fd = os.open(self.path(digest), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return 0
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(fd).st_size
            if remove:
                os.unlink(self.path(digest))
        except OSError:
            return 0
        finally:
            os.close(fd)
        return size

    def remove_all(self) -> int:
        """Remove every blob, in use or not; how many."""
        removed = 0
        for digest, _ in self:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(digest))
                removed += 1
        return removed

    def close(self) -> None:
        """Let go of all blobs that this process checked out."""
        with self._lock:
            while self._pins:
                os.close(self._pins.popitem()[1])

    def after_fork(self) -> None:
        """The child shares the parent's pins; they end when both have closed them."""
        self._lock = threading.Lock()

    def __del__(self) -> None:
        self.close()

    def _files(self) -> Iterator[Path]:
        with contextlib.suppress(FileNotFoundError):
            for directory in sorted(self.root.iterdir()):
                if directory.is_dir() and not directory.is_symlink():
                    yield from sorted(directory.iterdir())

    def _open_shared(self, path: Path) -> int:
        """Open what is at ``path`` with a shared lock on it.

        Two writers of one blob both rename theirs into place, so the file that was opened may have
        lost its name to an equal one: then that one is opened.
        """
        for _ in range(_MAX_REPLACED):
            fd = _open_trusted(path)
            with contextlib.ExitStack() as unless_shared:
                unless_shared.callback(os.close, fd)
                if self._share(fd, path):
                    unless_shared.pop_all()
                    return fd
        raise FileNotFoundError(f"{path} was replaced {_MAX_REPLACED} times while it was opened")

    def _share(self, fd: int, path: Path) -> bool:
        """Lock a file that was opened; whether it still has its name then."""
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise FileNotFoundError(f"{path} is being removed") from err
        except OSError:
            return True  # no locks on this file system; then remove_unused cannot get one either
        return os.fstat(fd).st_nlink > 0

    def _pin(self, digest: str, fd: int) -> None:
        with self._lock:
            old = self._pins.pop(digest, None)
            if old is not None:
                os.close(old)
            self._pins[digest] = fd
            while len(self._pins) > _MAX_PINS:
                os.close(self._pins.popitem(last=False)[1])


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _open_trusted(path: Path) -> int:
    """A descriptor of a blob. Raises OSError, and CorruptEntry where others can change it."""
    if found := doubt(path) or doubt(path.parent):
        raise exc.CorruptEntry(found.path, found.reason)
    fd = open_regular(path, follow=False)
    if found := doubt_of(path, os.fstat(fd)):
        os.close(fd)
        raise exc.CorruptEntry(path, found.reason)
    return fd


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = _open_trusted(path)
    try:
        yield fd
    finally:
        os.close(fd)


def _hash_fd(fd: int) -> str:
    hasher = hashlib.sha256()
    while chunk := os.read(fd, _CHUNK):
        hasher.update(chunk)
    return hasher.hexdigest()
