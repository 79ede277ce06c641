"""A block of a GPU's threads on the CPU: compiles what ``text`` makes, and launches it on arrays.

What is watched and which orders of threads there are: ``threads.h`` and ``memory.h``. A launch that
does what no card promises raises ``Fault``.
"""

from __future__ import annotations

import ctypes
import platform
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tests.gpu.emulator.text import alignment, clusters, translated
from torch_pruner.codegen.build.lower import aligned

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.families.kernels import Array
    from torch_pruner.codegen.build.gpu.image import Launch
    from torch_pruner.codegen.parts.kernel import ScheduledKernel

HERE = Path(__file__).parent
COMPILER = "g++"
SCHEDULES = ("in order", "reversed", "random", "one warp ahead", "one warp behind")
FLAGS = [
    "-x", "c++", "-std=c++17", "-O0", "-march=native", "-fPIC", "-shared", "-w",
    "-fno-strict-aliasing", "-fno-exceptions", "-fvisibility=hidden", "-U_FORTIFY_SOURCE",
    "-ftrivial-auto-var-init=pattern",
]  # fmt: skip


class Fault(Exception):
    """A kernel has done what no card promises to do well."""


def problem() -> str:
    """Why nothing can be run here; empty if it can."""
    if platform.machine() != "x86_64":
        return "half precision is a type of g++ on x86 only"
    return "" if shutil.which(COMPILER) else f"{COMPILER} is not installed"


class _Region(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("size", ctypes.c_longlong),
        ("name", ctypes.c_char_p),
        ("touched", ctypes.c_void_p),
        ("writable", ctypes.c_int),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("blocks", "copies", "threads", "shared_bytes")),
        *((name, ctypes.c_int) for name in ("schedule", "late", "has_dependency")),
        *((name, ctypes.c_int) for name in ("left_out", "more", "shared_base", "cluster")),
        ("seed", ctypes.c_ulonglong),
    )


@dataclass(frozen=True, slots=True)
class Order:
    """In which order threads run, and whether copies land when they are waited for or at once.

    To see whether a mistake would be found: ``left_out`` is the line of a barrier that is not
    there, and waits for copies leave ``more`` groups on their way than they say.
    """

    schedule: str = "random"
    late: bool = True
    seed: int = 0
    left_out: int = 0
    more: int = 0


ORDERS = [Order(s, late) for s in SCHEDULES for late in (True, False)]


@dataclass(frozen=True, slots=True)
class Memory:
    """A buffer of a launch: its first byte, how many there are, whether a kernel may write."""

    address: int
    nbytes: int
    name: str
    writable: bool


class Text(NamedTuple):
    """What ``cuda_source`` gives."""

    source: str
    launches: Mapping[str, Launch]

    def lines(self, symbol: str) -> dict[int, str]:
        """The lines of a kernel, by number."""
        lines = self.source.split("\n")
        head = re.compile(rf'extern "C" __global__ .*\b{symbol}\(.*\{{$')
        first = next(n for n, line in enumerate(lines) if head.match(line))
        end = next(n for n in range(first, len(lines)) if lines[n] == "}")
        return {n + 1: lines[n] for n in range(first, end)}


class Kernels:
    """The launches of several texts, compiled together."""

    def __init__(self, texts: Sequence[Text], arch: str) -> None:
        """Raises ``ValueError`` for instructions that are not known, and with a compiler's log."""
        self._launches = [{u.symbol: u for u in text.launches.values()} for text in texts]
        self._dependent = ["griddepcontrol.wait" in text.source for text in texts]
        self._aligned = [alignment(text.source) for text in texts]
        self._clusters = [clusters(text.source) for text in texts]
        parts = [translated(*text, n) for n, text in enumerate(texts)]
        with tempfile.TemporaryDirectory(prefix="torch_pruner-emulator-") as folder:
            made, library = Path(folder, "texts.cc"), Path(folder, "kernels.so")
            made.write_text("".join(['#include "machine.h"\n', *parts]))
            capability = "".join(c for c in arch if c.isdigit())
            command = [COMPILER, *FLAGS, f"-D__CUDA_ARCH__={capability}0", f"-I{HERE}"]
            command += ["-o", str(library), str(made)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ValueError(done.stderr[:8000])
            self._library = ctypes.CDLL(str(library))
        self._library.emulator_run.restype = ctypes.c_char_p

    def launch(
        self, symbol: str, given: Sequence[Memory], order: Order | None = None, text: int = 0
    ) -> None:
        """Run all blocks of a launch; ``given`` are its parameters. Raises ``Fault``."""
        order, launch = order or Order(), self._launches[text][symbol]
        _apart(given)
        touched = [np.zeros((m.nbytes, 2), np.uint32) if m.writable else None for m in given]
        regions = (_Region * len(given))(
            *(
                _Region(
                    m.address,
                    m.nbytes,
                    m.name.encode(),
                    None if t is None else t.ctypes.data,
                    m.writable,
                )
                for m, t in zip(given, touched, strict=True)
            )
        )
        how = _Launch(
            launch.blocks, launch.copies, launch.threads, launch.shared_bytes,
            SCHEDULES.index(order.schedule), order.late, self._dependent[text],
            order.left_out, order.more, self._aligned[text],
            self._clusters[text][symbol], order.seed,
        )  # fmt: skip
        function = getattr(self._library, f"call_{text}_{symbol}")
        wrong = self._library.emulator_run(function, regions, ctypes.byref(how))
        if wrong:
            raise Fault(f"{symbol}, {order}: {wrong.decode(errors='replace')}")


def _apart(given: Sequence[Memory]) -> None:
    """Parameters are ``__restrict__``: what one of them writes no other one has."""
    for k, one in enumerate(given):
        for other in given[k + 1 :]:
            meet = one.address < other.address + other.nbytes
            meet = meet and other.address < one.address + one.nbytes
            if meet and (one.writable or other.writable) and one.nbytes and other.nbytes:
                raise Fault(f"{one.name} and {other.name} share memory, and one is written")


def ran(
    kernels: Kernels,
    launches: Sequence[Launch],
    kernel: ScheduledKernel,
    arrays: Sequence[Array],
    order: Order,
    text: int = 0,
    *,
    outputs: list[Array],
) -> list[Array]:
    """``outputs`` of a kernel, all of whose launches are run on inputs that nobody has packed.

    Raises ``Fault``.
    """
    held, memory = [], []
    for k, (array, pack) in enumerate(zip(arrays, kernel.packs, strict=True)):
        array = array if pack is None else pack.pack(array)
        held.append(aligned(array.shape, str(array.dtype)))
        held[-1][...] = array
        memory.append(Memory(held[-1].ctypes.data, held[-1].nbytes, f"input {k}", False))
    scratch = [aligned((s.nbytes,), "uint8") for s in kernel.scratch]
    for array in scratch:  # what is not written is NaN
        array[...] = 0xFF
    for k, array in enumerate([*outputs, *scratch]):
        name = f"output {k}" if k < len(outputs) else f"scratch {k - len(outputs)}"
        memory.append(Memory(array.ctypes.data, array.nbytes, name, True))
    for launch in launches:
        kernels.launch(launch.symbol, [memory[p] for p in launch.parameters], order, text)
    return outputs
