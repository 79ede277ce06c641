"""The device seam: what graphs are compiled for, as the rest of the package sees it.

A device says which graphs are its own (``claim``), what kernels are generated and kept for
(``context``), what builds and loads them (``toolchain``), what times them (``executor``), and what
has to be so around a call (``guard``). ``torch_pruner.devices`` lists them in order; nothing else
knows their names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from torch_pruner.compiler.capabilities import Capabilities
from torch_pruner.compiler.driver import Compiler
from torch_pruner.compiler.stores import store_for
from torch_pruner.log import PhaseTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.compiler.bundles import BundleDevice
    from torch_pruner.compiler.context import Context
    from torch_pruner.compiler.toolchain import Toolchain
    from torch_pruner.compiler.vendor import Vendor
    from torch_pruner.config import Config
    from torch_pruner.tuner.measure.base import MeasureExecutor
    from torch_pruner.tuner.measure.meter import MeterSource


class Device(ABC):
    """One device that graphs are compiled for.

    Contract: regions are called with tensors of ``device`` alone, on the stream that is current
    there, and queue their work on it; nothing in a call waits for the device. The target of
    ``context`` is of a kind for which there are families (``Family.target_kind``). Tests:
    ``tests/contracts/device.py``.
    """

    names: ClassVar[tuple[str, ...]] = ()
    """Examples of what ``named`` knows, for messages."""
    device: torch.device
    """Where the tensors of a graph are."""
    dtypes: frozenset[str]
    """Names of the dtypes that are compiled."""
    checks_indices: bool
    """Whether indices are looked at before a call, which has to wait for them."""
    host_memory: bool = False
    """Whether this process reads its tensors' memory itself: what a thread leaves there its next
    call finds, and what a parameter holds can be looked at without waiting."""
    replays: bool = False
    """Whether torch can record the work of a call there and replay it (CUDA graphs)."""
    builds_only: bool = False
    """Whether what is compiled cannot run here: eager runs in its place."""
    in_background: bool = False
    """Whether another process can compile for it while this one runs."""

    @classmethod
    @abstractmethod
    def claim(cls, where: torch.device, config: Config) -> Device | None:
        """The device for graphs that live at ``where``; None: they are another's.

        Raises ``OptionError`` where ``config`` asks for what cannot be.
        """

    @abstractmethod
    def context(self, config: Config) -> Context:
        """The target and fingerprint that kernels are generated for, and their CPU threads.

        Raises ``OptionError``, and ``MeasureError`` where others have to be asked and are silent.
        """

    @abstractmethod
    def toolchain(self, threads: int) -> Toolchain:
        """What builds and loads kernels that run on ``threads``."""

    @abstractmethod
    def executor(self, config: Config, threads: int) -> MeasureExecutor:
        """What times kernels that run on ``threads``, shared by the compilations of this process.

        Under ``effort="none"`` it is called for ``runs_first`` alone.
        """

    def meter(self) -> MeterSource | None:
        """What counts the joules of the device. Default: nothing does."""
        return None

    def runs_first(self, config: Config) -> bool:
        """Whether workers run a kernel, and compare its results with the reference's, before this
        process loads it. Default: no."""
        return False

    @classmethod
    def named(cls, name: str) -> BundleDevice | None:
        """What bundles of the device called ``name`` are made for. Default: it has no name."""
        return None

    @classmethod
    def settings(cls) -> list[str]:
        """What torch is set to now that changes what is generated, for keys. Default: nothing."""
        return []

    def capabilities(self) -> Capabilities:
        """How graphs are cut into kernels. Default: as for CPUs."""
        return Capabilities()

    def vendor(self) -> Vendor | None:
        """What runs kernels that are not generated. Default: nothing does."""
        return None

    def compiler(self, config: Config, timer: PhaseTimer | None = None) -> Compiler:
        """A compiler of one graph. Raises as ``context`` does."""
        context = self.context(config)
        return Compiler(
            config,
            store_for(config),
            context,
            self.toolchain(context.threads),
            executor=lambda: self.executor(config, context.threads),
            vendor=self.vendor(),
            capabilities=self.capabilities(),
            timer=timer or PhaseTimer(),
            elsewhere=self.in_background,
            runs_first=self.runs_first(config),
        )

    def guard(self, run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """``run`` with this device as the current one. Default: there is nothing to choose."""
        return run

    def retire(self, tensors: Sequence[torch.Tensor]) -> None:
        """Told before what kernels have read is let go: some may still be on their way to run.

        Default: calls wait for their kernels.
        """

    def generator_state(self) -> torch.Tensor | None:
        """The state of the device's random numbers. Default: None, the device draws the CPU's."""
        return None

    def restore_generator(self, state: torch.Tensor) -> None:
        """Inverse of ``generator_state``."""


def parsed(name: str) -> torch.device | None:
    """The device that torch calls ``name``; None if it knows none."""
    try:
        return torch.device(name)
    except RuntimeError:
        return None
