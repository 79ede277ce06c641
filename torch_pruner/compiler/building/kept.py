"""Kernels that were built, in the store: machine code that any graph may link."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.cache import Artifact, ArtifactKind
from torch_pruner.codegen.build.kernel_object import KernelObject
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.cache import GraphKey, KernelStore
    from torch_pruner.compiler.context import Context
    from torch_pruner.compiler.toolchain import Kept
    from torch_pruner.task import Scheduled

log = logger(__name__)


@dataclass(frozen=True, slots=True)
class KeptKernels:
    """``toolchain.Kept`` of one device and configuration, in a store."""

    store: KernelStore
    context: Context

    def find(self, workload: str, kernel: Scheduled | None) -> KernelObject | None:
        key = self._key(workload, kernel)
        if (found := self.store.get(ArtifactKind.KERNEL, key)) is None:
            return None
        try:
            return KernelObject.from_bytes(found[1].read_bytes())
        except (OSError, TypeError, ValueError) as err:
            log.warning("building a kernel again, what was kept of it is damaged: %s", err)
            self.store.drop(ArtifactKind.KERNEL, key)
            return None

    def keep(self, workload: str, kernel: Scheduled | None, made: KernelObject) -> None:
        key = self._key(workload, kernel)
        self.store.put(Artifact(ArtifactKind.KERNEL, key, made.to_bytes()))

    def _key(self, workload: str, kernel: Scheduled | None) -> GraphKey:
        if kernel is None:
            return self.context.graph_key(workload, [])
        return self.context.graph_key("kernel", [f"{workload}:{code_of(kernel)}"])


class Scratch:
    """``toolchain.Kept`` of who builds kernels to look at them: those of a store, and in memory
    what is built beside them, which the store gets when it is ``taken``."""

    def __init__(self, kept: Kept) -> None:
        self._kept = kept
        self._made: dict[tuple[str, str], KernelObject] = {}

    def find(self, workload: str, kernel: Scheduled | None) -> KernelObject | None:
        made = self._made.get(_name(workload, kernel))
        return made if made is not None else self._kept.find(workload, kernel)

    def keep(self, workload: str, kernel: Scheduled | None, made: KernelObject) -> None:
        self._made[_name(workload, kernel)] = made

    def taken(self, kernels: Mapping[str, Scheduled]) -> None:
        """Of what was built in memory, these are no longer looked at only."""
        for workload, kernel in kernels.items():
            if (made := self._made.get(_name(workload, kernel))) is not None:
                self._kept.keep(workload, kernel, made)


def _name(workload: str, kernel: Scheduled | None) -> tuple[str, str]:
    return workload, "" if kernel is None else code_of(kernel)


def code_of(kernel: Scheduled) -> str:
    """What the code of a kernel depends on beside its graph."""
    candidate = kernel.candidate
    version = families.named(candidate.sketch).version
    code = candidate.digest if version == 1 else f"{candidate.digest} v{version}"
    return f"{code} past caches" if kernel.past_caches else code
