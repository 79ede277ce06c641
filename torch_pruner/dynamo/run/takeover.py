"""A graph of Dynamo's that eager runs until all that was compiled for it can take over at once.

Eager is the graph as Dynamo captured it, with torch's own backward, so forward and backward change
together. The first comparison of a program with eager is made beside the user's calls, on a copy of
what one of them was given; where such a copy is not possible, a call of the user's is the first.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from torch_pruner import log
from torch_pruner.background.queue import shared_queue
from torch_pruner.dynamo.run.deferred import rehearsing
from torch_pruner.dynamo.run.real_inputs import RealInputs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.config import Config
    from torch_pruner.dynamo.capture.aot_metadata import AotMetadata
    from torch_pruner.dynamo.lower.calls import BoxedCall, DynamoCall, RuntimeValue
    from torch_pruner.dynamo.run.deferred import DeferredGraph

_log = log.logger(__name__)


class Takeover:
    """The call of a graph of Dynamo's. Safe for several threads.

    ``add`` what is compiled for it, then give it AOTAutograd's call of all of these with
    ``around``.
    """

    def __init__(self, eager: DynamoCall, inputs: int) -> None:
        """``inputs``: how many Dynamo gives to the graph."""
        self._eager: DynamoCall | None = eager
        self._inputs = inputs
        self._compiled: DynamoCall | None = None
        self._graphs: list[DeferredGraph] = []
        self._given: RealInputs | None = None
        self._asked = False  # whether inputs were looked at
        self._answered = False  # until a call is through nothing is compiled beside it
        self._now: DynamoCall = self._run_eager
        self._lock = threading.RLock()
        self._queue = shared_queue()

    @staticmethod
    def of(eager: DynamoCall, inputs: int, config: Config) -> Takeover | None:
        """One, where ``config`` asks for it and there is something to compile."""
        asked = config.compile == "background" and config.on_miss != "error"
        return Takeover(eager, inputs) if asked else None

    def add(self, graph: DeferredGraph) -> None:
        """One of the ATen graphs of it; a backward may come when the rest runs already."""
        with self._lock:
            self._graphs.append(graph)
            if not self._answered:
                return
        self._queue.submit(graph)

    def eager_call(self, metadata: AotMetadata, inputs: int) -> BoxedCall | None:
        """Dynamo's graph as the call of its ATen graph, which is cut finer and so is slower.

        None where AOTAutograd does anything around the latter.
        """
        eager = self._eager
        if eager is None or not metadata.plain or inputs != self._inputs:
            return None

        def call(args: list[RuntimeValue]) -> list[RuntimeValue]:
            values = list(args)
            args.clear()
            return list(eager(*values))

        return call

    def around(self, compiled: DynamoCall) -> DynamoCall:
        """What Dynamo is to call in place of ``compiled``."""
        with self._lock:
            self._compiled = compiled
            if not self._graphs:
                return compiled
            if all(graph.loaded for graph in self._graphs):
                self._queue.soon(self.advance)
        return lambda *inputs: self._now(*inputs)

    def _run_eager(self, *inputs: RuntimeValue) -> Sequence[RuntimeValue]:
        self._queue.poke()
        eager = self._eager
        if not self._asked:
            self._keep(inputs)
        try:
            return self._now(*inputs) if eager is None else eager(*inputs)
        finally:
            if not self._answered:
                self._begin()

    def _begin(self) -> None:
        """Have compiled what the first call waited for nothing of."""
        with self._lock:
            waiting = [] if self._answered else list(self._graphs)
            self._answered = True
        for graph in waiting:
            self._queue.submit(graph)

    def _keep(self, inputs: Sequence[RuntimeValue]) -> None:
        """Copy the inputs of one call, for rehearsals."""
        with self._lock:
            if self._asked:
                return
            self._asked = True
            if self._can_rehearse():
                self._given = RealInputs.of(inputs, self._graphs[0].metadata.static)
            if all(graph.loaded for graph in self._graphs):
                self._queue.soon(self.advance)

    def _can_rehearse(self) -> bool:
        """Whether a call beside the user's changes nothing for the user, and shows everything.

        A graph for gradients needs those of a real loss; random numbers would come out of turn.
        """
        graph = self._graphs[0]
        alone = len(self._graphs) == 1 and graph.metadata.kind == "inference"
        return alone and not graph.draws and graph.n_inputs == self._inputs

    def advance(self) -> None:
        """Let what is ready take over. Called by the queue's thread when something changed."""
        with self._lock:
            compiled, graphs = self._compiled, list(self._graphs)
            if compiled is None or not self._may_begin(graphs):
                return
            given = self._given
        if given is not None and not all(graph.settled for graph in graphs):
            try:
                with rehearsing():
                    given.call(compiled)
            except Exception as err:
                _log.debug("a rehearsal failed", exc_info=err)
        with self._lock:
            for graph in graphs:
                graph.promote()
            self._now, self._eager = compiled, None
            if all(graph.finished for graph in graphs):
                self._given = None

    def _may_begin(self, graphs: Sequence[DeferredGraph]) -> bool:
        """Whether there is a program for everything, or was before; and inputs to try it on."""
        if self._eager is None:
            return True
        known = all(graph.loaded for graph in graphs)
        return known and any(graph.compiled for graph in graphs) and self._asked
