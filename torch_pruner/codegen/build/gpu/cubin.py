"""What a cubin says of its kernels: registers, and memory of a thread that the assembler gave it.

An ELF file; section ``.nv.info`` has records of a format, an attribute, and a value or bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_SECTION = struct.Struct("<IIQQQQIIQQ")
_SIZED = 4  # format of a record with bytes, whose number it says
_FRAME, _REGISTERS = 0x11, 0x2F
_PAIR = struct.Struct("<II")


@dataclass(frozen=True, slots=True)
class Uses:
    """The most of any kernel in a file. ``frame_bytes``: spilled registers, and arrays."""

    registers: int
    frame_bytes: int


def uses(image: bytes) -> Uses:
    """Raises ``ValueError`` where the file does not say it."""
    try:
        return _uses(image)
    except (struct.error, IndexError, OverflowError) as err:
        raise ValueError(f"a damaged ELF file: {err}") from err


def _uses(image: bytes) -> Uses:
    if not image.startswith(b"\x7fELF\x02"):
        raise ValueError("no ELF file of 64 bits")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    size, count, names = struct.unpack_from("<HHH", image, 0x3A)
    sections = [_SECTION.unpack_from(image, table + k * size) for k in range(count)]
    found: dict[int, list[int]] = {_FRAME: [], _REGISTERS: []}
    for name, _, _, _, offset, length, *_ in sections:
        start = sections[names][4] + name
        if image[start : image.index(b"\0", start)] == b".nv.info":
            _read(image[offset : offset + length], found)
    if not found[_REGISTERS]:
        raise ValueError("registers are not said")
    return Uses(max(found[_REGISTERS]), max(found[_FRAME], default=0))


def _read(data: bytes, found: dict[int, list[int]]) -> None:
    at = 0
    while at + 4 <= len(data):
        kind, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind == _SIZED:
            if attribute in found and value == _PAIR.size:
                found[attribute].append(_PAIR.unpack_from(data, at)[1])
            at += value
