"""From an ATen graph, or one that was kept as bytes, to the call that runs it and was compared."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ParamSpec, TypeVar, cast

import torch

from torch_pruner import exc, fork_locks, log
from torch_pruner.compiler.remembered import captured, verdicts
from torch_pruner.config import OPTIONS, Config
from torch_pruner.devices import device_for, forked_threads, torch_device_of
from torch_pruner.dynamo.capture import torch_cache
from torch_pruner.dynamo.capture.torch_cache import SavedCall
from torch_pruner.dynamo.lower import activations, saved_statistics, serialization
from torch_pruner.dynamo.lower.program import describe
from torch_pruner.dynamo.run import cuda_graphs, reports
from torch_pruner.dynamo.run.build import build_graph
from torch_pruner.dynamo.run.checked import run_eager
from torch_pruner.dynamo.run.deferred import DeferredGraph
from torch_pruner.dynamo.run.finishing import AtenGraph, Finishing, proof_of
from torch_pruner.dynamo.run.written_back import written_back
from torch_pruner.log import PhaseTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import fx
    from torch.fx.node import Argument

    from torch_pruner.dynamo.lower.calls import BoxedCall, RuntimeValue

_counter = itertools.count()
_compile_lock = fork_locks.rlock()

aten = torch.ops.aten

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


@one_at_a_time
def build(graph: AtenGraph, config: Config, key: str | None = None) -> SavedCall:
    """The call of an ATen graph. ``key``: under which to keep what was captured.

    Where the graph has a ``takeover``, eager runs at first and the rest is done beside it.
    """
    gm, metadata, label = graph.gm, graph.metadata, graph.label
    kind = metadata.kind
    if not outputs(gm):
        return SavedCall(why="an empty graph", kind=kind, call=boxed(gm))
    saved_statistics.as_traced(gm)
    device = device_for(torch_device_of(gm), config)
    if kind == "forward":
        activations.keep_sources(gm, metadata.loose)
        activations.keep_apart(gm, metadata.loose, metadata.renewed)
    elif kind == "backward":
        activations.adopt(gm, graph.example_inputs)
    with graph.timer.phase("lower"):
        program = describe(
            gm, static=metadata.static, mutated=metadata.mutated, loose=metadata.loose,
            device=device.device, dtypes=device.dtypes,
            unrecordable=cuda_graphs.obstacle(gm) if device.replays else "",
        )  # fmt: skip
        program = replace(program, lasting=tuple(sorted(metadata.lasting)))
    result = SavedCall(kind=kind, settings=json.dumps(_settings(config)))
    try:
        result.blob = serialization.dumps(program, _identity(gm))
        if key and metadata.plain:
            captured.keep(device.compiler(config), key, result.blob, label)
    except serialization.UnsavableError as err:
        result.why = str(err)
    _let_views_copy(gm)
    finishing = Finishing(graph, program, device, result.blob)
    if graph.takeover is not None and program.regions and device.in_background:
        deferred = DeferredGraph(finishing, config, boxed(gm), graph.takeover)
        graph.takeover.add(deferred)
        result.call = deferred
    else:
        finished = finishing.finished(config, graph.timer)
        reports.add(finished.report)
        result.call = finished.call
    if metadata.loose:
        activations.report(outputs(gm))
    if device.builds_only:
        return SavedCall(why="a graph for a card that is not at hand", kind=kind, call=boxed(gm))
    return result


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
    if compared and not verdicts.remembered(compiler, proof_of(given.blob), built.compiled):
        raise torch_cache.NotUsableError(f"{label} was not compared with eager yet")
    reports.add(built.report(label, dict(timer.seconds), compiler.tunings))
    call: BoxedCall = built.call
    if config.cuda_graphs:
        call = cuda_graphs.recorded_or_not(built, given.kind, device, label)
        call = cuda_graphs.closing(call, given.kind, device)
    elif given.kind == "inference" and device.host_memory:
        built.overwrite(given.written)
    return written_back(call, given.written)


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


def _let_views_copy(gm: fx.GraphModule) -> None:
    """Makes the graph run in eager where an operator's strides are not those that were traced.

    Attention and normalisation lay their results as they like; a view of what was traced as dense
    is an error then, where the model's own ``reshape`` is none.
    """
    for node in gm.graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    gm.recompile()


def boxed(gm: fx.GraphModule) -> BoxedCall:
    def call(args: list[RuntimeValue]) -> list[RuntimeValue]:
        values = list(args)
        args.clear()
        return run_eager(gm, values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
