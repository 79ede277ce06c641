from __future__ import annotations

import pytest

from benchmarks.isa.patched import CPUID, MARK, copies, marked, places, sections

HEADERS = """
libthing.so:     file format elf64-x86-64

Sections:
Idx Name          Size      VMA               LMA               File off  Algn
  8 .plt          00000010  0000000000001000  0000000000001000  00000400  2**4
                  CONTENTS, ALLOC, LOAD, READONLY, CODE
 11 .text         00000020  0000000000002000  0000000000002000  00000a00  2**4
                  CONTENTS, ALLOC, LOAD, READONLY, CODE
"""
LISTING = """
0000000000002000 <has_cpuid>:
    2000:\tpush   %rbx
    2001:\tmov    $0xa20f,%eax
    2006:\tcpuid
    2008:\tcall   2000 <has_cpuid>
    1004:\tcpuid
""".splitlines()


def test_addresses_become_offsets_in_the_file() -> None:
    where = sections(HEADERS)
    assert where == [(0x1000, 0x10, 0x400), (0x2000, 0x20, 0xA00)]
    assert places(LISTING, where) == [0xA06, 0x404]
    assert places(["    9000:\tcpuid"], where) == []


def test_only_instructions_are_marked() -> None:
    content = b"\x53" + CPUID + b"\xb8" + CPUID + b"\x00\x00"
    assert marked(content, [1]) == b"\x53" + MARK + b"\xb8" + CPUID + b"\x00\x00"
    with pytest.raises(ValueError, match="no CPUID at 0x2"):
        marked(content, [2])


def test_files_without_the_instruction_are_not_copied(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.isa.patched.shutil.which", lambda name: f"/no/{name}")
    plain = tmp_path / "plain.so"
    plain.write_bytes(b"\x7fELF" + bytes(64))
    kept = tmp_path / "kept"
    kept.mkdir()
    assert copies([plain], kept) == []
    assert copies([plain], kept) == []


def test_it_says_what_is_missing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.isa.patched.shutil.which", lambda name: None)
    with pytest.raises(RuntimeError, match="objdump"):
        copies([tmp_path / "any.so"], tmp_path)
