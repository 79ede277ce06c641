"""Runs a static x86-64 program on Bochs' CPU, with the few calls of Linux that such ones make.

    python -m tests.emulation.bochs PROGRAM < input > output

The emulator is PyPI's bochscpu-python (0.4.0): a processor alone, without devices or firmware. The
program is laid into its memory in long mode, with everything allowed. Its system calls end in an
instruction that empties a line of the caches, for which the emulator calls back. It has one thread.

It knows AVX-512 with VNNI and BF16, and no AMX. One fault of its own: an eight-bit displacement of
``vdpbf16ps``'s operand in memory counts steps of 4 bytes instead of 64, so schedules of
``bf16_pairs`` whose panel lies on the stack come out wrong here.
"""

from __future__ import annotations

import ctypes
import importlib.util
import mmap
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

PAGE = 4096
MEMORY = 512 << 20  # bytes, of which those that are touched are there
TABLES, STUB, STACK, HEAP = 0x10000, 0x20000, 0x300000, 0x8000000
# Of PML4 and PDPT: present, writable; a gigabyte in one page.
_ENTRY, _LARGE = 3, 0x83
_CR0, _CR4, _EFER = 0x80050033, 0x50620, 0xD01  # long mode with vectors and xsave
_XCR0 = 0x600E7  # vectors of 512 bits, masks, tiles
_CODE, _DATA = 0xA09B, 0xC093

# The wheel makes a Cannon Lake and has no option for others that it knows; it wants two functions
# of a C library newer than Debian 12's. A library that is loaded before takes the place of both.
_MODEL, _OWN = "_Z28create_sapphire_rapids_cpuidP8BX_CPU_C", "_Z23create_corei3_cnl_cpuidP8BX_CPU_C"
_BEFORE = f"""
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
unsigned long long __isoc23_strtoull(const char *t, char **e, int b) {{ return strtoull(t, e, b); }}
int __isoc23_sscanf(const char *text, const char *format, ...) {{
  va_list given;
  va_start(given, format);
  int found = vsscanf(text, format, given);
  va_end(given);
  return found;
}}
void *(*model)(void *);
void *{_OWN}(void *cpu) {{ return model(cpu); }}
"""


def problem() -> str:
    """Why it does not run here; empty if it does."""
    missing = importlib.util.find_spec("bochscpu") is None
    return "bochscpu-python: not installed" if missing else ""


def _bochscpu() -> Any:
    """The emulator's module, for a Sapphire Rapids."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "before.c", Path(folder) / "before.so"
        source.write_text(_BEFORE)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
        before = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    import bochscpu
    import bochscpu.memory

    (path,) = Path(bochscpu.__file__).parent.glob("_bochscpu.*.so")
    model = ctypes.cast(getattr(ctypes.CDLL(str(path)), _MODEL), ctypes.c_void_p)
    ctypes.c_void_p.in_dll(before, "model").value = model.value
    return bochscpu


class Processor:
    """One program on its way."""

    def __init__(self, program: bytes) -> None:
        self.cpu = _bochscpu()
        self.memory = mmap.mmap(-1, MEMORY)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.heap, self.status, self.problem = HEAP, -1, ""
        self.session = self.cpu.Session()
        self.session.missing_page_handler = self._page
        self.hook = self.cpu.Hook()
        self.hook.clflush = lambda session, cpu, linear, physical: self._call()
        self.hook.exception = self._exception
        entry = self._load(program)
        self._start(entry)

    def run(self) -> int:
        self.session.run([self.hook])
        if self.problem:
            print(self.problem, file=sys.stderr)
        return self.status

    def _page(self, page: int) -> None:
        if page >= MEMORY:
            raise RuntimeError(f"no memory at {page:#x}")
        page -= page % PAGE
        self.cpu.memory.page_insert(page, self.address + page)

    def _exception(self, session: Any, cpu: int, vector: int, code: int) -> None:
        self.problem = f"exception {vector} ({code}) at {session.cpu.rip:#x}"
        self.status = 128 + vector
        session.stop()

    def _load(self, program: bytes) -> int:
        """Segments, page tables, the stub of system calls; where the program begins."""
        (entry, headers) = struct.unpack_from("<QQ", program, 24)
        size, count = struct.unpack_from("<HH", program, 54)
        self.auxiliary = [(3, 0x400000 + headers), (4, size), (5, count), (6, PAGE), (9, entry)]
        for k in range(count):
            kind, _, at, where, _, filed, _, _ = struct.unpack_from(
                "<IIQQQQQQ", program, headers + k * size
            )
            if kind == 1:  # PT_LOAD
                self.memory[where : where + filed] = program[at : at + filed]
        struct.pack_into("<Q", self.memory, TABLES, TABLES + PAGE | _ENTRY)
        for k in range(4):
            struct.pack_into("<Q", self.memory, TABLES + PAGE + 8 * k, k << 30 | _LARGE)
        stub = bytes.fromhex("0fae3c24 ffe1")  # clflush [rsp]; jmp rcx
        self.memory[STUB : STUB + len(stub)] = stub
        return entry

    def _start(self, entry: int) -> None:
        state = self.cpu.State()
        state.cr0, state.cr4, state.efer, state.xcr0 = _CR0, _CR4, _EFER, _XCR0
        state.cr3, state.rip, state.rsp = TABLES, entry, self._stack()
        state.lstar, state.star, state.sfmask = STUB, 8 << 32, 0
        state.rflags, state.mxcsr, state.mxcsr_mask = 2, 0x1F80, 0xFFFF
        state.fpcw, state.fptw = 0x37F, 0xFFFF
        for name in ("cs", "ss", "ds", "es", "fs", "gs"):
            segment = self.cpu.Segment()
            segment.present, segment.selector = True, 8 if name == "cs" else 16
            segment.base, segment.limit = 0, 0xFFFFFFFF
            segment.attr = _CODE if name == "cs" else _DATA
            setattr(state, name, segment)
        self.session.cpu.state = state

    def _stack(self) -> int:
        """The top of the stack as Linux hands it over: arguments, environment, auxiliary vector."""
        self.memory[STACK : STACK + 16] = b"emulated emulate"
        words = [1, STACK, 0, 0]
        for key, value in [*self.auxiliary, (25, STACK), (0, 0)]:
            words += [key, value]
        top = STACK - 4096
        struct.pack_into(f"<{len(words)}Q", self.memory, top, *words)
        return top

    def _call(self) -> None:
        cpu = self.session.cpu
        number, given = cpu.rax, (cpu.rdi, cpu.rsi, cpu.rdx)
        cpu.rax = self._system(number, *given) & (2**64 - 1)

    def _system(self, number: int, a: int, b: int, c: int) -> int:
        """A system call; -38 (ENOSYS) for those that programs do without."""
        if number == 0:  # read
            data = os.read(a, c)
            self.memory[b : b + len(data)] = data
            return len(data)
        if number == 1:  # write
            return os.write(a, self.memory[b : b + c])
        if number == 20:  # writev
            parts = [struct.unpack_from("<QQ", self.memory, b + 16 * k) for k in range(c)]
            return sum(os.write(a, self.memory[at : at + n]) for at, n in parts)
        if number == 12:  # brk
            self.heap = a or self.heap
            return self.heap
        if number == 158 and a == 0x1002:  # arch_prctl, ARCH_SET_FS
            segment = self.session.cpu.fs
            segment.base = b
            self.session.cpu.fs = segment
            return 0
        if number == 10:  # mprotect
            return 0
        if number in (60, 231):  # exit
            self.status = a & 255
            self.session.stop()
            return 0
        return -38


def main(arguments: list[str]) -> NoReturn:
    status = Processor(Path(arguments[0]).read_bytes()).run()
    sys.stdout.flush()
    os._exit(status)  # the emulator ends no thread of its own


if __name__ == "__main__":
    main(sys.argv[1:])
