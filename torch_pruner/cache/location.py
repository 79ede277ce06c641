"""Where the cache is, and whether this process may use it.

In: a directory or nothing. Out: a directory with our layout, private to its user, and whether it
can be written. A directory that another user could have filled is refused, because libraries are
loaded from it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from torch_pruner import exc

FORMAT = "v1"
DIR_MODE = 0o700
FILE_MODE = 0o600

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

    Raises OSError when there is nothing to use, CacheDirectoryError when another user owns it.
    """
    if not read_only:
        try:
            os.makedirs(layout.root.parent, exist_ok=True)
            for path in (layout.root, layout.home, layout.blobs, layout.locks):
                make_private(path)
        except OSError:
            if not layout.home.is_dir():
                raise
    _refuse_others(layout.root)
    _refuse_others(layout.home)
    if read_only or not _writable(layout):
        os.listdir(layout.home)
        return False
    _close_to_others(layout.home)
    return True


def make_private(path: Path) -> None:
    """Make one directory that only its user may enter, unless it is there."""
    try:
        os.mkdir(path, DIR_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise NotADirectoryError(f"not a directory: {path}") from None


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


def _refuse_others(path: Path) -> None:
    found = os.stat(path)
    if found.st_uid in (os.geteuid(), 0):
        foreign = found.st_uid != os.geteuid()
        if not (foreign and path.name == FORMAT and found.st_mode & stat.S_IWOTH):
            return
        raise exc.CacheDirectoryError(path, "every user of this machine can write to it")
    raise exc.CacheDirectoryError(
        path, f"it belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    )


def _close_to_others(path: Path) -> None:
    found = os.stat(path)
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and found.st_uid == os.geteuid():
        os.chmod(path, found.st_mode & ~(stat.S_IWGRP | stat.S_IWOTH) & 0o777)
