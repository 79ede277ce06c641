"""From an ATen graph, or one that was kept as bytes, to the call that runs it and was compared."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

from torch_pruner import exc, fork_locks, log
from torch_pruner.compiler.remembered import captured, verdicts
from torch_pruner.config import OPTIONS, Config
from torch_pruner.devices import device_for, forked_threads, torch_device_of
from torch_pruner.dynamo.capture import torch_cache
from torch_pruner.dynamo.capture.torch_cache import SavedCall
from torch_pruner.dynamo.lower import activations, serialization
from torch_pruner.dynamo.lower.program import describe
from torch_pruner.dynamo.run import cuda_graphs, reports
from torch_pruner.dynamo.run.build import build_graph
from torch_pruner.dynamo.run.checked import (
    TF32_BOUND,
    CheckedCall,
    bound_of_weights,
    may_draw,
    run_eager,
)
from torch_pruner.dynamo.run.first_call import FirstCall
from torch_pruner.dynamo.run.written_back import written_back
from torch_pruner.log import PhaseTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx
    from torch.fx.node import Argument

    from torch_pruner.compiler.driver import Compiler
    from torch_pruner.devices.base import Device
    from torch_pruner.dynamo.capture.aot_metadata import AotMetadata
    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue
    from torch_pruner.dynamo.run.build import BuiltGraph

_counter = itertools.count()
_compile_lock = fork_locks.rlock()

P = ParamSpec("P")
Result = TypeVar("Result")


def next_name() -> str:
    """A name for a Dynamo graph, in logs and reports."""
    return f"graph{next(_counter)}"


def outputs(gm: fx.GraphModule) -> Sequence[Argument]:
    return cast("Sequence[Argument]", gm.graph.output_node().args[0])


def label_of(name: str, kind: str) -> str:
    return name if kind == "inference" else f"{name}.{kind}"


def one_at_a_time(function: Callable[P, Result]) -> Callable[P, Result]:
    """Two compilations at once would disturb each other's timing."""

    @functools.wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> Result:
        with _compile_lock:
            return function(*args, **kwargs)

    return locked


@dataclass(frozen=True, slots=True, eq=False)
class AtenGraph:
    """An ATen graph to compile: as AOTAutograd hands it over, or written down for some sizes."""

    gm: fx.GraphModule
    example_inputs: Sequence[RuntimeValue]
    metadata: AotMetadata
    label: str  # in logs and reports
    timer: PhaseTimer
    holds: Mapping[int, str] = field(default_factory=dict)  # as for ``build_graph``


@one_at_a_time
def build(graph: AtenGraph, config: Config, key: str | None = None) -> SavedCall:
    """The call of an ATen graph. ``key``: under which to keep what was captured."""
    gm, metadata, label = graph.gm, graph.metadata, graph.label
    kind = metadata.kind
    if not outputs(gm):
        return SavedCall(why="an empty graph", kind=kind, call=boxed(gm))
    device = device_for(torch_device_of(gm), config)
    compiler = device.compiler(config, graph.timer)
    if kind == "backward":
        activations.adopt(gm, graph.example_inputs)
    with graph.timer.phase("lower"):
        program = describe(
            gm, static=metadata.static, mutated=metadata.mutated, loose=metadata.loose,
            device=device.device, dtypes=device.dtypes,
        )  # fmt: skip
        built = build_graph(
            program, compiler, device, fallback=config.fallback, name=label, holds=graph.holds
        )
    if metadata.loose:
        activations.report(outputs(gm))
    reports.add(built.report(label, dict(graph.timer.seconds), compiler.tunings))
    if device.builds_only:
        return SavedCall(why="a graph for a card that is not at hand", kind=kind, call=boxed(gm))
    call: BoxedCall = built.call
    if config.cuda_graphs:
        call = cuda_graphs.recorded_or_not(
            gm, built, graph.example_inputs, label, static=metadata.static, kind=kind,
            device=device,
        )  # fmt: skip
    result = SavedCall(kind=kind, settings=json.dumps(_settings(config)), call=call)
    try:
        if call is not built.call:
            raise serialization.UnsavableError("a call that is replayed as a CUDA graph")
        result.blob = serialization.dumps(program, _identity(gm))
        if key and metadata.plain:
            captured.keep(compiler, key, result.blob, label)
    except serialization.UnsavableError as err:
        result.why = str(err)
    if built.compiled:
        first = _FirstResult(label, built, result.blob, compiler, device, config)
        result.call = first.watched(gm, call)
    return result


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

    def watched(self, gm: fx.GraphModule, call: BoxedCall) -> BoxedCall:
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
        least = bound_of_weights(config.rounded_bits) or (TF32_BOUND if self.compiler.tf32 else 0.0)
        return CheckedCall(
            gm, call, label, strict=config.strict, failed=self._failed, on_match=self._confirm,
            device=self.device, least_bound=least,
        )  # fmt: skip

    def _compared_before(self) -> bool:
        proof = _proof(self.blob) if self.blob else None
        return proof is not None and verdicts.remembered(self.compiler, proof, self.built.compiled)

    def _confirm(self) -> None:
        if self.blob:
            proof = _proof(self.blob)
            verdicts.remember(self.compiler, proof, self.built.compiled, self.label)

    def _failed_unasked(self, error: Exception) -> None:
        reports.failed(self.label, f"{type(error).__name__}: {error}")

    def _failed(self, error: Exception) -> None:
        label, compiler = self.label, self.compiler
        if not isinstance(error, exc.ResultMismatch):
            reports.failed(label, f"its first call failed: {type(error).__name__}: {error}")
            return
        for compiled in self.built.compiled:
            for task in compiled.tasks:
                compiler.store.drop_kernel(compiler.context.kernel_key(task.workload))
        reports.failed(label, "its first result differed from eager's")


@one_at_a_time
def restored(
    given: SavedCall,
    *,
    config: Config,
    name: str,
    timer: PhaseTimer,
    holds: Mapping[int, str] = MappingProxyType({}),
) -> BoxedCall:
    """The call of a graph that torch kept, with the kernels that the store has now.

    ``holds`` as for ``build_graph``.

    Raises ``NotUsableError`` if its results were never compared with eager's, with these kernels.
    """
    assert given.blob is not None
    label = label_of(name, given.kind)
    with timer.phase("lower"):
        program = serialization.loads(given.blob)
        device = device_for(program.device, config)
        compiler = device.compiler(config, timer)
        # New kernels have to be compared with eager, for which there has to be a graph.
        asked = config.check == "first-call"
        compiler.may_tune = not asked
        try:
            built = build_graph(
                program, compiler, device, fallback=config.fallback, name=label, holds=holds
            )
        except exc.CacheMiss as err:
            if asked:
                raise torch_cache.NotUsableError(str(err)) from err
            raise
    compared = asked and built.compiled
    if compared and not verdicts.remembered(compiler, _proof(given.blob), built.compiled):
        raise torch_cache.NotUsableError(f"{label} was not compared with eager yet")
    reports.add(built.report(label, dict(timer.seconds), compiler.tunings))
    return written_back(built.call, given.written)


def _proof(blob: bytes) -> bytes:
    """What a comparison with eager is about: a program, and our own code that runs it."""
    return serialization.version().encode() + blob


def _restored_alone(given: SavedCall) -> BoxedCall:
    """The same where torch loads a graph of ``aot_compile`` and nobody compiles anything.

    There is no graph to compare with, and no other way to run it: nothing is checked.
    """
    forked_threads.watch()
    config = Config.from_options(None, {**json.loads(given.settings), "check": "off"})
    log.configure(config.log)
    return restored(given, config=config, name=next_name(), timer=PhaseTimer())


torch_cache.set_default(_restored_alone)


def _settings(config: Config) -> dict[str, object]:
    """The options that differ from their defaults and mean the same on another machine."""
    local = ("cache_dir", "debug_dir", "tracker", "executor", "progress")
    default = Config()
    return {
        name: getattr(config, name)
        for name in OPTIONS
        if name not in local and getattr(config, name) != getattr(default, name)
    }


def _identity(gm: fx.GraphModule) -> str:
    """A digest of an ATen graph and of what goes in."""
    inputs = [str(n.meta.get("val")) for n in gm.graph.find_nodes(op="placeholder")]
    return hashlib.sha256("\n".join([gm.code, *inputs]).encode()).hexdigest()


def boxed(gm: fx.GraphModule) -> BoxedCall:
    def call(args: list[RuntimeValue]) -> list[RuntimeValue]:
        values = list(args)
        args.clear()
        return run_eager(gm, values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
