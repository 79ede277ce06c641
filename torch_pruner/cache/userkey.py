"""The user's key, and which caches are his: what is kept outside of any cache.

In: nothing, or the version directory of a cache. Out: 32 random bytes that only this user can read,
and whether he made that directory. Both lie in the user's data directory. A user without one (an
unknown uid, no home, a home that cannot be written) has no key and no caches of his own.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import tempfile
from typing import TYPE_CHECKING, Final

import platformdirs

from torch_pruner import log
from torch_pruner.cache.files import FILE_MODE, read_bounded
from torch_pruner.cache.trust import doubt

if TYPE_CHECKING:
    from pathlib import Path

KEY_BYTES: Final = 32
NAME: Final = "signing.key"
_MOST_BYTES: Final = 4096
_CHECKSUM_DIGITS: Final = 16
_LINE_BYTES: Final = 2 * KEY_BYTES + 1 + _CHECKSUM_DIGITS + 1

_log = log.logger(__name__)


def directory() -> Path | None:
    """The directory of the key; None for a user without a home."""
    with contextlib.suppress(RuntimeError):  # platformdirs: the home directory is unknown
        path = platformdirs.user_data_path("torch_pruner", appauthor=False)
        if path.is_absolute():
            return path
    return None


def load(root: Path, *, create: bool) -> bytes | None:
    """The key for the cache at ``root``, made first if need be and ``create`` allows it."""
    where = directory()
    if where is None or where.is_relative_to(root):  # else it would be shipped with the cache
        return None
    path = where / NAME
    try:
        key = _read(path)
        if key is None and create:
            _write(path)
            key = _read(path)
    except OSError as err:
        _log.info("entries are not signed: %s", err)
        return None
    return key


def note_own(home: Path) -> None:
    """Remember that this user made the version directory ``home``."""
    if (path := _note_of(home)) is None:
        return
    with contextlib.suppress(OSError):
        os.makedirs(path.parent, mode=0o700, exist_ok=True)
        text = json.dumps({"path": str(home), "inode": os.lstat(home).st_ino})
        _publish(path, text.encode(), replace=True)


def is_own(home: Path) -> bool:
    """Whether this user made ``home``, and not only what lay there before."""
    if (path := _note_of(home)) is None:
        return False
    try:
        note = json.loads(read_bounded(path, _MOST_BYTES, follow=False))
        return bool(note["inode"] == os.lstat(home).st_ino)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _note_of(home: Path) -> Path | None:
    where = directory()
    if where is None:
        return None
    name = hashlib.sha256(os.fsencode(os.path.realpath(home))).hexdigest()
    return where / "caches" / f"{name[:32]}.json"


def _read(path: Path) -> bytes | None:
    """The key in a file; None where there is none that can be used.

    It is there twice, each time with a checksum, so that a flipped bit costs nothing.
    """
    try:
        data = read_bounded(path, _MOST_BYTES, follow=False)
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    if doubt(path) or found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        _log.warning("%s is not used to sign cache entries: others can read or write it", path)
        os.replace(path, f"{path}.unused")
        return None
    for start in (0, _LINE_BYTES):  # not by line ends, which may be what is damaged
        text = data[start : start + 2 * KEY_BYTES]
        checksum = data[start + len(text) + 1 : start + _LINE_BYTES - 1]
        if len(text) == 2 * KEY_BYTES and _checksum(text) == checksum:
            with contextlib.suppress(ValueError):
                return bytes.fromhex(text.decode("ascii", "replace"))
    _log.warning("%s is damaged: what it has signed is not known as this user's any more", path)
    os.replace(path, f"{path}.unused")
    return None


def _write(path: Path) -> None:
    """Make a key, unless another process is faster."""
    os.makedirs(path.parent, mode=0o700, exist_ok=True)
    text = secrets.token_hex(KEY_BYTES).encode()
    _publish(path, b"%s %s\n" % (text, _checksum(text)) * 2, replace=False)


def _publish(path: Path, data: bytes, *, replace: bool) -> None:
    """Put a file in place whole; without ``replace``, the first one stays."""
    fd, temp = tempfile.mkstemp(prefix=".tmp-", dir=path.parent)
    try:
        with open(fd, "wb") as file:
            os.fchmod(file.fileno(), FILE_MODE)
            file.write(data)
            file.flush()
            if not replace:
                os.fsync(file.fileno())
        if replace:
            os.replace(temp, path)
            return
        with contextlib.suppress(FileExistsError):
            os.link(temp, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)


def _checksum(text: bytes) -> bytes:
    return hashlib.sha256(text).hexdigest()[:_CHECKSUM_DIGITS].encode()
