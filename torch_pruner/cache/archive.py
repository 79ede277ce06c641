"""Zip archives from anywhere, read with bounds: no member is unpacked to a path, or beyond a size.

Whatever is wrong with one is an ``IncompatibleBundle`` that says what.
"""

from __future__ import annotations

import contextlib
import hashlib
import zipfile
import zlib
from typing import TYPE_CHECKING, NoReturn

from torch_pruner import exc

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_BYTES = 4 << 30  # that all members may unpack to
MAX_TEXT_BYTES = 256 << 20  # of a member that is parsed
MAX_MEMBERS = 20_000
_CHUNK = 1 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal contents give equal files


@contextlib.contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """A zip archive, in which whatever zipfile stumbles over means that it is damaged."""
    try:
        if path.stat().st_size > MAX_BYTES:
            refuse(path, f"it is larger than {MAX_BYTES >> 30} GiB")
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            if len(members) > MAX_MEMBERS or sum(m.file_size for m in members) > MAX_BYTES:
                most = f"{MAX_BYTES >> 30} GiB or {MAX_MEMBERS} members"
                refuse(path, f"it unpacks to more than {most}")
            yield archive
    except OSError as err:
        if isinstance(err, FileNotFoundError | PermissionError | IsADirectoryError):
            refuse(path, err.strerror or str(err), "check the path")
        refuse(path, f"it cannot be read: {err}")
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as err:
        refuse(path, f"it is damaged or no bundle: {err}")


def bounded(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a member about which nothing is known yet."""
    if archive.getinfo(name).file_size > MAX_TEXT_BYTES:
        refuse(path, f"{name} is larger than {MAX_TEXT_BYTES >> 20} MiB")
    with archive.open(name) as member:
        return member.read(MAX_TEXT_BYTES)


def member_of(
    path: Path, archive: zipfile.ZipFile, name: str, expected: tuple[str, int], *, parsed: bool
) -> bytes:
    """The bytes of a member that has to have this (sha256, size)."""
    limit = expected[1]
    if parsed and limit > MAX_TEXT_BYTES:
        refuse(path, f"{name} is larger than {MAX_TEXT_BYTES >> 20} MiB")
    with archive.open(name) as member:
        data = member.read(limit + 1)
    if (hashlib.sha256(data).hexdigest(), len(data)) != expected:
        refuse(path, f"{name} is not what the manifest says")
    return data


def hash_member(path: Path, archive: zipfile.ZipFile, name: str, expected: tuple[str, int]) -> None:
    hasher, size = hashlib.sha256(), 0
    with archive.open(name) as member:
        while size <= expected[1] and (chunk := member.read(_CHUNK)):
            hasher.update(chunk)
            size += len(chunk)
    if (hasher.hexdigest(), size) != expected:
        refuse(path, f"{name} is not what the manifest says")


def refuse(path: Path, reason: str, fix: str = "") -> NoReturn:
    raise exc.IncompatibleBundle(path, reason, fix) from None


def write(archive: zipfile.ZipFile, name: str, data: bytes) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.external_attr = 0o644 << 16
    archive.writestr(info, data)
