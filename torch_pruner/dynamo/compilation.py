"""One graph of Dynamo's on its way to a call.

It was captured by a process before this one, or AOTAutograd captures it: as one ATen graph for
inference, or as a forward and a backward. Each of these is lowered, for the sizes that it has or
for those that come. Where any of this fails, ``fallback`` puts eager in its place.
"""

from __future__ import annotations

import contextlib
import weakref
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torch_pruner import exc, log
from torch_pruner.compiler.remembered import captured
from torch_pruner.devices import device_for, torch_device_of
from torch_pruner.dynamo.capture import capture_key, recompiles, torch_cache
from torch_pruner.dynamo.capture.aot_metadata import AotMetadata
from torch_pruner.dynamo.capture.decompositions import decomposition_table
from torch_pruner.dynamo.capture.partitioning import partition
from torch_pruner.dynamo.capture.torch_cache import SavedCall
from torch_pruner.dynamo.lower import serialization
from torch_pruner.dynamo.lower.inplace import writes_as_results
from torch_pruner.dynamo.run import cuda_graphs, distributed, graphs, narrow_weights, reports
from torch_pruner.dynamo.run.checked import run_eager
from torch_pruner.dynamo.run.failures import Fallback
from torch_pruner.dynamo.run.finishing import AtenGraph
from torch_pruner.dynamo.run.first_call import FirstCall
from torch_pruner.dynamo.run.graphs import boxed, label_of, next_name, outputs
from torch_pruner.dynamo.run.takeover import Takeover
from torch_pruner.dynamo.run.written_back import written_back
from torch_pruner.dynamo.sizes import symbolic
from torch_pruner.dynamo.sizes.sized_compilation import SizedCompilation
from torch_pruner.log import PhaseTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import fx

    from torch_pruner.compiler.toolchain import Toolchain
    from torch_pruner.config import Config
    from torch_pruner.dynamo.lower.calls import BoxedCall, DynamoCall, RuntimeValue

Result = TypeVar("Result")

_log = log.logger(__name__)


class GraphCompilation:
    """The compilation of one graph of Dynamo's.

    A backward may come long after its forward, and keeps this until then; so no graph is kept here.
    """

    def __init__(
        self, gm: fx.GraphModule, example_inputs: Sequence[RuntimeValue], config: Config
    ) -> None:
        self.name = next_name()
        self._config = distributed.without_tuning(config)
        self._again = recompiles.seen(example_inputs)  # Dynamo compiled this function before
        self._timer = PhaseTimer()
        self._holds = narrow_weights.holds(example_inputs, self._config)
        self._given = _tensors_of(example_inputs)
        self._inputs = len(example_inputs)
        self._takeover = Takeover.of(gm.forward, len(example_inputs), self._config)
        self._key = capture_key.of(gm, example_inputs)
        self._direct: BoxedCall | None = None

    def captured_before(
        self, gm: fx.GraphModule, example_inputs: Sequence[RuntimeValue]
    ) -> DynamoCall | None:
        """The call of what a process before this one captured, if it can be used as it is."""
        name = self.name
        devices = {v.device for v in example_inputs if isinstance(v, torch.Tensor)}
        if self._key is None or len(devices) != 1:
            return None
        try:
            compiler = device_for(devices.pop(), self._config).compiler(self._config)
            blob = captured.find(compiler, self._key)
            call = None if blob is None else self._restore(SavedCall(blob=blob))
        except (exc.PrunerError, torch_cache.NotUsableError, ValueError) as err:
            # Captured once more: damage is a miss, and what else is wrong will be wrong then, too.
            _log.debug("a captured graph is not used: %s", err)
            return None
        if call is None:
            return None
        first = FirstCall(
            partial(run_eager, gm), call, name, strict=self._config.strict,
            failed=lambda err: reports.failed(name, f"{type(err).__name__}: {err}"),
        )  # fmt: skip
        return lambda *inputs: first(list(inputs))

    def capture(self, gm: fx.GraphModule, example_inputs: Sequence[RuntimeValue]) -> DynamoCall:
        """AOTAutograd's way to the call: it captures ATen graphs and has each of them lowered."""
        from torch._dynamo.backends.common import aot_autograd

        lower, timer = self.lower, self._timer
        with (
            self._expecting(example_inputs),
            timer.phase("capture"),
            torch_cache.riding(serialization.version(), self._restore) as kept,
        ):
            compiled: DynamoCall = aot_autograd(
                fw_compiler=kept(partial(lower, kind="forward", timer=timer)),
                bw_compiler=kept(partial(lower, kind="backward", timer=PhaseTimer())),
                inference_compiler=kept(partial(lower, kind="inference", timer=timer)),
                partition_fn=partition,
                decompositions=decomposition_table(),
                keep_inference_input_mutations=not _learns(example_inputs),
            )(gm, list(example_inputs))
        if self._takeover is not None:
            return self._takeover.around(compiled)
        direct, self._direct = self._direct, None
        return compiled if direct is None else lambda *inputs: direct(list(inputs))

    @contextlib.contextmanager
    def _expecting(self, example_inputs: Sequence[RuntimeValue]) -> Iterator[None]:
        """Has who builds get ready meanwhile; they stop where nothing was to be built."""
        toolchain = self._builds_soon(example_inputs)
        if toolchain is None:
            yield
            return
        toolchain.expect()
        try:
            yield
        finally:
            toolchain.settle()

    def _builds_soon(self, example_inputs: Sequence[RuntimeValue]) -> Toolchain | None:
        """What builds kernels, where nothing is tuned before."""
        config = self._config
        tunes = config.effort != "none" and config.on_miss == "tune"
        if tunes or config.on_miss == "error" or self._takeover is not None:
            return None
        devices = {v.device for v in example_inputs if isinstance(v, torch.Tensor)}
        if len(devices) != 1:
            return None
        return device_for(devices.pop(), config).compiler(config).toolchain

    def lower(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[RuntimeValue],
        *,
        kind: str,
        timer: PhaseTimer,
    ) -> SavedCall:
        """The call of one ATen graph, which is "forward", "backward" or for "inference"."""
        gm, written = (gm, ()) if kind == "backward" else writes_as_results(gm)
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        metadata = AotMetadata.of(example_inputs, kind, len(outputs(gm)), written, names)
        saved = self._lowered(gm, example_inputs, metadata, timer)
        assert saved.call is not None
        if self._config.cuda_graphs:
            device = device_for(torch_device_of(gm), self._config)
            saved.call = cuda_graphs.closing(saved.call, kind, device)
        saved.call, saved.written = written_back(saved.call, written), written
        if self._key and metadata.plain and saved.blob is not None:
            # As for what was captured before: AOTAutograd would only pass arguments on.
            self._direct = saved.call
        return saved

    def _lowered(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[RuntimeValue],
        metadata: AotMetadata,
        timer: PhaseTimer,
    ) -> SavedCall:
        """The call of a functional graph, what it writes into inputs among its results."""
        kind = metadata.kind
        label = label_of(self.name, kind)
        # Where AOTAutograd adds or drops none, arguments are Dynamo's.
        alike = kind == "inference" and len(example_inputs) == self._inputs
        holds, given = (self._holds, self._given) if alike else ({}, {})
        graph = AtenGraph(gm, example_inputs, metadata, label, timer, holds, self._takeover, given)
        if self._config.max_sizes and symbolic.depends_on_sizes(gm):
            call = self.compile_for_sizes(graph)
            return SavedCall(why="a graph of symbolic sizes", kind=kind, call=call)
        return self.fallback(
            lambda: graphs.build(graph, self._config, self._key),
            eager=lambda: SavedCall(why="a graph that eager runs", kind=kind, call=boxed(gm)),
            name=graph.label,
        )

    def compile_for_sizes(self, graph: AtenGraph) -> BoxedCall:
        """The call of an ATen graph of symbolic sizes, ready for those it was captured with."""
        return SizedCompilation(graph, self._config, again=self._again).call()

    def fallback(
        self, attempt: Callable[[], Result], *, eager: Callable[[], Result], name: str
    ) -> Result:
        """``attempt``, or ``eager`` where that fails and is not to be raised."""
        return Fallback(name, self._config).unless_failed(attempt, eager, again=self._again)

    def _restore(self, saved: SavedCall) -> BoxedCall:
        """The call of a graph that torch, or the cache, has kept."""
        holds = self._holds if saved.kind == "inference" else {}
        return graphs.restored(
            saved, config=self._config, name=self.name, timer=self._timer, holds=holds
        )


def _tensors_of(example_inputs: Sequence[RuntimeValue]) -> dict[int, weakref.ref[torch.Tensor]]:
    """By position what is a tensor in memory, as parameters are when Dynamo captures a graph."""
    return {
        k: weakref.ref(v)
        for k, v in enumerate(example_inputs)
        if isinstance(v, torch.Tensor) and not isinstance(v, FakeTensor)
    }


def _learns(example_inputs: Sequence[RuntimeValue]) -> bool:
    """Whether there may be a backward, which may need what an input held before."""
    given = (v for v in example_inputs if isinstance(v, torch.Tensor))
    return torch.is_grad_enabled() and any(v.requires_grad for v in given)
