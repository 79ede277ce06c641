"""Files from places that others may have filled, and files that appear whole or not at all.

In: paths. Out: descriptors of files whose kind, and where it counts whose owner, was checked on the
descriptor itself, so that nothing can be put in its place in between: regular ones only, and
opening never waits.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


FILE_MODE: Final = 0o600
TEMPORARY: Final = ".tmp-"  # what the names of files begin with that are not whole yet


@contextlib.contextmanager
def written_whole(path: Path, *, mode: int = FILE_MODE) -> Iterator[IO[bytes]]:
    """A file to write to, which replaces what is at ``path`` when it is whole and on the disk.

    Where writing fails, ``path`` is as it was and nothing is left. Raises OSError.
    """
    fd, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
    with contextlib.ExitStack() as unless_whole:
        unless_whole.callback(_removed, temporary)
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
        unless_whole.pop_all()


def _removed(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> int:
    """A descriptor to read a regular file by. Raises OSError for a pipe, a device or a directory,
    and without ``follow`` for a link."""
    # Without O_NONBLOCK, opening a pipe waits for somebody who writes.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
    try:
        fd = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except ValueError as err:  # a NUL in the name
        raise OSError(errno.EINVAL, str(err), os.fspath(path)) from err
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    return fd


def no_link(path: Path) -> Path:
    """``path``. Raises OSError where a link lies there."""
    if os.path.islink(path):
        raise OSError(errno.ELOOP, "a symbolic link lies where a file should", str(path))
    return path


def read_bounded(path: Path, most: int, *, follow: bool = True) -> bytes:
    """The bytes of a regular file. Raises OSError, also for one that has more than ``most``."""
    with open(open_regular(path, follow=follow), "rb") as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OSError(errno.EFBIG, f"it has more than {most} bytes", os.fspath(path))
    return data
