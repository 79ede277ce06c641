"""What a worker needs from a code generator: the real one is ``_tvm.py``, tests bring theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Candidate

Array = np.ndarray[Any, Any]


class Pack(Protocol):
    """A layout in which a kernel wants one of its inputs; hashable, equal layouts pack alike."""

    def pack(self, value: Array, /) -> Array: ...


@dataclass(frozen=True, slots=True)
class BuiltKernel:
    """A compiled kernel.

    ``bind`` makes a call without arguments on fixed arrays: inputs (packed), outputs, scratch.
    ``fetch`` waits until calls are done and the arrays of outputs hold their results.
    """

    bind: Callable[[Sequence[Array]], Callable[[], object]]
    packs: Sequence[Pack | None]
    outputs: Sequence[tuple[tuple[int, ...], str]]
    scratch: Sequence[tuple[tuple[int, ...], str]]
    fetch: Callable[[Sequence[Array]], None] = lambda outputs: None


class Builder(Protocol):
    """Compiles candidates in the worker's own process. Tests: ``tests/contracts/builder.py``."""

    def build(
        self, spec: Graph, target: TargetSpec, threads: int, candidate: Candidate
    ) -> BuiltKernel: ...

    def set_threads(self, threads: int) -> None:
        """Number of threads that kernels run on from now."""

    def seconds(self, calls: Sequence[Callable[[], object]], number: int) -> float | None:
        """What ``number`` of ``calls``, in turn, take on a device with a clock of its own.

        None: they take what the worker's clock says.
        """

    def renewal(self, target: TargetSpec, arrays: Sequence[Array]) -> Callable[[], object] | None:
        """A call that writes arrays anew as kernels do, each thread its share; None: no need."""
