"""Where kernels are chosen and built: here, or elsewhere for a thread that has it done there."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch_pruner.compiler.choice import Choice
    from torch_pruner.config import Config
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.layout import Order


class Made(Protocol):
    """What compiling did elsewhere."""

    @property
    def choices(self) -> Mapping[str, Choice]:
        """How each kernel runs, by workload."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """By phase."""


class Elsewhere(Protocol):
    """Compiles a graph somewhere else, into the same cache."""

    def __call__(
        self, config: Config, graph: Graph, inputs: Sequence[Order], outputs: Sequence[Order]
    ) -> Made:
        """Have it compiled. Raises ``PrunerError``."""


_elsewhere: ContextVar[Elsewhere | None] = ContextVar("elsewhere", default=None)


@contextlib.contextmanager
def compiling(elsewhere: Elsewhere) -> Iterator[None]:
    """In the block, this thread has graphs compiled ``elsewhere``."""
    token = _elsewhere.set(elsewhere)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def current() -> Elsewhere | None:
    """Who compiles for this thread; None: it does so itself."""
    return _elsewhere.get()
