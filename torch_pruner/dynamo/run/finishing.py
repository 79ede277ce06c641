"""From a lowered graph to the call that runs it: built, or found built, and watched at first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from torch_pruner import exc
from torch_pruner.compiler.remembered import verdicts
from torch_pruner.dynamo.lower import serialization
from torch_pruner.dynamo.run import cuda_graphs, network_finals, reports
from torch_pruner.dynamo.run.build import build_graph
from torch_pruner.dynamo.run.checked import (
    FAST_BOUND,
    TF32_BOUND,
    CheckedCall,
    bound_of_weights,
    may_draw,
    run_eager,
)
from torch_pruner.dynamo.run.first_call import FirstCall
from torch_pruner.dynamo.run.network_finals import NetworkFinals
from torch_pruner.log import logger

if TYPE_CHECKING:
    import weakref
    from collections.abc import Mapping, Sequence

    import torch
    from torch import fx

    from torch_pruner.compiler.driver import Compiler
    from torch_pruner.config import Config
    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.capture.aot_metadata import AotMetadata
    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue
    from torch_pruner.dynamo.lower.program import Program
    from torch_pruner.dynamo.run.build import BuiltGraph
    from torch_pruner.dynamo.run.takeover import Takeover
    from torch_pruner.log import PhaseTimer
    from torch_pruner.report import GraphReport

log = logger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class AtenGraph:
    """An ATen graph to compile: as AOTAutograd hands it over, or written down for some sizes."""

    gm: fx.GraphModule
    example_inputs: Sequence[RuntimeValue]
    metadata: AotMetadata
    label: str  # in logs and reports
    timer: PhaseTimer
    holds: Mapping[int, str] = field(default_factory=dict)  # as for ``build_graph``
    takeover: Takeover | None = None  # where eager runs until all is built
    given: Mapping[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    """What its arguments were when it was captured, by position, where that is known."""


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A call, and what there is to say of it."""

    call: BoxedCall
    report: GraphReport


@dataclass(frozen=True, slots=True, eq=False)
class Finishing:
    """What is left to do for a graph that was lowered to ``program``. ``blob``: its bytes."""

    graph: AtenGraph
    program: Program
    device: Device
    blob: bytes | None

    def finished(self, config: Config, timer: PhaseTimer) -> Finished:
        """The call, whose first result is compared with eager's."""
        graph, device = self.graph, self.device
        finals_s = self._finals_s(config)
        compiler = device.compiler(network_finals.leaving(config, finals_s), timer)
        with timer.phase("lower"):
            built = build_graph(
                self.program, compiler, device, fallback=config.fallback, name=graph.label,
                holds=graph.holds,
            )  # fmt: skip
        report = built.report(graph.label, dict(timer.seconds), compiler.tunings)
        call: BoxedCall = built.call
        if config.cuda_graphs and not device.builds_only:
            kind = graph.metadata.kind
            call = cuda_graphs.recorded_or_not(built, kind, device, graph.label)
        if built.compiled:
            first = _FirstResult(graph.label, built, self.blob, compiler, device, config)
            call = watched = first.watched(graph.gm, call)
            if graph.metadata.kind == "inference" and device.host_memory:
                watched.when_settled(partial(built.overwrite, graph.metadata.mutated))
            if finals_s and compiler.tunings:
                limit_s = network_finals.limited(finals_s, timer.elapsed_s)
                own = (self.program, built, compiler, device, graph.label, limit_s)
                watched.then(partial(first.faster, graph.gm, NetworkFinals(*own)))
        return Finished(call, report)

    def _finals_s(self, config: Config) -> float:
        """For how long kernels are judged inside the graph, when it was called."""
        graph = self.graph
        if graph.takeover is not None:
            return 0.0
        writes = bool(graph.metadata.mutated)
        return network_finals.seconds_for(
            config, graph.gm, self.program, self.device, writes=writes
        )


@dataclass(frozen=True, slots=True, eq=False)
class _FirstResult:
    """The first result of a graph that was built, which is compared with eager's once.

    The graph itself is not kept: nobody needs it after that.
    """

    label: str
    built: BuiltGraph
    blob: bytes | None
    compiler: Compiler
    device: Device
    config: Config
    looked_at: bool = False  # nothing is in the store yet that a comparison says anything of

    def faster(
        self, gm: fx.GraphModule, finals: NetworkFinals, values: Sequence[RuntimeValue]
    ) -> BoxedCall | None:
        """The call of the graph with kernels that make it faster, compared as this one was."""
        timer = self.compiler.timer

        def compared(other: BuiltGraph) -> None:
            config = self.config.replace(strict=True)
            look = replace(self, built=other, config=config, looked_at=True)
            look.watched(gm, other.call)(list(values))

        try:
            with timer.phase("measure"):
                built = finals.faster(values, compared)
        except (
            exc.PrunerError,
            OSError,
            RuntimeError,
            ValueError,
        ) as err:  # the call has its result
            log.warning("%s: its kernels stay as they are: %s", self.label, err)
            return None
        if built is None:
            return None
        if self.config.check == "first-call":
            replace(self, built=built)._confirm()
        reports.renew(built.report(self.label, dict(timer.seconds), self.compiler.tunings))
        return built.call

    def watched(self, gm: fx.GraphModule, call: BoxedCall) -> FirstCall:
        """``call``; its first result is compared, unless that was done already.

        Eager takes over if the first call fails.
        """
        label, config = self.label, self.config
        # Once is once: a process before this one may have compared it, with the same kernels.
        if self._compared_before() or config.check != "first-call":
            return FirstCall(
                partial(run_eager, gm), call, label, strict=config.strict, draws=may_draw(gm),
                failed=self._failed_unasked, device=self.device,
            )  # fmt: skip
        least = bound_of_weights(config.rounded_bits)
        least = max(least, TF32_BOUND if self.compiler.capabilities.tf32 else 0.0)
        least = max(least, FAST_BOUND if self.compiler.approximates else 0.0)
        return CheckedCall(
            gm, call, label, strict=config.strict, failed=self._failed, on_match=self._confirm,
            device=self.device, least_bound=least,
        )  # fmt: skip

    def _compared_before(self) -> bool:
        proof = proof_of(self.blob) if self.blob else None
        return proof is not None and verdicts.remembered(self.compiler, proof, self.built.compiled)

    def _confirm(self) -> None:
        if self.blob and not self.looked_at:
            proof = proof_of(self.blob)
            verdicts.remember(self.compiler, proof, self.built.compiled, self.label)

    def _failed_unasked(self, error: Exception) -> None:
        reports.failed(self.label, f"{type(error).__name__}: {error}")

    def _failed(self, error: Exception) -> None:
        label, compiler = self.label, self.compiler
        if self.looked_at:
            return
        if not isinstance(error, exc.ResultMismatch):
            reports.failed(label, f"its first call failed: {type(error).__name__}: {error}")
            return
        for compiled in self.built.compiled:
            for task in compiled.tasks:
                compiler.store.drop_kernel(compiler.context.kernel_key(task.workload))
        reports.failed(label, "its first result differed from eager's")


def proof_of(blob: bytes) -> bytes:
    """What a comparison with eager is about: a program, and our own code that runs it."""
    return serialization.version().encode() + blob
