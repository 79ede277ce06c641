"""What builds and loads kernels for the CPU of this machine."""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner import exc
from torch_pruner.codegen.build import team
from torch_pruner.codegen.build.load import Entry, load_entries, set_threads
from torch_pruner.compiler.executors import build_pool, release_later, release_needless
from torch_pruner.compiler.toolchain import NOTHING, Kept, Library, Toolchain
from torch_pruner.config import COMPILERS, c_compiler
from torch_pruner.graph.memory import CHECKSUMS, COPIES, LAUNCH, MASKS
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch_pruner.compiler.toolchain import Calls, Kernels
    from torch_pruner.graph.memory import Place
    from torch_pruner.target import TargetSpec

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class HostToolchain(Toolchain):
    """Shared libraries by TVM and a C compiler, run on the threads of ``openmp`` where there is
    one (``codegen/build/launch.py``), else on TVM's, as are those that cannot be linked.

    ``beside``: other processes may build for this one.
    """

    threads: int
    beside: bool = True
    openmp: team.OpenMP | None = None
    own: tuple[str, ...] = (*CHECKSUMS, COPIES)
    optional: tuple[str, ...] = (MASKS,)

    def prepare(self) -> None:
        set_threads(self.threads, self.openmp)

    def expect(self) -> None:
        if self.beside and "tvm" not in sys.modules and c_compiler() is not None:
            build_pool(self.threads)
            release_later()

    def settle(self) -> None:
        release_needless(self.threads)

    def build(
        self,
        kernels: Kernels,
        calls: Calls,
        slots: int,
        target: TargetSpec,
        kept: Kept = NOTHING,
        lines: Place | None = None,
    ) -> Library:
        if c_compiler() is not None:
            try:
                return self._linked(kernels, calls, slots, target, kept, lines)
            except OSError as err:
                log.info("kernels are built in memory, files cannot be written: %s", err)
        return self._in_memory(kernels, calls, slots, target)

    def _linked(
        self,
        kernels: Kernels,
        calls: Calls,
        slots: int,
        target: TargetSpec,
        kept: Kept,
        lines: Place | None,
    ) -> Library:
        from torch_pruner.compiler.building.library import build_library

        library = build_library(
            kernels, calls, slots, target, self.threads, kept, lines, beside=self.beside
        )

        numbers = itertools.count()  # two threads at once write two files

        def entries() -> tuple[Entry, ...]:
            path = library.folder / f"graph{next(numbers)}.so"
            library.link(path)
            return tuple(self.load(path, [*calls, *self.own]))

        return Library(entries, library.link, library)

    def _in_memory(self, kernels: Kernels, calls: Calls, slots: int, target: TargetSpec) -> Library:
        from torch_pruner.codegen.build.program import build_program

        library = build_program(kernels, calls, slots, target, self.threads)

        def entries() -> tuple[Entry, ...]:
            # LLVM makes machine code here, as it does once more to write it down.
            return tuple(library[name] for name in (*calls, *self.own))

        def unkept(path: Path) -> None:
            # It would have no ``LAUNCH``, and whoever loaded it took it for damaged.
            if c_compiler() is None:
                raise exc.CompileError.no_compiler("the kernel library", COMPILERS)
            raise exc.CompileError(
                "the kernel library", "it was built in memory, for want of files"
            )

        return Library(entries, unkept, library)

    def load(self, path: Path, names: Sequence[str]) -> list[Entry]:
        *entries, launch = load_entries(path, [*names, LAUNCH])
        if self.openmp is not None:
            team.join(launch)
        return entries
