"""What builds and loads kernels for the CPU of this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.build.load import Entry, load_entries, set_threads
from torch_pruner.compiler.toolchain import Library, Toolchain
from torch_pruner.graph.memory import CHECKSUMS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch_pruner.compiler.toolchain import Calls, Kernels
    from torch_pruner.target import TargetSpec


@dataclass(frozen=True, slots=True)
class HostToolchain(Toolchain):
    """Shared libraries by TVM and a C compiler, run on TVM's threads."""

    threads: int
    own: tuple[str, ...] = CHECKSUMS

    def prepare(self) -> None:
        set_threads(self.threads)

    def build(self, kernels: Kernels, calls: Calls, slots: int, target: TargetSpec) -> Library:
        from torch_pruner.codegen.build.program import build_program, link

        library = build_program(kernels, calls, slots, target, self.threads)

        def entries() -> tuple[Entry, ...]:
            # LLVM makes machine code here, as it does once more to write it down.
            return tuple(library[name] for name in (*calls, *self.own))

        return Library(entries, lambda path: link(library, path), library)

    def load(self, path: Path, names: Sequence[str]) -> list[Entry]:
        return load_entries(path, list(names))
