"""Copies of libraries whose ``CPUID`` instructions are ones that fault on every processor.

For processors that cannot be told to make ``CPUID`` itself fault (AMD's before Zen 5, and virtual
machines that do not pass it on). In: files. Out: a copy of each that executes ``CPUID``, with
``MARK`` at each place of one, which ``hide.c`` answers. Places come from a disassembly by objdump
(GNU binutils), never from a search of bytes alone: the same two bytes are part of other
instructions thousands of times in a large library.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

CPUID = b"\x0f\xa2"
#: A byte without a meaning in 64-bit code, so that it faults, and one that tells it from others.
MARK = b"\xd6\xa2"
_SECTION = re.compile(r"^\s*\d+ (\S+)\s+([0-9a-f]+)\s+([0-9a-f]+)\s+[0-9a-f]+\s+([0-9a-f]+)\s")
_PLACE = re.compile(r"^\s*([0-9a-f]+):\s+cpuid\b")

Section = tuple[int, int, int]


def sections(headers: str) -> list[Section]:
    """Address, size and offset in the file of each section, from ``objdump --section-headers``."""
    found = (_SECTION.match(line) for line in headers.splitlines())
    return [(int(m[3], 16), int(m[2], 16), int(m[4], 16)) for m in found if m]


def places(listing: Iterable[str], where: list[Section]) -> list[int]:
    """Offsets in the file of the ``cpuid`` in a disassembly's lines."""
    offsets = []
    for line in listing:
        if match := _PLACE.match(line):
            address = int(match[1], 16)
            inside = (s for s in where if s[0] <= address < s[0] + s[1])
            offsets += [at + address - start for start, _, at in inside][:1]
    return offsets


def marked(content: bytes, offsets: list[int]) -> bytes:
    """``content`` with ``MARK`` at ``offsets``. Raises ``ValueError`` where one is no ``CPUID``."""
    changed = bytearray(content)
    for offset in offsets:
        if changed[offset : offset + 2] != CPUID:
            raise ValueError(f"no CPUID at {offset:#x}")
        changed[offset : offset + 2] = MARK
    return bytes(changed)


def _begins(file: Path) -> bytes:
    with file.open("rb") as content:
        return content.read(4)


def _lines(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _places_in(file: Path, objdump: str, grep: str) -> list[int]:
    where = sections(_lines([objdump, "--section-headers", str(file)]))
    listing = [objdump, "--disassemble", "--no-show-raw-insn", str(file)]
    # The listing of a large library has a hundred million lines: none of Python's business.
    with subprocess.Popen(listing, stdout=subprocess.PIPE) as whole:
        found = subprocess.run([grep, "cpuid"], stdin=whole.stdout, capture_output=True, text=True)
    if whole.returncode != 0 or found.returncode > 1:
        raise RuntimeError(f"{file.name} could not be disassembled")
    return places(found.stdout.splitlines(), where)


def copies(files: Iterable[Path], folder: Path) -> list[tuple[Path, Path]]:
    """A patched copy in ``folder`` of each of ``files`` that executes ``CPUID``.

    Returns pairs of copy and original. Copies that ``folder`` has of a file as it is now (its path,
    size and time) are taken as they are. Raises ``RuntimeError`` without objdump and grep.
    """
    objdump, grep = shutil.which("objdump"), shutil.which("grep")
    if objdump is None or grep is None:
        raise RuntimeError("it takes objdump of GNU binutils, and grep")

    def one(file: Path) -> tuple[Path, Path] | None:
        state = file.stat()
        above = zlib.crc32(str(file.parent).encode())
        name = f"{file.name}-{above:08x}-{state.st_size}-{state.st_mtime_ns}"
        copy, without = folder / name, folder / f"{name}.without"
        if without.exists():
            return None
        if not copy.exists():
            content = file.read_bytes()
            offsets = _places_in(file, objdump, grep) if CPUID in content else []
            if not offsets:
                without.touch()
                return None
            being = copy.with_suffix(".being-written")
            being.write_bytes(marked(content, offsets))
            being.chmod(file.stat().st_mode)
            being.rename(copy)
        return copy, file

    with ThreadPoolExecutor(2) as pool:
        return [pair for pair in pool.map(one, files) if pair]


def executing(folder: Path, commands: Iterable[str]) -> list[Path]:
    """Shared libraries below ``folder`` and the programs ``commands``: files, each once."""
    programs = (shutil.which(command) for command in commands)
    files = [*folder.rglob("*.so"), *folder.rglob("*.so.*"), *(Path(p) for p in programs if p)]
    found = {file.resolve() for file in files if file.is_file()}
    elf = [file for file in found if _begins(file) == b"\x7fELF"]
    # What runs on graphics cards asks the processor nothing, and is large.
    return sorted(file for file in elf if not {"nvidia", "triton"} & set(file.parts))
