"""How a graph of symbolic sizes is compiled for the sizes that come, and for none of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.background.queue import shared_queue
from torch_pruner.dynamo.run import graphs
from torch_pruner.dynamo.run.failures import Fallback
from torch_pruner.dynamo.sizes import symbolic
from torch_pruner.dynamo.sizes.background_sizes import BackgroundSizes
from torch_pruner.dynamo.sizes.buckets import Buckets
from torch_pruner.dynamo.sizes.sized_call import SizedCall
from torch_pruner.log import PhaseTimer

if TYPE_CHECKING:
    from torch_pruner.config import Config
    from torch_pruner.dynamo.lower.calls import BoxedCall
    from torch_pruner.dynamo.run.finishing import AtenGraph
    from torch_pruner.dynamo.sizes.symbolic import SizedArguments


class SizedCompilation:
    """The calls of one graph of symbolic sizes.

    They are tuned for the sizes of the first capture. Later ones run as drafted, or as the cache
    has them: nobody waits for tuning in the middle of a run.
    """

    def __init__(self, graph: AtenGraph, config: Config, *, again: bool) -> None:
        """``again``: Dynamo compiled the function before, for other sizes."""
        # Strides of one size are not those of another.
        self._graph = replace(graph, metadata=replace(graph.metadata, loose=range(0)))
        tunes = config.on_miss == "tune" and config.effort != "none"
        self._later = config.replace(on_miss="fallback") if tunes else config
        self._first = self._later if again else config
        self._again = again

    def call(self) -> SizedCall:
        """The call for all sizes, ready for those of the capture if they are known."""
        graph, config = self._graph, self._later
        larger = _QuietLarger(
            Buckets(graph.gm, graph.metadata, config, graph.label, graph.holds, graph.given),
            Fallback(graph.label, config),
        )
        call = self._made(larger)
        if (given := symbolic.hinted(graph.example_inputs)) is not None:
            if graph.takeover is not None and self._first.effort != "none":
                # As drafted, which is there soon.
                call.prepare(given, self.compile_for, partial(larger.shared, config=self._later))
            call.prepare(given, self.compile_captured, partial(larger.shared, config=self._first))
        return call

    def _made(self, larger: _QuietLarger) -> SizedCall:
        graph, config = self._graph, self._later
        limit, name = config.max_sizes, graph.label
        if graph.takeover is None:
            return SizedCall(
                graph.gm, self.compile_for, self.compile_general, limit=limit, name=name,
                larger=larger,
            )  # fmt: skip
        eager = graph.takeover.eager_call(graph.metadata, len(graph.example_inputs))
        # In the queue's thread programs are built at once.
        self._graph = replace(graph, takeover=None)
        return BackgroundSizes(
            graph.gm, self.compile_for, self.compile_general, limit=limit, name=name,
            larger=larger, eager=eager or self._eager(), queue=shared_queue(), strict=config.strict,
        )  # fmt: skip

    def compile_captured(self, args: SizedArguments, sizes: str) -> BoxedCall:
        """The call for the sizes of the capture."""
        timer = self._graph.timer
        return self._compiled(args, sizes, self._first, timer, again=self._again)

    def compile_for(self, args: SizedArguments, sizes: str) -> BoxedCall:
        """The call for sizes that came later; ``sizes`` is the text that names them."""
        return self._compiled(args, sizes, self._later, PhaseTimer(), again=True)

    def compile_general(self) -> BoxedCall:
        """The call for any size, in which eager runs what depends on sizes."""
        graph = replace(self._graph, timer=PhaseTimer())

        def build() -> BoxedCall:
            return graphs.build(graph, self._later)

        return Fallback(graph.label, self._later).unless_failed(build, self._eager, again=True)

    def _compiled(
        self,
        args: SizedArguments,
        sizes: str,
        config: Config,
        timer: PhaseTimer,
        *,
        again: bool,
    ) -> BoxedCall:
        label = f"{self._graph.label}[{sizes}]"

        def build() -> BoxedCall:
            gm = symbolic.with_sizes(self._graph.gm, args)
            given = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
            graph = replace(self._graph, gm=gm, example_inputs=given, label=label, timer=timer)
            return graphs.build(graph, config)

        one, every = Fallback(label, config), Fallback(self._graph.label, config)
        return every.unless_missing(  # misses of all sizes are warned of once
            lambda: one.unless_broken(build, self._eager), self._eager, again=again
        )

    def _eager(self) -> BoxedCall:
        return graphs.boxed(self._graph.gm)


@dataclass(frozen=True, slots=True)
class _QuietLarger:
    """``sized_call.Larger`` whose failures cost nothing but what it would have spared."""

    larger: Buckets
    fallback: Fallback

    def known(self, args: SizedArguments) -> BoxedCall | None:
        attempt = partial(self.larger.known, args)
        return self.fallback.unless_broken(attempt, lambda: None, quietly=True)

    def shared(self, args: SizedArguments, config: Config | None = None) -> BoxedCall | None:
        attempt = partial(self.larger.shared, args, config)
        return self.fallback.unless_broken(attempt, lambda: None, quietly=True)

    def call(self, args: SizedArguments, large: SizedArguments, text: str) -> BoxedCall | None:
        attempt = partial(self.larger.call, args, large, text)
        return self.fallback.unless_broken(attempt, lambda: None, quietly=True)

    def ready(self, args: SizedArguments) -> bool:
        attempt = partial(self.larger.ready, args)
        return self.fallback.unless_broken(attempt, lambda: False, quietly=True)
