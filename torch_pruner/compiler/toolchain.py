"""What makes machine code of a graph's kernels and loads it again: for the CPU, and for GPUs.

In: kernels with their schedules, and which of them each entry calls on what. Out: entries, which
are functions of the address of a table of addresses, and a file that gives the same entries in
another process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_pruner import exc
from torch_pruner.codegen.build.gpu.driver import CudaDriver
from torch_pruner.codegen.build.load import Entry, load_entries, set_threads
from torch_pruner.graph.memory import CHECKSUMS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from torch_pruner.codegen.build.gpu.driver import Driver
    from torch_pruner.codegen.build.gpu.program import Compiled
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.memory import Place
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Candidate

    Kernels = Mapping[str, tuple[Graph, Candidate]]  # by workload
    Calls = Mapping[str, Sequence[tuple[str, tuple[Place, ...]]]]  # by entry


@dataclass(frozen=True, slots=True)
class Library:
    """Machine code in this process: entries in the order asked for (then those of the toolchain's
    own), and how to write it down.

    ``save`` raises ``CompileError`` or ``OSError``. ``keep`` must live as long as the entries.
    """

    entries: tuple[Entry, ...]
    save: Callable[[Path], None]
    keep: Any = None


class Toolchain(ABC):
    """Builds and loads libraries for one kind of device.

    Contract: what ``load`` gives for a file that ``save`` wrote does what ``build``'s entries do,
    and loading needs no compiler. Entries may be called from any thread.
    """

    own: tuple[str, ...] = ()
    """Entries that every library has beside those asked for."""

    def prepare(self) -> None:
        """Called before entries are loaded or built. Default: nothing to do."""

    @abstractmethod
    def build(self, kernels: Kernels, calls: Calls, slots: int, target: TargetSpec) -> Library:
        """``slots`` is the length of the table of addresses. Raises ``CompileError``."""

    @abstractmethod
    def load(self, path: Path, names: Sequence[str]) -> list[Entry]:
        """The named entries of a file. Raises ``CorruptEntry`` if it is not one of ours."""


@dataclass(frozen=True, slots=True)
class HostToolchain(Toolchain):
    """Shared libraries by TVM and a C compiler, run on TVM's threads."""

    threads: int
    own: tuple[str, ...] = CHECKSUMS

    def prepare(self) -> None:
        set_threads(self.threads)

    def build(self, kernels: Kernels, calls: Calls, slots: int, target: TargetSpec) -> Library:
        from torch_pruner.codegen.build.program import build_program, link

        library = build_program(kernels, calls, slots, target)
        entries = tuple(library[name] for name in (*calls, *self.own))
        return Library(entries, lambda path: link(library, path), library)

    def load(self, path: Path, names: Sequence[str]) -> list[Entry]:
        return load_entries(path, list(names))


@dataclass(frozen=True, slots=True)
class GpuToolchain(Toolchain):
    """Machine code by NVRTC and a list of launches, run through ``driver``.

    Without one (a card that is not at hand) code can be built and not run.
    """

    driver: Driver | None
    compiled: Compiled | None = None  # what makes machine code instead of NVRTC

    @staticmethod
    def at_hand(
        current_stream: Callable[[], int], entered: Callable[[], AbstractContextManager[object]]
    ) -> GpuToolchain:
        """For a GPU of this process; see ``CudaDriver``. Raises ``OSError`` without a driver."""
        return GpuToolchain(CudaDriver(current_stream, entered))

    def build(self, kernels: Kernels, calls: Calls, slots: int, target: TargetSpec) -> Library:
        from torch_pruner.codegen.build.gpu.program import build_gpu_program

        card = target.card
        if card is None:
            raise exc.CompileError(target.key(), "no card of that name is known")
        data = build_gpu_program(kernels, calls, card, compiled=self.compiled).to_bytes()
        return Library(tuple(self._entries(data, list(calls))), lambda path: _write(path, data))

    def load(self, path: Path, names: Sequence[str]) -> list[Entry]:
        try:
            return self._entries(path.read_bytes(), list(names))
        except (ValueError, OSError) as err:
            raise exc.CorruptEntry(path, f"cannot be loaded: {err}") from err

    def _entries(self, data: bytes, names: list[str]) -> list[Entry]:
        from torch_pruner.codegen.build.gpu.image import load_gpu_program

        if self.driver is None:
            return [_refuse] * len(names)
        return list(load_gpu_program(data, names, self.driver))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def _refuse(address: int) -> None:
    raise RuntimeError("this code was built for a card that is not at hand")
