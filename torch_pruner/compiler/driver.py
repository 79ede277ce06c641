"""The driver: a graph in, a callable program out.

It looks kernels up, has the missing ones tuned, builds, and publishes.

It knows no torch: tensors are addresses, vendor kernels are behind ``Vendor``, and whoever calls
owns the memory.
"""

from __future__ import annotations

import json
from dataclasses import KW_ONLY, astuple, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch_pruner import exc, families
from torch_pruner.compiler import choice, elsewhere, kernels
from torch_pruner.compiler.building.kept import KeptKernels, code_of
from torch_pruner.compiler.capabilities import Capabilities
from torch_pruner.compiler.checks import Checks, not_run_yet
from torch_pruner.compiler.compiled import CompiledGraph, LibraryCall
from torch_pruner.compiler.dump import dump_graph, dump_turns
from torch_pruner.compiler.kept_layouts import keep_to
from torch_pruner.compiler.libraries import Libraries
from torch_pruner.compiler.lowered import Lowered, demanded
from torch_pruner.compiler.one_kernel import gradient_is_cheaper, is_cheaper_as_one
from torch_pruner.compiler.phases import turns_of
from torch_pruner.compiler.products import with_products
from torch_pruner.compiler.remembered.cuts import remembered_cuts
from torch_pruner.compiler.spread import cheaply_spread
from torch_pruner.graph.attention import no_attention
from torch_pruner.graph.attention_gradient import no_gradient
from torch_pruner.graph.cuts import to_text
from torch_pruner.graph.describe import name_of
from torch_pruner.graph.fuse import FusedGraph, fuse
from torch_pruner.graph.hoist import hoist_static, with_changing_inputs
from torch_pruner.graph.int4 import keep_groups, quantize_weights4
from torch_pruner.graph.long_rows import in_parts
from torch_pruner.graph.memory import CHECKSUMS, COPIES, KernelCall, MemoryPlan, plan_memory
from torch_pruner.graph.narrow import keep_narrow
from torch_pruner.graph.neighbours import calls_together
from torch_pruner.graph.overwrites import overwritable
from torch_pruner.graph.precision import allow_fast, allow_tf32
from torch_pruner.graph.prepared import ordinary
from torch_pruner.graph.quantize import keep_int8, quantize_weights
from torch_pruner.graph.simplify import simplify
from torch_pruner.graph.streamed import past_caches
from torch_pruner.log import PhaseTimer, logger
from torch_pruner.target import tiles_allowed
from torch_pruner.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch_pruner.cache import GraphKey, KernelStore
    from torch_pruner.codegen.build.load import Entry
    from torch_pruner.compiler.choice import Choice
    from torch_pruner.compiler.context import Context
    from torch_pruner.compiler.toolchain import Kept, Toolchain
    from torch_pruner.compiler.vendor import Vendor
    from torch_pruner.config import Config
    from torch_pruner.graph.attention import Takes
    from torch_pruner.graph.attention_gradient import TakesGradient
    from torch_pruner.graph.cuts import Cuts
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.layout import Order
    from torch_pruner.graph.packing import PackLayout
    from torch_pruner.graph.phases import Turn
    from torch_pruner.graph.signature import Signature
    from torch_pruner.report import Tuning
    from torch_pruner.tuner.measure.base import MeasureExecutor

log = logger(__name__)

BUILD_S = 1.0  # that a kernel may take to be built; few take so long


@dataclass(slots=True)
class Compiler:
    """Compiles graphs under one configuration, for one device."""

    config: Config
    store: KernelStore
    context: Context
    toolchain: Toolchain
    _: KW_ONLY
    executor: Callable[[], MeasureExecutor] | None = None  # None: nothing is timed
    vendor: Vendor | None = None
    capabilities: Capabilities = field(default_factory=Capabilities)
    timer: PhaseTimer = field(default_factory=PhaseTimer)
    tunings: list[Tuning] = field(default_factory=list)  # how the searches of all graphs went
    may_tune: bool = True  # else ``CacheMiss`` for what would have to be
    elsewhere: bool = False  # whether another process can do it
    runs_first: bool = False  # whether a worker runs kernels before this process loads them
    scratch: Kept | None = None  # has what is built only to be looked at: the store keeps none
    cuts: Cuts | None = None  # of the graph that is compiled; None: those that are remembered

    @property
    def approximates(self) -> bool:
        """Whether kernels may be less exact than float32."""
        return self.config.fast_math and self.capabilities.approximations

    def lower(self, graph: Graph, inputs: Sequence[Order], outputs: Sequence[Order]) -> Lowered:
        """Simplify, split off what depends on parameters alone, and cut into kernels.

        ``inputs`` and ``outputs`` give the memory order of each.
        """
        with self.timer.phase("lower"):
            small = simplify(graph)
            if (bits := self.config.rounded_bits) is not None:
                small = quantize_weights(small) if bits == 8 else quantize_weights4(small)
            small = keep_int8(small, self.capabilities.takes_bytes)
            if self.capabilities.mixed_operands:
                small = keep_narrow(small)
            if self.config.weights == "live":
                small = with_changing_inputs(small)
            small = keep_groups(small, self.capabilities.takes_words)
            small = cheaply_spread(ordinary(small), self.context.target, self.context.threads)
            cuts = remembered_cuts(self, graph, inputs, outputs) if self.cuts is None else self.cuts
            products, small = with_products(small, cuts, self.context.target)
            hoisted = hoist_static(small)
            main = allow_tf32(hoisted.graph, self.capabilities.tf32)
            if self.approximates:
                main = allow_fast(main)
            main = main if self.context.target.card else in_parts(main, self.context.threads)
            fixed = demanded(main, inputs, outputs)
            target = self.context.target
            tiles = target.bf16_tiles and tiles_allowed()
            fused = fuse(
                main,
                fixed,
                tiles=tiles,
                attention=self.capabilities.attention,
                few_queries=self._few_queries(),
                gradients=self._gradients(),
                values_masked=self.capabilities.values_masked,
                cuts=cuts,
            )
            workloads = [k.spec.digest() for k in fused.kernels]
            together = calls_together(fused.kernels, workloads) if target.card else {}
            tasks: dict[str, Task] = {}
            for kernel, workload in zip(fused.kernels, workloads, strict=True):
                known = tasks.get(workload)
                if known is None:
                    name = name_of(kernel.spec)
                    known = Task(
                        name,
                        kernel.spec,
                        target,
                        self.context.threads,
                        0,
                        together.get(workload, 1),
                    )
                tasks[workload] = replace(known, weight=known.weight + 1)
            past = past_caches(fused, workloads, target.l3_bytes)
        sites = (*products, *fused.sites)
        return Lowered(hoisted, fused, list(tasks.values()), workloads, past, cuts, sites)

    def _few_queries(self) -> Takes:
        """Which attention of few queries is one kernel."""
        if not self.capabilities.few_queries:
            return no_attention
        taken = self.capabilities.attention
        cheaper = is_cheaper_as_one(self.context.target, self.context.threads)
        return lambda graph, found: taken(graph, found) and cheaper(graph, found)

    def _gradients(self) -> TakesGradient:
        """Which gradient of attention is one kernel."""
        if not self.capabilities.gradients:
            return no_gradient
        return gradient_is_cheaper(self.context.target, self.context.threads)

    def compile(
        self,
        graph: Graph,
        inputs: Sequence[Order],
        outputs: Sequence[Order],
        held: Collection[PackLayout] = (),
    ) -> CompiledGraph:
        """A program for ``graph``; products of few rows read weights in a layout of ``held``.

        Raises ``CacheMiss`` under ``on_miss="error"``, ``CompileError`` when code generation fails,
        ``KeyboardInterrupt`` after publishing what an interrupted tuning found.
        """
        lowered = self.lower(graph, inputs, outputs)
        chosen = self._choices(lowered, graph, inputs, outputs)
        choices = self._kept(lowered, dict(chosen), held)
        if (checks := self.checks()) is None:
            return self.linked(lowered, choices)
        made = checks.linked(lowered.tasks, choices, partial(self.linked, lowered))
        return replace(made, notes=tuple(checks.notes))

    def checks(self) -> Checks | None:
        """What has a worker run kernels first; None where nobody has to."""
        if not self.runs_first:
            return None
        assert self.executor is not None, "there are workers"
        own = (self.config, self.store, self.context)
        return Checks(*own, self.executor, self.vendor, self.timer)

    def linked(
        self,
        lowered: Lowered,
        choices: Mapping[str, Choice],
        checked: Callable[[], None] | None = None,
    ) -> CompiledGraph:
        """The program of ``choices``; ``checked`` is called before anything of it is loaded."""
        takes = [
            families.signature_of(k.spec, choices[w].candidate)
            for k, w in zip(lowered.fused.kernels, lowered.workloads, strict=True)
        ]
        turns = self._turns(lowered, choices)
        plan = plan_memory(lowered.fused, takes, turns, self.context.threads)
        key = self._graph_key(lowered, choices, turns)
        if self.config.debug_dir:
            fused = lowered.fused.graph
            folder, digest = self.config.debug_dir, key.digest()
            dump_graph(folder, digest, fused, lowered.tasks, choices)
            dump_turns(folder, digest, lowered.workloads, turns)
        segments = lowered.segments(choices)
        entries, keep, library = self._library(
            key, lowered, choices, (plan, turns), segments, checked
        )
        steps: list[Entry | LibraryCall] = []
        for segment in segments:
            if isinstance(segment, int):
                steps.append(_library_call(lowered.fused, segment, takes[segment], plan))
            else:
                steps.append(entries.pop(0))
        own = dict(zip(self.toolchain.own, entries, strict=False))  # none where nothing was built
        reports = tuple(choice.report(t, choices[t.workload]) for t in lowered.tasks)
        hoisted = lowered.hoisted
        return CompiledGraph(
            tuple(steps),
            plan,
            hoisted.graph,
            hoisted.prepare,
            hoisted.sources,
            reports,
            key.digest(),
            keep,
            tuple(own[n] for n in CHECKSUMS if n in own),
            own.get(COPIES),
            self.config.weights,
            library,
            turns[-1].phase if turns else 0,
            choices,
            overwritable(lowered.fused, lowered.one_pass(choices)),
        )

    def _choices(
        self,
        lowered: Lowered,
        graph: Graph,
        inputs: Sequence[Order],
        outputs: Sequence[Order],
    ) -> Mapping[str, Choice]:
        """How each kernel runs. Where it was chosen elsewhere, the library is in the cache then."""
        if self.elsewhere and (compiles := elsewhere.current()) is not None:
            config = self.config.replace(threads=self.context.threads)
            with self.timer.paused():
                made = compiles(config, graph, inputs, outputs)
            for phase, seconds in made.seconds.items():
                self.timer.add(phase, seconds)
            if all(task.workload in made.choices for task in lowered.tasks):
                return made.choices
        return kernels.choose(
            lowered.tasks,
            self.config,
            self.store,
            self.context,
            self.vendor,
            self.timer,
            self.tunings,
            executor=self.executor,
            may_tune=self.may_tune,
        )

    def missing(
        self, graph: Graph, inputs: Sequence[Order], outputs: Sequence[Order]
    ) -> list[exc.CacheMiss]:
        """What ``compile`` would have to tune or to build. Does neither."""
        lowered = self.lower(graph, inputs, outputs)
        choices = kernels.look_up(lowered.tasks, self.config, self.store, self.context)
        absent = [t for t in lowered.tasks if t.workload not in choices]
        if absent:
            return [kernels.miss([task], self.store, self.context, self.config) for task in absent]
        gate = self.checks()
        if gate is not None and (unchecked := gate.unchecked(lowered.tasks, choices)):
            return [not_run_yet([task], self.context) for task in unchecked]
        if self._is_built(lowered, choices):
            return []
        key = self._graph_key(lowered, choices, self._turns(lowered, choices))
        return [self._no_library(key)]

    def _kept(
        self, lowered: Lowered, choices: dict[str, Choice], held: Collection[PackLayout]
    ) -> dict[str, Choice]:
        """``choices`` that keep to ``held``, unless these would have to be built and may not."""
        kept = keep_to(lowered.tasks, choices, held)
        may = self.config.on_miss != "error"
        return kept if may or self._is_built(lowered, kept) else choices

    def _is_built(self, lowered: Lowered, choices: Mapping[str, Choice]) -> bool:
        if all(isinstance(segment, int) for segment in lowered.segments(choices)):
            return True
        key = self._graph_key(lowered, choices, self._turns(lowered, choices))
        return Libraries(self.store, self.toolchain).has(key)

    def _name_what_is_built(self, kernels: int) -> None:
        """Before it begins: without a library there is nothing to run, whatever the budget says."""
        budget = self.config.time_budget_s
        if budget is not None and self.timer.elapsed_s + kernels * BUILD_S > budget:
            text = "a library of %d kernels is built now, which may go beyond the budget of %g s"
            log.warning(text, kernels, budget)
        else:
            log.info("a library of %d kernels is built now", kernels)

    def _no_library(self, key: GraphKey) -> exc.CacheMiss:
        return exc.CacheMiss(f"library of graph {key.digest()[:12]}", {}, self.context.hint)

    def _turns(self, lowered: Lowered, choices: Mapping[str, Choice]) -> tuple[Turn, ...] | None:
        scheduled = {t.workload: (t, choices[t.workload].candidate) for t in lowered.tasks}
        return turns_of(lowered.fused, lowered.workloads, scheduled, self.context.threads)

    def _graph_key(
        self, lowered: Lowered, choices: Mapping[str, Choice], turns: Sequence[Turn] | None
    ) -> GraphKey:
        orders = sorted((i, list(o)) for i, o in lowered.fused.orders.items())
        described = [lowered.fused.graph.to_json(), orders]
        if turns is not None:
            described.append([list(astuple(t)) for t in turns])
        if lowered.cuts:
            described.append([to_text(lowered.cuts)])
        text = json.dumps(described, sort_keys=True, separators=(",", ":"))
        parts = sorted(f"{w}:{code_of(k)}" for w, k in lowered.scheduled(choices).items())
        return self.context.graph_key(text, parts)

    def _library(
        self,
        key: GraphKey,
        lowered: Lowered,
        choices: Mapping[str, Choice],
        planned: tuple[MemoryPlan, Sequence[Turn] | None],
        segments: Sequence[int | tuple[int, ...]],
        checked: Callable[[], None] | None,
    ) -> tuple[list[Entry], Any, str]:
        """The entry of every segment, from the cache or built now and published.

        Behind them are the toolchain's own; then what has to be kept, and the digest of the file.
        """
        names = [f"segment{i}" for i, s in enumerate(segments) if not isinstance(s, int)]
        if not names:
            return [], None, ""
        libraries = Libraries(self.store, self.toolchain)
        self.toolchain.prepare()
        if (known := libraries.loaded(key, names, checked)) is not None:
            return known[0], None, known[1]
        if self.config.on_miss == "error":
            raise self._no_library(key)
        if self.scratch is None:
            self._name_what_is_built(len(lowered.tasks))
        with self.timer.phase("build"):
            distinct = lowered.scheduled(choices)
            plan, turns = planned
            calls = {
                name: [
                    KernelCall(lowered.workloads[k], plan.arguments[k], turns[k] if turns else None)
                    for k in segment
                ]
                for name, segment in zip(
                    names, (s for s in segments if not isinstance(s, int)), strict=True
                )
            }
            kept = self.scratch or KeptKernels(self.store, self.context)
            own = (self.context.target, kept, plan.lines)
            library = self.toolchain.build(distinct, calls, len(plan.slots), *own)
            if checked is not None:
                checked()
            digest = "" if self.scratch else libraries.publish(key, library, len(choices))
            if digest and (known := libraries.loaded(key, names)) is not None:
                return known[0], None, known[1]
            return list(library.entries()), library.keep, digest


def _library_call(fused: FusedGraph, k: int, takes: Signature, plan: MemoryPlan) -> LibraryCall:
    n = len(takes.inputs)
    places = plan.arguments[k]
    return LibraryCall(fused.kernels[k].spec, places[:n], places[n : n + len(takes.outputs)])
