"""The directories of a cache, and whether this process may use them.

In: a directory or nothing. Out: a directory with our layout, private to its user, and whether it
can be written. What another user could have filled is not used, because libraries are loaded from
it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import platformdirs

from torch_pruner import exc, log
from torch_pruner.cache import trust, userkey
from torch_pruner.cache.row_checksum import RowChecksums

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch_pruner.cache.trust import Doubt

_log = log.logger(__name__)

FORMAT = "v2"
FORMER = ("v1",)  # formats of earlier versions; nothing of them is read
ASIDE = ".untrusted-"  # in the name of a version directory that was set aside
DIR_MODE = 0o700
_FORMATS = (FORMAT, *FORMER)

_REMEDY = (
    "give a directory that this user owns and nobody else can write to; if nobody else has written"
    " to this one, `chmod -R go-w` makes it one"
)

# sqlite's write-ahead log needs memory that all its users share, which network mounts cannot give.
_NETWORK = (
    "nfs",
    "cifs",
    "smb",
    "9p",
    "fuse",
    "lustre",
    "ceph",
    "gpfs",
    "beegfs",
    "afs",
    "virtiofs",
)


@dataclass(frozen=True, slots=True)
class Layout:
    """The paths of one cache root. A new format version is a new directory."""

    root: Path

    @property
    def home(self) -> Path:
        return self.root / FORMAT

    @property
    def index(self) -> Path:
        return self.home / "index.sqlite"

    @property
    def blobs(self) -> Path:
        return self.home / "blobs"

    @property
    def locks(self) -> Path:
        return self.home / "locks"


def default_root() -> Path:
    """The user's cache directory; below the temporary files for a user without a home."""
    with contextlib.suppress(RuntimeError):  # platformdirs: the home directory is unknown
        path = platformdirs.user_cache_path("torch_pruner", appauthor=False)
        if path.is_absolute():
            return path
    return Path(tempfile.gettempdir()) / f"torch_pruner-{os.geteuid()}"


def absolute(root: str | os.PathLike[str]) -> Path:
    """``root`` with ``~`` expanded, made absolute."""
    return Path(os.path.abspath(os.path.expanduser(root)))


def expect(root: Path) -> None:
    """Raise CacheDirectoryError where there is no cache at ``root``. Makes nothing."""
    if not Layout(root).home.is_dir():
        what = "nothing" if not os.path.lexists(root) else "no cache"
        raise exc.CacheDirectoryError(
            root, f"there is {what} there", "`torch-pruner tune MODEL --cache-dir DIR` makes one"
        )


def usable(root: Path, *, read_only: bool = False) -> bool:
    """``prepare`` for who has no use for a cache in memory: what is wrong is raised.

    Raises CacheDirectoryError.
    """
    try:
        return prepare(Layout(root), read_only=read_only)
    except OSError as err:
        raise exc.CacheDirectoryError(root, err.strerror or str(err)) from err


def prepare(layout: Layout, *, read_only: bool) -> bool:
    """Make the directories of ``layout`` and say whether they can be written.

    What others could have written until now is set aside, and the cache begun afresh; where that is
    not possible, CacheDirectoryError says why it is not used. OSError when there is nothing to use.
    """
    if not read_only:
        with contextlib.suppress(OSError):
            os.makedirs(layout.root.parent, exist_ok=True)
            make_private(layout.root)
    if (doubts := _doubts(layout)) and (read_only or not _begin_afresh(layout)):
        raise exc.CacheDirectoryError(doubts[0].path, doubts[0].reason, _REMEDY)
    if not read_only:
        try:
            make_private(layout.root)
            if make_private(layout.home):
                userkey.note_own(layout.home)
            for path in (layout.blobs, layout.locks):
                make_private(path)
        except OSError:
            if not layout.home.is_dir():
                raise
    if read_only or not _writable(layout):
        os.listdir(layout.home)
        return False
    return True


def checksums_of(layout: Layout, *, read_only: bool) -> RowChecksums:
    """The checksums and signatures of a cache, whose directories ``prepare`` has made."""
    key = userkey.load(layout.root, create=not read_only)
    return RowChecksums(key, own=key is not None and userkey.is_own(layout.home))


def make_private(path: Path) -> bool:
    """Make one directory that only its user may enter; False if it is there."""
    try:
        os.mkdir(path, DIR_MODE)
    except FileExistsError:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            raise NotADirectoryError(f"not a directory: {path}") from None
        return False
    return True


def remove_unused_formats(layout: Layout) -> None:
    """Remove version directories that others could have written to, and those of earlier formats.

    A version of this package that still reads an earlier format begins it anew.
    """
    aside = [path for name in _FORMATS for path in layout.root.glob(f"{name}{ASIDE}*")]
    for path in [*aside, *(layout.root / name for name in FORMER)]:
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def shares_memory(path: Path) -> bool:
    """Whether sqlite's write-ahead log can be used under ``path``: not on a network file system."""
    try:
        mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    kind, longest = "", -1
    real = os.path.realpath(path)
    for line in mounts.splitlines():
        _, point, fstype, *_ = [*line.split(" "), "", "", ""]
        point = point.replace("\\040", " ")
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            kind, longest = fstype, len(point)
    return not kind.startswith(_NETWORK)


def _writable(layout: Layout) -> bool:
    effective = os.access in os.supports_effective_ids
    dirs = [layout.home, layout.blobs, layout.locks]
    files = [layout.index] if layout.index.exists() else []
    return all(os.access(d, os.W_OK | os.X_OK, effective_ids=effective) for d in dirs) and all(
        os.access(f, os.W_OK, effective_ids=effective) for f in files
    )


def _doubts(layout: Layout) -> list[Doubt]:
    found = trust.doubt(layout.root)
    if found is not None:
        return [found]
    inside = {"index": layout.index, "blobs": layout.blobs, "locks": layout.locks}
    return list(trust.doubts(layout.home, **inside))


def _begin_afresh(layout: Layout) -> bool:
    """Put what others could have written beside the cache; False if that cannot be done here.

    Permissions are taken away first, and files moved instead of being closed in place: whoever has
    one open can write to it for good.
    """
    root, me = layout.root, os.geteuid()
    with contextlib.suppress(OSError), _locked(root) as fd:
        found = trust.doubt(root)
        if os.fstat(fd).st_uid != me or (found is not None and not found.closable):
            return False
        names = set(os.listdir(root))
        if found is not None and any(not name.startswith(_FORMATS) for name in names):
            return False  # it is somebody's folder for other things, too
        reason = _doubts(layout)[:1]  # another process may have been faster
        if found is not None:
            trust.close_to_others(root)
        if reason and _is_empty(layout.home):
            trust.close_to_others(layout.home)
        elif reason and layout.home.name in names:
            aside = root / f"{FORMAT}{ASIDE}{time.time_ns()}-{os.getpid()}"
            os.rename(layout.home, aside)
            where, why = reason[0].path, reason[0].reason
            msg = "others could have written to the cache: %s: %s; it is moved to %s and begun anew"
            _log.warning(msg, where, why, aside)
        return not _doubts(layout)
    return False


def _is_empty(home: Path) -> bool:
    """Whether nobody has put anything into a version directory of this user."""
    found = trust.doubt(home)
    return (found is None or found.closable) and home.is_dir() and not os.listdir(home)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[int]:
    """A descriptor of a directory that one process has at a time, where locks work."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)
