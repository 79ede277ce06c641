"""Processors that this one is not: what code for them is built with, and what runs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulation import bochs
from torch_pruner.target import TargetSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.graph.signature import BufferSpec

DRIVER = Path(__file__).with_name("driver.c")
THREADS = 2
LIMIT_S = 120.0  # of one kernel, emulated


@dataclass(frozen=True, slots=True)
class Machine:
    """A processor, and how its code runs here.

    ``target``: what code is generated for, as users write it. ``compiler``: what links it with the
    driver. ``emulator``: the command that runs the result.
    """

    name: str
    target: Mapping[str, Any]
    compiler: str
    emulator: tuple[str, ...]
    threads: int = 2  # at once; kernels are for two

    def spec(self) -> TargetSpec:
        return TargetSpec.from_dict(self.target, THREADS)

    def problem(self) -> str:
        """Why nothing runs on it here; empty if it does."""
        tools = [self.compiler, self.emulator[0]]
        missing = [tool for tool in tools if shutil.which(tool) is None]
        if missing:
            return f"{', '.join(missing)}: not installed"
        return bochs.problem() if self.emulator[0] == sys.executable else ""

    def link(self, objects: Sequence[Path], entries: Sequence[str], folder: Path) -> Path:
        """The driver with ``objects``, whose functions ``entries`` it calls by number."""
        names = [f"__tvm_ffi_{entry}" for entry in entries]
        declared = "".join(f"int {name}(void *, const void *, int, void *);\n" for name in names)
        table = folder / "entries.c"
        table.write_text(f"{declared}void *const entries[] = {{{', '.join(names)}}};\n")
        program = folder / "program"
        command = [
            self.compiler, "-O1", "-static", f"-DTHREADS={self.threads}", "-o", str(program),
            str(DRIVER), str(table), *map(str, objects), "-lm", "-lpthread",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return program

    def run(
        self, program: Path, entry: int, buffers: Sequence[BufferSpec], given: Sequence[Any]
    ) -> list[Any]:
        """Every buffer after a call; the first ones are ``given``, the others hold garbage.

        Raises ``AssertionError`` for a crash, and for what was written outside of buffers or to
        inputs that nothing says are written.
        """
        sizes = [(b.nbytes, int(i < len(given))) for i, b in enumerate(buffers)]
        head = np.array([entry, len(buffers), *np.ravel(sizes)], np.int64).tobytes()
        sent = head + b"".join(array.tobytes() for array in given)
        command = [*self.emulator, str(program)]
        done = subprocess.run(
            command, input=sent, capture_output=True, check=False, timeout=LIMIT_S
        )
        said = done.stderr.decode(errors="replace")
        assert done.returncode == 0, f"ended with {done.returncode}: {said[-500:]}"
        return _arrays(done.stdout, buffers)


def _arrays(data: bytes, buffers: Sequence[BufferSpec]) -> list[Any]:
    from torch_pruner.codegen.build.lower import numpy_dtype

    found, at = [], 0
    for buffer in buffers:
        assert data[at : at + 8] == b"\1" + b"\0" * 7, "a store outside of a buffer"
        count = int(np.prod(buffer.shape, dtype=np.int64))
        array = np.frombuffer(data, numpy_dtype(buffer.dtype), count, at + 8)
        found.append(array.reshape(buffer.shape))
        at += 8 + buffer.nbytes
    assert at == len(data)
    return found


def _arm(name: str, *features: str) -> Machine:
    target = {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mattr": [*features]}
    if not features:
        del target["mattr"]
    return Machine(name, target, "aarch64-linux-gnu-gcc", ("qemu-aarch64", "-cpu", "max"))


def _x86(name: str, mcpu: str) -> Machine:
    emulator = (sys.executable, "-m", "tests.emulation.bochs")
    return Machine(name, {"kind": "llvm", "mcpu": mcpu}, "gcc", emulator, threads=1)


_RISCV = Machine(
    "riscv64",
    {
        "kind": "llvm",
        "mtriple": "riscv64-unknown-linux-gnu",
        "mattr": ["+m", "+a", "+f", "+d", "+c", "+v"],
    },
    "riscv64-linux-gnu-gcc",
    ("qemu-riscv64", "-cpu", "rv64,v=true,vext_spec=v1.0,vlen=128"),
)
MACHINES = {
    m.name: m
    for m in (
        _arm("neon"),
        _arm("neon-dotprod", "+dotprod"),
        _arm("sve", "+sve"),
        _x86("skylake-avx512", "skylake-avx512"),
        _x86("znver4", "znver4"),
        _RISCV,
    )
}
