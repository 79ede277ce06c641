"""The ``torch.compile`` backend: AOTAutograd around our compiler, and the only fallback.

torch finds ``pruner`` through the entry point ``torch_dynamo_backends``; it is not registered by
decorator as well, since torch refuses one name twice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx

from torch_pruner import exc, log
from torch_pruner.compiler.remembered import captured
from torch_pruner.config import Config
from torch_pruner.devices import device_for, forked_threads
from torch_pruner.dynamo import distributed, failures, reports
from torch_pruner.dynamo.capture import capture_key, recompiles, torch_cache
from torch_pruner.dynamo.capture.aot_metadata import Ends
from torch_pruner.dynamo.capture.decompositions import decomposition_table
from torch_pruner.dynamo.capture.torch_cache import SavedCall
from torch_pruner.dynamo.lower import serialization
from torch_pruner.dynamo.run import graphs
from torch_pruner.dynamo.run.first_call import FirstCall
from torch_pruner.dynamo.run.graphs import boxed, label_of, next_name, outputs, restored
from torch_pruner.dynamo.sizes import buckets, sized_call, symbolic
from torch_pruner.log import PhaseTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Result = TypeVar("Result")

_log = log.logger(__name__)


@failures.raised_as_both
def pruner(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph.

    Raises ``OptionError`` for wrong options and, under ``on_miss="error"``, ``CacheMiss`` for what
    is missing when a function is first compiled; any other failure falls back to eager with one
    warning unless ``strict`` is set. What is raised is torch's ``BackendCompilerFailed``, too.
    """
    config = Config.from_options(mode, options)
    log.configure(config.log)
    return compile_dynamo_graph(gm, example_inputs, config)


def compile_dynamo_graph(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config: Config
) -> Callable[..., Any]:
    """``pruner`` with its options already read."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    forked_threads.watch()
    again = recompiles.seen(example_inputs)
    timer = PhaseTimer()
    name = next_name()
    reports.begin()
    config = distributed.without_tuning(config)
    restore = partial(restored, config=config, name=name, timer=timer)
    described = None if config.cuda_graphs else capture_key.describe(gm, example_inputs)
    compile_as = partial(_compile_aten, config=config, name=name, again=again, described=described)

    def aot() -> Callable[..., Any]:
        if described and (
            known := _captured_before(described, gm, example_inputs, config, name, restore)
        ):
            return known
        with timer.phase("capture"), torch_cache.riding(serialization.version(), restore) as kept:
            compiled: Callable[..., Any] = aot_autograd(
                fw_compiler=kept(partial(compile_as, kind="forward", timer=timer)),
                bw_compiler=kept(partial(compile_as, kind="backward", timer=PhaseTimer())),
                inference_compiler=kept(partial(compile_as, kind="inference", timer=timer)),
                partition_fn=min_cut_rematerialization_partition,
                decompositions=decomposition_table(),
            )(gm, list(example_inputs))
        return compiled

    eager = lambda: gm.forward  # noqa: E731
    return _spared(lambda: _or_eager(aot, eager, name, config), eager, name, again=again)


def _captured_before(
    described: str,
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    name: str,
    restore: Callable[[SavedCall], Callable[[list[Any]], list[Any]]],
) -> Callable[..., list[Any]] | None:
    """The call of a graph that a process before this one captured, if it can be used as it is."""
    devices = {value.device for value in example_inputs}
    if len(devices) != 1:
        return None
    try:
        compiler = device_for(devices.pop(), config).compiler(config)
        blob = captured.find(compiler, described)
        call = None if blob is None else restore(SavedCall(blob=blob))
    except (exc.PrunerError, torch_cache.NotUsableError, ValueError) as err:
        # Captured once more: damage is a miss, and what else is wrong will be wrong then, too.
        _log.debug("a captured graph is not used: %s", err)
        return None
    if call is None:
        return None
    first = FirstCall(
        lambda values: list(gm.forward(*values)), call, name, strict=config.strict,
        failed=lambda err: reports.failed(name, f"{type(err).__name__}: {err}"),
    )  # fmt: skip
    return lambda *inputs: first(list(inputs))


def inspect_dynamo_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    look: Callable[[fx.GraphModule, Sequence[Any], str], None],
) -> Callable[..., Any]:
    """Capture as for compiling, show each ATen graph to ``look`` and run it in eager."""
    from torch._dynamo.backends.common import aot_autograd

    name = next_name()

    def show(aten: fx.GraphModule, inputs: Sequence[Any], kind: str) -> Callable[..., Any]:
        look(aten, inputs, name if kind == "inference" else f"{name}.{kind}")
        return boxed(aten)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=partial(show, kind="forward"), bw_compiler=partial(show, kind="backward"),
        inference_compiler=partial(show, kind="inference"), decompositions=decomposition_table(),
    )(gm, list(example_inputs))  # fmt: skip
    return compiled


def _or_eager(
    attempt: Callable[[], Result],
    eager: Callable[[], Result],
    name: str,
    config: Config,
    *,
    quietly: bool = False,
) -> Result:
    """The fallback boundary: what goes wrong in ``attempt`` is reported once and eager runs.

    ``quietly``: what is attempted is a short cut, and what goes wrong will do so on the long way.
    """
    try:
        return attempt()
    except (exc.CacheMiss, exc.OptionError, torch._dynamo.exc.RestartAnalysis):
        raise  # the last is Dynamo's own: it captures once more, knowing better
    except Exception as err:
        if config.strict or config.fallback == "error":
            raise
        if quietly:
            _log.debug("%s: a short cut failed", name, exc_info=True)
            return eager()
        _log.warning("%s is not compiled and runs in eager: %s: %s", name, type(err).__name__, err)
        _log.debug("the failure", exc_info=True)
        reports.failed(name, f"{type(err).__name__}: {err}")
        return eager()


def _compile_aten(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    config: Config,
    name: str,
    kind: str,
    timer: PhaseTimer,
    again: bool,
    described: str | None,
) -> SavedCall:
    """``again``: other sizes of this function were compiled before. ``described``: under which
    name to keep what was captured."""
    label = label_of(name, kind)
    ends = Ends.of(example_inputs, kind, len(outputs(gm)))
    if config.max_sizes and symbolic.depends_on_sizes(gm):
        ends = replace(ends, loose=range(0))  # strides of one size are not those of another
        call = _sized(gm, example_inputs, ends, config, label, timer, again=again)
        return SavedCall(why="a graph of symbolic sizes", kind=kind, call=call)

    def eager() -> SavedCall:
        return SavedCall(why="a graph that eager runs", kind=kind, call=boxed(gm))

    def build() -> SavedCall:
        return graphs.build(gm, example_inputs, ends, config, label, timer, described)

    return _spared(lambda: _or_eager(build, eager, label, config), eager, label, again=again)


def _spared(
    attempt: Callable[[], Result], eager: Callable[[], Result], label: str, *, again: bool
) -> Result:
    """A miss at the first compilation of a function is raised; later ones are warned of once.

    The first was the time to refuse; a request is not failed for its size.
    """
    try:
        return attempt()
    except exc.CacheMiss as err:
        if not again:
            raise
        log.warn_once(_log, label, "sizes of %s run in eager: %s", label, str(err).split("\n")[0])
        reports.failed(label, f"{type(err).__name__}: {err}")
        return eager()


@dataclass(frozen=True, slots=True)
class _Quiet:
    """``sized_call.Larger`` whose failures cost nothing but what it would have spared."""

    larger: buckets.Buckets
    label: str
    config: Config

    def call(self, args: Sequence[Any], large: Sequence[Any], text: str) -> sized_call.Call | None:
        attempt = partial(self.larger.call, args, large, text)
        return _or_eager(attempt, lambda: None, self.label, self.config, quietly=True)

    def ready(self, args: Sequence[Any]) -> bool:
        attempt = partial(self.larger.ready, args)
        return _or_eager(attempt, lambda: False, self.label, self.config, quietly=True)


def _sized(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ends: Ends,
    config: Config,
    label: str,
    timer: PhaseTimer,
    *,
    again: bool,
) -> sized_call.SizedCall:
    """A call for many sizes. Tuned for those of the first capture; later ones run as drafted, or as
    the cache has them: nobody waits for tuning in the middle of a run."""

    def build_for(args: Sequence[Any], text: str, using: Config, timer: PhaseTimer) -> Any:
        name = f"{label}[{text}]"

        def build() -> SavedCall:
            graph = symbolic.with_sizes(gm, args)
            given = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
            return graphs.build(graph, given, ends, using, name, timer)

        return _or_eager(build, lambda: boxed(gm), name, using)

    def spared(attempt: Callable[[], Any], *, again: bool = True) -> Any:
        return _spared(attempt, lambda: boxed(gm), label, again=again)

    def later(args: Sequence[Any], text: str) -> Any:
        return spared(lambda: build_for(args, text, drafted, PhaseTimer()))

    def now(args: Sequence[Any], text: str) -> Any:
        return spared(lambda: build_for(args, text, first, timer), again=again)

    def general() -> Any:
        def build() -> SavedCall:
            return graphs.build(gm, example_inputs, ends, drafted, label, PhaseTimer())

        return spared(lambda: _or_eager(build, lambda: boxed(gm), label, drafted))

    tunes = config.on_miss == "tune" and config.effort != "none"
    drafted = config.replace(on_miss="fallback") if tunes else config
    first = drafted if again else config
    larger = _Quiet(buckets.Buckets(gm, ends, drafted, label), label, drafted)
    call = sized_call.SizedCall(
        gm, later, general, limit=config.max_sizes, name=label, larger=larger
    )
    if (given := symbolic.hinted(example_inputs)) is not None:
        call.prepare(given, now)
    return call
