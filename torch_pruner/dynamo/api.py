"""The Python interface: pre-warm a model, ship its kernels, look at what would be compiled."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from torch_pruner import exc
from torch_pruner.background.queue import shared_queue
from torch_pruner.compiler import bundles, drafting, kernels, stores
from torch_pruner.compiler.checks import reason_of
from torch_pruner.compiler.remembered import history, seen
from torch_pruner.config import Config
from torch_pruner.devices import bundle_device, device_for, metering, torch_device_of
from torch_pruner.dynamo import backend
from torch_pruner.dynamo.capture import aot_metadata, recurrent_modules
from torch_pruner.dynamo.explanation import Explanation, GraphExplanation, TaskExplanation
from torch_pruner.dynamo.lower.bounds import flag_spec
from torch_pruner.dynamo.lower.partition import Region, partition
from torch_pruner.dynamo.lower.tensors import spec_of
from torch_pruner.dynamo.ready import missing_of
from torch_pruner.dynamo.run import narrow_weights, reports
from torch_pruner.dynamo.run.build import as_narrow, held_by
from torch_pruner.dynamo.run.distributed import sync_cache
from torch_pruner.dynamo.run.originals import free_originals
from torch_pruner.graph.describe import flops_of
from torch_pruner.log import PhaseTimer
from torch_pruner.report import GraphReport, OpFallback, Report

if TYPE_CHECKING:
    import os

    from torch_pruner.compiler.bundles import Manifest
    from torch_pruner.compiler.choice import Choice
    from torch_pruner.compiler.driver import Compiler
    from torch_pruner.dynamo.lower.calls import DynamoCall, RuntimeValue
    from torch_pruner.task import Task

__all__ = [
    "Explanation",
    "GraphExplanation",
    "Inputs",
    "Report",
    "TaskExplanation",
    "check_ready",
    "explain",
    "free_originals",
    "last_report",
    "load_bundle",
    "save_bundle",
    "sync_cache",
    "tune",
    "tune_seen",
    "wait",
]

Inputs = tuple[Any, ...] | Mapping[str, Any]


def tune(
    model: torch.nn.Module,
    inputs: Inputs | Sequence[Inputs],
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
    *,
    backward: bool = False,
) -> Report:
    """Compile ``model`` for every one of ``inputs``, tune what the cache lacks, and publish it.

    ``inputs`` is a tuple of arguments, a dict of keyword arguments, or a list of these. With
    ``backward`` the gradients of all floating-point outputs are compiled too. The model's
    parameters and buffers are left as they are.

    Example:
        report = torch_pruner.tune(model, [(x,), {"input": longer}], {"effort": "quick"})
        assert report.complete, report
    """
    config = Config.from_options(mode, options).replace(compile="blocking")
    with reports.collect() as graphs:
        try:
            _run(model, _input_sets(inputs), config, backward=backward)
        except torch._dynamo.exc.BackendCompilerFailed as err:
            if isinstance(err.inner_exception, exc.PrunerError):
                raise err.inner_exception from None
            raise
    return Report(tuple(graphs))


def tune_seen(
    options: Mapping[str, object] | None = None, mode: str | None = None, *, device: str = "cpu"
) -> Report:
    """Tune what the cache has noted: kernels that ran untuned because no one was to wait for them.

    Those are of sizes that came later than the first (``dynamic=True``) and of
    ``on_miss="fallback"``, of this device, with these numbers of threads and options. Needs no
    model. Of the report, ``ops_total`` counts kernels.

    Example:
        report = torch_pruner.tune_seen({"time_budget_s": 600.0})  # at night, say
        print(report)
    """
    config = Config.from_options(mode, options)
    timer = PhaseTimer()
    metering.expect((torch.empty(0, device=device),), config)
    compiler = device_for(torch.device(device), config).compiler(config, timer)
    with reports.collect() as graphs:
        if tasks := tuple(seen.tune_noted(compiler)):
            flops = sum(t.flops for t in tasks)
            counts = (len(tasks), len(tasks), flops, flops, 0)
            seconds, tunings = dict(timer.seconds), tuple(compiler.tunings)
            trials = sum(t.trials for t in tasks)
            reports.add(
                GraphReport(
                    "seen", *counts, tasks=tasks, seconds=seconds, trials=trials, tunings=tunings
                )
            )
    return Report(tuple(graphs))


def explain(
    model: torch.nn.Module,
    inputs: Inputs | Sequence[Inputs],
    options: Mapping[str, object] | None = None,
) -> Explanation:
    """What would be compiled, and why not the rest.

    Captures only: nothing is tuned, built or run, and a cache that is not there is not made.

    Example:
        found = torch_pruner.explain(model, (x,))
        for graph in found.graphs:
            print(graph.name, graph.ops_compiled, graph.ops_total, graph.rejections)
    """
    config = Config.from_options(None, options)
    found: list[GraphExplanation] = []

    def look(gm: torch.fx.GraphModule, example_inputs: Sequence[RuntimeValue], name: str) -> None:
        found.append(_explain_graph(gm, example_inputs, config, name))

    with stores.looking():
        _run(model, _input_sets(inputs), config, backward=False, look=look)
    return Explanation(tuple(found))


def check_ready(
    model: torch.nn.Module,
    inputs: Inputs | Sequence[Inputs],
    options: Mapping[str, object] | None = None,
) -> None:
    """Return if the cache has every kernel and library that ``model`` needs for all of ``inputs``.

    Call it before serving, with the options of serving: whatever ``on_miss`` is, nothing is tuned,
    timed or built. The model runs in eager, once on each of the inputs. Raises ``CacheMiss`` whose
    ``missing`` lists all that is not there; with ``effort="full"`` also what was tuned for less.

    Example:
        try:
            torch_pruner.check_ready(model, [(x,), (longer,)], {"cache_dir": "kernels"})
        except exc.CacheMiss as miss:
            sys.exit(f"not ready to serve: {miss}")
    """
    config = Config.from_options(None, options).replace(on_miss="error")
    misses: list[exc.CacheMiss] = []

    def look(gm: torch.fx.GraphModule, example_inputs: Sequence[RuntimeValue], name: str) -> None:
        misses.extend(missing_of(gm, example_inputs, config))

    _run(model, _input_sets(inputs), config, backward=False, look=look)
    if misses:
        raise exc.CacheMiss.of(misses)


def save_bundle(
    path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    report: Report | None = None,
    sign: bytes | None = None,
    device: str = "cpu",
) -> Manifest:
    """Write everything the cache has for a device, or only the kernels of ``report``, to a file.

    ``device`` is "cpu", a GPU ("cuda", "cuda:1"), or the name of a card that kernels were built for
    (``target``). ``sign`` is a secret of at least 16 bytes that whoever loads the bundle can ask
    for. Raises ``OSError`` where the file cannot be written.

    Example:
        report = torch_pruner.tune(model, (x,))
        torch_pruner.save_bundle("kernels.bundle", report=report, sign=secret)
    """
    found = bundle_device(device)
    return bundles.save_bundle(path, cache_dir=cache_dir, report=report, sign=sign, device=found)


def load_bundle(
    path: str | os.PathLike[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    as_seed: bool = False,
    require_signature: bytes | None = None,
    device: str = "cpu",
) -> Manifest:
    """Check a whole bundle, then merge it into the cache; of two kernels the better one stays.

    With ``as_seed`` its schedules are where tuning starts on ``device``, whatever it was made on,
    and nothing of it runs untimed. Raises ``IncompatibleBundle`` for another device or version, a
    damaged file, or a signature other than ``require_signature`` gives, and ``CacheDirectoryError``
    where the cache cannot be written.

    Example:
        torch_pruner.load_bundle("kernels.bundle", cache_dir="kernels", require_signature=secret)
    """
    return bundles.load_bundle(
        path,
        cache_dir=cache_dir,
        as_seed=as_seed,
        require_signature=require_signature,
        device=bundle_device(device),
    )


def last_report() -> Report | None:
    """The report of the most recent compilation in this process, or None before the first.

    Example:
        compiled = torch.compile(model, backend="pruner")
        compiled(x)
        print(torch_pruner.last_report())
    """
    return reports.last()


def wait(timeout: float | None = None) -> bool:
    """Wait until nothing is compiled in the background any more (``compile="background"``).

    ``timeout`` is in seconds; without one it takes as long as it takes. Returns whether everything
    is done. Raises what went wrong in graphs that were compiled with ``strict``, the first of it
    once.

    Example:
        compiled = torch.compile(model, backend="pruner", options={"compile": "background"})
        compiled(x)  # eager's result, at once
        torch_pruner.wait()
        compiled(x)  # tuned
    """
    return shared_queue().wait(timeout)


def _input_sets(inputs: Inputs | Sequence[Inputs]) -> list[Inputs]:
    if isinstance(inputs, list):
        return inputs
    if isinstance(inputs, (tuple, Mapping)):
        return [inputs]
    raise exc.UnsupportedModel(
        "inputs", f"a {type(inputs).__name__} is not a tuple, a dict or a list of these"
    )


def _run(
    model: torch.nn.Module,
    sets: Sequence[Inputs],
    config: Config,
    *,
    backward: bool,
    look: backend.Look | None = None,
) -> None:
    """Call a compiled copy once per input set.

    With ``look``, graphs are shown to it and run in eager.
    """

    @recurrent_modules.traced
    def compile_graph(
        gm: torch.fx.GraphModule, example_inputs: Sequence[RuntimeValue]
    ) -> DynamoCall:
        if look is None:
            return backend.compile_dynamo_graph(gm, example_inputs, config)
        return backend.inspect_dynamo_graph(gm, example_inputs, look)

    torch._dynamo.reset()
    target = copy.deepcopy(model) if backward or model.training else model
    # Every shape is a graph of its own.
    compiled = torch.compile(target, backend=compile_graph, dynamic=False)
    for given in sets:
        with torch.set_grad_enabled(backward):
            out = compiled(**given) if isinstance(given, Mapping) else compiled(*given)
            if backward:
                total = sum(t.float().sum() for t in _tensors(out) if t.requires_grad)
                if isinstance(total, torch.Tensor):
                    torch.autograd.backward(total)
    torch._dynamo.reset()


def _tensors(value: object) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(
        value.to_tuple() if hasattr(value, "to_tuple") else value
    )
    return [t for t in leaves if isinstance(t, torch.Tensor)]


def _explain_graph(
    gm: torch.fx.GraphModule, example_inputs: Sequence[RuntimeValue], config: Config, name: str
) -> GraphExplanation:
    device = device_for(torch_device_of(gm), config)
    static = aot_metadata.static_inputs(len(example_inputs))
    dtypes = device.dtypes
    parts = partition(gm, static_inputs=static, dtypes=dtypes, device=device.device)
    compiler = device.compiler(config)
    holds = narrow_weights.holds(example_inputs, config)
    arguments = {n: k for k, n in enumerate(gm.graph.find_nodes(op="placeholder"))}
    tasks: dict[str, TaskExplanation] = {}
    partitions: list[str] = []
    for step in parts.steps:
        if not isinstance(step, Region):
            partitions.append("eager: " + ", ".join(str(n.target) for n in step.nodes[:8]))
            continue
        orders = [
            [spec_of(n.meta["val"]).order for n in nodes] for nodes in (step.inputs, step.outputs)
        ]
        shown = [spec.order for spec in flag_spec(step.flags)]
        reads = [arguments.get(n, -1) for n in step.inputs]
        graph, lie, _ = as_narrow(step.graph, orders[0], compiler, held_by(reads, holds))
        lowered = compiler.lower(graph, lie, orders[1] + shown)
        partitions.append(
            f"compiled: {len(step.nodes)} operators in {len(lowered.fused.kernels)} kernel calls"
        )
        known = kernels.look_up(lowered.tasks, config, compiler.store, compiler.context)
        for task in lowered.tasks:
            again = tasks.get(task.workload)
            calls = task.weight + (again.weight if again else 0)
            tasks[task.workload] = replace(
                _explain_task(task, compiler, known.get(task.workload)), weight=calls
            )
    rejections = tuple(OpFallback(r.node, str(r.kind), r.detail) for r in parts.rejections)
    return GraphExplanation(
        name,
        parts.ops_total,
        parts.ops_compiled,
        parts.flops_total,
        parts.flops_compiled,
        tuple(partitions),
        tuple(tasks.values()),
        rejections,
    )


def _explain_task(task: Task, compiler: Compiler, known: Choice | None) -> TaskExplanation:
    out = task.spec.nodes[task.spec.outputs[0]]
    differs: Mapping[str, tuple[object, object]] = {}
    timed = known is not None and math.isfinite(known.latency_s)
    key = compiler.context.kernel_key(task.workload)
    effort, trials = history.progress(compiler.store, key)
    if known is None:
        nearest = compiler.store.nearest(key)
        differs = key.diff(nearest) if nearest is not None else {}
    shape = "x".join(map(str, out.shape)) or "scalar"
    return TaskExplanation(
        task.name,
        task.workload,
        shape,
        out.dtype,
        task.weight,
        flops_of(task.spec),
        known is not None,
        differs,
        known.sketch if known is not None else "",
        known.latency_s if known is not None and timed else None,
        effort,
        trials,
        _why_another(task, compiler, known),
        tuple(f.to_json() for f in history.finalists(compiler.store, key)),
    )


def _why_another(task: Task, compiler: Compiler, known: Choice | None) -> str:
    """How a worker saw the draft fail, where another schedule runs in its place."""
    checks = compiler.checks()
    if checks is None or known is None or math.isfinite(known.latency_s):
        return ""
    draft = drafting.draft(task)
    failures = [r for r in checks.failures(task) if r.candidate == draft]
    return f"{draft.sketch}: {reason_of(failures[0])}" if failures else ""
