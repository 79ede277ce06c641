"""Zip archives from anywhere, read with bounds: no member is unpacked to a path, or beyond a size.

Whatever is wrong with one is an ``IncompatibleBundle`` that says what.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from torch_pruner import exc
from torch_pruner.cache.files import open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MAX_BYTES = 4 << 30  # that all members may unpack to
MAX_TEXT_BYTES = 128 << 20  # of a member that is parsed
MAX_MANIFEST_BYTES = 16 << 20
MAX_MEMBERS = 20_000
MAX_VALUES = 4_000_000  # that the members that are parsed may hold together
_CHUNK = 1 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # equal contents give equal files
_END, _END_64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_HEADER_BYTES = 46 + 256  # of a member in the directory: its fixed part, a name, what is extra
_FAULTS = (
    *(zipfile.BadZipFile, zlib.error, struct.error, EOFError, NotImplementedError),
    *(RuntimeError, ValueError, OverflowError),
)


@contextlib.contextmanager
def opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """A zip archive, in which whatever zipfile stumbles over means that it is damaged.

    It is a regular file, of a bounded size, with a bounded number of members of a bounded size:
    all of that is known before its directory is parsed.
    """
    try:
        with open(open_regular(path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_BYTES:
                refuse(path, f"it is larger than {MAX_BYTES >> 30} GiB")
            _check_directory(path, file, size)
            with zipfile.ZipFile(file) as archive:
                _check_members(path, archive.infolist())
                yield archive
    except OSError as err:
        if isinstance(err, FileNotFoundError | PermissionError | IsADirectoryError):
            refuse(path, err.strerror or str(err), "check the path")
        refuse(path, f"it cannot be read: {err.strerror or err}")
    except _FAULTS as err:
        refuse(path, f"it is damaged or no bundle: {err}")


def _check_directory(path: Path, file: BinaryIO, size: int) -> None:
    """Refuse a directory that is larger than any that a bundle has, by what its end says."""
    tail_bytes = min(size, _END_64.size + _LOCATOR.size + _END.size)
    file.seek(size - tail_bytes)
    tail = file.read(tail_bytes)
    if len(tail) < _END.size or tail[-_END.size :][:4] != b"PK\5\6" or tail[-2:] != b"\0\0":
        refuse(path, "it is damaged or no bundle: its end is not that of a zip archive")
    _, _, _, _, members, length, _, _ = _END.unpack(tail[-_END.size :])
    before, end = tail[: -_END.size], _END.size
    if before[-_LOCATOR.size :][:4] == b"PK\6\7" and len(before) == _END_64.size + _LOCATOR.size:
        large = _END_64.unpack(before[: _END_64.size])
        members, length, end = max(members, large[7]), max(length, large[8]), tail_bytes
    if members <= MAX_MEMBERS and length <= MAX_MEMBERS * _HEADER_BYTES:
        file.seek(max(0, size - end - length))
        members = file.read(length).count(b"PK\1\2")  # each has this before it
    if members > MAX_MEMBERS or length > MAX_MEMBERS * _HEADER_BYTES:
        refuse(path, f"it unpacks to more than {_most()}")


def _check_members(path: Path, members: list[zipfile.ZipInfo]) -> None:
    if len(members) > MAX_MEMBERS or sum(m.file_size for m in members) > MAX_BYTES:
        refuse(path, f"it unpacks to more than {_most()}")
    for member in members:
        plain = member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if not plain or member.flag_bits & 1:
            refuse(path, f"{member.filename!r} is packed as no bundle is")


def _most() -> str:
    return f"{MAX_BYTES >> 30} GiB or {MAX_MEMBERS} members"


def bounded(path: Path, archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a member about which nothing is known yet."""
    with archive.open(name) as member:
        data = member.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        refuse(path, f"{name} is larger than {MAX_MANIFEST_BYTES >> 20} MiB")
    return data


def values_in(data: bytes) -> int:
    """At most how many values JSON text holds: each but the first follows one of these."""
    return sum(map(data.count, (b"[", b"{", b",", b":", b"\n")))


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
