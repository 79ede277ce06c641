"""The ``torch.compile`` backend: AOTAutograd around our compiler, and the only fallback.

torch finds ``pruner`` through the entry point ``torch_dynamo_backends``; it is not registered by
decorator as well, since torch refuses one name twice.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import fx

from torch_pruner import exc, log
from torch_pruner.compiler import captured, verdicts
from torch_pruner.config import OPTIONS, Config
from torch_pruner.dynamo import (
    activations,
    captures,
    cuda_graphs,
    ranks,
    reports,
    saved,
    sizes,
    torch_cache,
)
from torch_pruner.dynamo.build import build_graph
from torch_pruner.dynamo.checked import INT8_BOUND, TF32_BOUND, CheckedCall, run_eager
from torch_pruner.dynamo.decompositions import decomposition_table
from torch_pruner.dynamo.devices import device_of, platform_of
from torch_pruner.dynamo.ends import Ends
from torch_pruner.dynamo.program import describe
from torch_pruner.dynamo.torch_cache import SavedCall
from torch_pruner.log import PhaseTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Result = TypeVar("Result")

_log = log.logger(__name__)
_counter = itertools.count()
_compile_lock = (
    threading.RLock()
)  # one compilation at a time: two would disturb each other's timing


def pruner(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a Dynamo graph.

    Raises ``OptionError`` for wrong options and, under ``on_miss="error"``, ``CacheMiss``; any
    other failure falls back to eager with one warning unless ``strict`` is set.
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

    timer = PhaseTimer()
    name = f"graph{next(_counter)}"
    reports.begin()
    config = ranks.without_tuning(config)
    restore = partial(restored, config=config, name=name, timer=timer)
    described = None if config.cuda_graphs else captures.describe(gm, example_inputs)
    compile_as = partial(
        _compile_aten, config=config, name=name, again=_recompiles(), described=described
    )

    def aot() -> Callable[..., Any]:
        if described and (known := _captured_before(described, example_inputs, config, restore)):
            return known
        with timer.phase("capture"), torch_cache.riding(saved.version(), restore) as kept:
            compiled: Callable[..., Any] = aot_autograd(
                fw_compiler=kept(partial(compile_as, kind="forward", timer=timer)),
                bw_compiler=kept(partial(compile_as, kind="backward", timer=PhaseTimer())),
                inference_compiler=kept(partial(compile_as, kind="inference", timer=timer)),
                partition_fn=min_cut_rematerialization_partition,
                decompositions=decomposition_table(),
            )(gm, list(example_inputs))
        return compiled

    return _or_eager(aot, lambda: gm.forward, name, config)


def _captured_before(
    described: str,
    example_inputs: Sequence[Any],
    config: Config,
    restore: Callable[[SavedCall], Callable[[list[Any]], list[Any]]],
) -> Callable[..., list[Any]] | None:
    """The call of a graph that a process before this one captured, if it can be used as it is."""
    devices = {value.device for value in example_inputs}
    if len(devices) != 1:
        return None
    try:
        compiler = platform_of(devices.pop(), config).compiler(config)
        blob = captured.find(compiler, described)
        call = None if blob is None else restore(SavedCall(blob=blob))
    except (exc.PrunerError, torch_cache.NotUsableError, ValueError) as err:
        # Captured once more: damage is a miss, and what else is wrong will be wrong then, too.
        _log.debug("a captured graph is not used: %s", err)
        return None
    return None if call is None else lambda *inputs: call(list(inputs))


def inspect_dynamo_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    look: Callable[[fx.GraphModule, Sequence[Any], str], None],
) -> Callable[..., Any]:
    """Capture as for compiling, show each ATen graph to ``look`` and run it in eager."""
    from torch._dynamo.backends.common import aot_autograd

    name = f"graph{next(_counter)}"

    def show(aten: fx.GraphModule, inputs: Sequence[Any], kind: str) -> Callable[..., Any]:
        look(aten, inputs, name if kind == "inference" else f"{name}.{kind}")
        return _boxed(aten)

    compiled: Callable[..., Any] = aot_autograd(
        fw_compiler=partial(show, kind="forward"), bw_compiler=partial(show, kind="backward"),
        inference_compiler=partial(show, kind="inference"), decompositions=decomposition_table(),
    )(gm, list(example_inputs))  # fmt: skip
    return compiled


def _or_eager(
    attempt: Callable[[], Result], eager: Callable[[], Result], name: str, config: Config
) -> Result:
    """The fallback boundary: what goes wrong in ``attempt`` is reported once and eager runs."""
    try:
        return attempt()
    except (exc.CacheMiss, exc.OptionError):
        raise
    except Exception as err:
        if config.strict or config.fallback == "error":
            raise
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
    label = _label(name, kind)
    ends = Ends.of(example_inputs, kind, len(_outputs(gm)))
    if config.max_sizes and sizes.depends_on_sizes(gm):
        ends = replace(ends, loose=range(0))  # strides of one size are not those of another
        call = _sized(gm, example_inputs, ends, config, label, timer, again=again)
        return SavedCall(why="a graph of symbolic sizes", kind=kind, call=call)
    return _or_eager(
        lambda: _locked_build(gm, example_inputs, ends, config, label, timer, described),
        lambda: SavedCall(why="a graph that eager runs", kind=kind, call=_boxed(gm)),
        label,
        config,
    )


def _recompiles() -> bool:
    """Whether Dynamo has compiled what it compiles now before, for other sizes or types."""
    compile_id = torch._guards.CompileContext.current_compile_id()
    return bool(getattr(compile_id, "frame_compile_id", 0))


def _sized(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ends: Ends,
    config: Config,
    label: str,
    timer: PhaseTimer,
    *,
    again: bool,
) -> sizes.SizedCall:
    """A call for many sizes. Tuned for those of the first capture; later ones run as drafted, or as
    the cache has them: nobody waits for tuning in the middle of a run."""

    def build_for(args: Sequence[Any], text: str, using: Config, timer: PhaseTimer) -> Any:
        name = f"{label}[{text}]"

        def build() -> SavedCall:
            graph = sizes.with_sizes(gm, args)
            given = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
            return _locked_build(graph, given, ends, using, name, timer)

        return _or_eager(build, lambda: _boxed(gm), name, using)

    def spared(attempt: Callable[[], Any]) -> Any:
        try:
            return attempt()
        except exc.CacheMiss as err:
            # The first capture was the time to refuse; a request is not failed for its size.
            _log.warning("sizes of %s run in eager: %s", label, err)
            return _boxed(gm)

    def later(args: Sequence[Any], text: str) -> Any:
        return spared(lambda: build_for(args, text, drafted, PhaseTimer()))

    def general() -> Any:
        def build() -> SavedCall:
            return _locked_build(gm, example_inputs, ends, drafted, label, PhaseTimer())

        return spared(lambda: _or_eager(build, lambda: _boxed(gm), label, drafted))

    tunes = config.on_miss == "tune" and config.effort != "none"
    drafted = config.replace(on_miss="fallback") if tunes else config
    first = drafted if again else config
    call = sizes.SizedCall(gm, later, general, limit=config.max_sizes, name=label)
    if (given := sizes.hinted(example_inputs)) is not None:
        call.prepare(given, lambda args, text: build_for(args, text, first, timer))
    return call


def _outputs(gm: fx.GraphModule) -> Sequence[Any]:
    return cast("Sequence[Any]", gm.graph.output_node().args[0])


def _label(name: str, kind: str) -> str:
    return name if kind == "inference" else f"{name}.{kind}"


def _locked_build(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ends: Ends,
    config: Config,
    label: str,
    timer: PhaseTimer,
    described: str | None = None,
) -> SavedCall:
    with _compile_lock:
        return _build(gm, example_inputs, ends, config, label, timer, described)


def _build(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    ends: Ends,
    config: Config,
    label: str,
    timer: PhaseTimer,
    described: str | None,
) -> SavedCall:
    kind, static, mutated = ends.kind, ends.static, ends.mutated
    if not _outputs(gm):
        return SavedCall(why="an empty graph", kind=kind, call=_boxed(gm))
    platform = platform_of(device_of(gm), config)
    compiler = platform.compiler(config, timer)
    if kind == "backward":
        activations.adopt(gm, example_inputs)
    with timer.phase("lower"):
        program = describe(
            gm, static=static, mutated=mutated, loose=ends.loose, device=platform.device,
            dtypes=platform.dtypes,
        )  # fmt: skip
        built = build_graph(program, compiler, platform, fallback=config.fallback, name=label)
    if ends.loose:
        activations.report(_outputs(gm))
    reports.add(built.report(label, dict(timer.seconds), compiler.tunings))
    if platform.builds_only:
        return SavedCall(why="a graph for a card that is not at hand", kind=kind, call=_boxed(gm))
    call: Callable[[list[Any]], Any] = built.call
    if config.cuda_graphs:
        where = {"static": static, "kind": kind, "device": platform.device}
        call = cuda_graphs.recorded_or_not(gm, built, example_inputs, label, **where)
    result = SavedCall(kind=kind, settings=json.dumps(_settings(config)), call=call)
    try:
        if call is not built.call:
            raise saved.UnsavableError("a call that is replayed as a CUDA graph")
        result.blob = saved.dumps(program, _identity(gm))
        if described and ends.plain:
            captured.keep(compiler, described, result.blob, label)
    except saved.UnsavableError as err:
        result.why = str(err)
    if config.check != "first-call" or not built.compiled:
        return result
    # Once is once: a process before this one may have compared it, with the same kernels.
    proof = result.blob and _proof(result.blob)
    if proof is not None and verdicts.remembered(compiler, proof, built.compiled):
        return result

    def drop() -> None:
        for compiled in built.compiled:
            for task in compiled.tasks:
                compiler.store.drop_kernel(compiler.context.kernel_key(task.workload))
        reports.failed(label, "its first result differed from eager's")

    def confirm() -> None:
        if proof is not None:
            verdicts.remember(compiler, proof, built.compiled, label)

    least = INT8_BOUND if config.int8_weights else TF32_BOUND if compiler.tf32 else 0.0
    result.call = CheckedCall(
        gm, call, label, strict=config.strict, on_mismatch=drop, on_match=confirm,
        platform=platform, least_bound=least,
    )  # fmt: skip
    return result


def restored(
    given: SavedCall, *, config: Config, name: str, timer: PhaseTimer
) -> Callable[[list[Any]], list[Any]]:
    """The call of a graph that torch kept, with the kernels that the store has now.

    Raises ``NotUsableError`` if its results were never compared with eager's, with these kernels.
    """
    assert given.blob is not None
    label = _label(name, given.kind)
    with _compile_lock:
        with timer.phase("lower"):
            program = saved.loads(given.blob)
            platform = platform_of(program.device, config)
            compiler = platform.compiler(config, timer)
            # New kernels have to be compared with eager, for which there has to be a graph.
            asked = config.check == "first-call"
            compiler.may_tune = not asked
            try:
                built = build_graph(
                    program, compiler, platform, fallback=config.fallback, name=label
                )
            except exc.CacheMiss as err:
                if asked:
                    raise torch_cache.NotUsableError(str(err)) from err
                raise
        compared = asked and built.compiled
        if compared and not verdicts.remembered(compiler, _proof(given.blob), built.compiled):
            raise torch_cache.NotUsableError(f"{label} was not compared with eager yet")
        reports.add(built.report(label, dict(timer.seconds), compiler.tunings))
    return built.call


def _proof(blob: bytes) -> bytes:
    """What a comparison with eager is about: a program, and our own code that runs it."""
    return saved.version().encode() + blob


def _restored_alone(given: SavedCall) -> Callable[[list[Any]], list[Any]]:
    """The same where torch loads a graph of ``aot_compile`` and nobody compiles anything.

    There is no graph to compare with, and no other way to run it: nothing is checked.
    """
    config = Config.from_options(None, {**json.loads(given.settings), "check": "off"})
    log.configure(config.log)
    return restored(given, config=config, name=f"graph{next(_counter)}", timer=PhaseTimer())


torch_cache.set_default(_restored_alone)


def _settings(config: Config) -> dict[str, Any]:
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


def _boxed(gm: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    def call(args: list[Any]) -> list[Any]:
        values = list(args)
        args.clear()
        return run_eager(gm, values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
