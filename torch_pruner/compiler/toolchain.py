"""What makes machine code of a graph's kernels and loads it again: the seam that devices fill.

In: kernels with their schedules, and which of them each entry calls on what. Out: entries, which
are functions of the address of a table of addresses, and a file that gives the same entries in
another process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from torch_pruner.codegen.build.kernel_object import KernelObject
    from torch_pruner.codegen.build.load import Entry
    from torch_pruner.graph.memory import KernelCall, Place
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Scheduled

    Kernels = Mapping[str, Scheduled]  # by workload
    Calls = Mapping[str, Sequence[KernelCall]]  # by entry


@dataclass(frozen=True, slots=True)
class Library:
    """What was built: how to get its entries in this process, in the order asked for (then those of
    the toolchain's own), and how to write it down.

    Either may take a while, and who loads what was written needs no ``entries``. ``save`` raises
    ``CompileError`` or ``OSError``. ``keep`` must live as long as the entries.
    """

    entries: Callable[[], tuple[Entry, ...]]
    save: Callable[[Path], None]
    keep: Any = None


class Kept(Protocol):
    """Kernels as machine code that were built for graphs before, under the same keys."""

    def find(self, workload: str, kernel: Scheduled | None) -> KernelObject | None:
        """The code of a kernel; with None, of what is no kernel."""

    def keep(self, workload: str, kernel: Scheduled | None, made: KernelObject) -> None:
        """Keep it for graphs that come."""


class NothingKept:
    """``Kept`` of who builds everything anew."""

    def find(self, workload: str, kernel: Scheduled | None) -> KernelObject | None:
        return None

    def keep(self, workload: str, kernel: Scheduled | None, made: KernelObject) -> None:
        pass


NOTHING = NothingKept()


class Toolchain(ABC):
    """Builds and loads libraries for one kind of device.

    Contract: what ``load`` gives for a file that ``save`` wrote does what ``build``'s entries do,
    and loading needs no compiler. Entries may be called from any thread. Tests:
    ``tests/contracts/toolchain.py``.
    """

    own: tuple[str, ...] = ()
    """Entries that every library has beside those asked for."""
    optional: tuple[str, ...] = ()
    """Entries of the toolchain's own that ``build`` gives where ``calls`` name them, with none."""

    def prepare(self) -> None:
        """Called before entries are loaded or built. Default: nothing to do."""

    def expect(self) -> None:
        """Called where something will probably be built in a second. Default: nothing to do."""

    def settle(self) -> None:
        """Called when what was expected is built, or was not to be. Default: nothing to do."""

    @abstractmethod
    def build(
        self,
        kernels: Kernels,
        calls: Calls,
        slots: int,
        target: TargetSpec,
        kept: Kept = NOTHING,
        lines: Place | None = None,
    ) -> Library:
        """``slots`` is the length of the table of addresses. Raises ``CompileError``.

        What is ``kept`` need not be built, and what is built may be kept. ``lines``: memory of a
        call's own by which its threads may help each other (``codegen.build.stealing``).
        """

    @abstractmethod
    def load(self, path: Path, names: Sequence[str]) -> list[Entry]:
        """The named entries of a file. Raises ``CorruptEntry`` if it is not one of ours."""
