"""Whether what lies in a cache directory can only have come from its user, or from root.

In: paths. Out: the reasons against it. Nothing is followed: what a link points to is somebody
else's choice.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
JOURNALS: Final = ("-wal", "-shm", "-journal")


@dataclass(frozen=True, slots=True)
class Doubt:
    """One thing that others can have changed. ``closable``: by its permissions alone."""

    path: Path
    reason: str
    closable: bool = False


def doubt(path: Path) -> Doubt | None:
    """The reason not to trust ``path``; None if there is none, or nothing is there."""
    try:
        return doubt_of(path, os.lstat(path))
    except FileNotFoundError:
        return None


def doubt_of(path: Path, found: os.stat_result) -> Doubt | None:
    """The reason not to trust ``path``, whose status is ``found``; None if there is none."""
    if stat.S_ISLNK(found.st_mode):
        return Doubt(path, "it is a symbolic link, and none is followed there")
    if not (stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode)):
        return Doubt(path, "it is neither a directory nor a regular file")
    me = os.geteuid()
    if found.st_uid not in (me, 0):
        return Doubt(path, f"it belongs to user {found.st_uid}, and this process runs as user {me}")
    if found.st_mode & _OTHERS_WRITE:
        return Doubt(path, "its group or every user of this machine can write to it", closable=True)
    return None


def doubts(home: Path, *, index: Path, blobs: Path, locks: Path) -> Iterator[Doubt]:
    """The reasons not to trust a cache's version directory, the outermost first."""
    if found := doubt(home):
        yield found
        return
    files = [index, *(index.with_name(f"{index.name}{suffix}") for suffix in JOURNALS)]
    for path in (blobs, locks, home / "models", *files):
        if found := doubt(path):
            yield found
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(blobs) as entries:
        for entry in entries:
            if found := doubt_of(blobs / entry.name, entry.stat(follow_symlinks=False)):
                yield found


def close_to_others(path: Path) -> None:
    """Take the permission to write from all but the owner. Raises OSError, also for a link."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) & ~_OTHERS_WRITE)
    finally:
        os.close(fd)
