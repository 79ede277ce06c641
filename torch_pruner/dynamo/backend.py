"""The ``torch.compile`` backend: AOTAutograd around our compiler, and the only fallback.

torch finds ``pruner`` through the entry point ``torch_dynamo_backends``; it is not registered by
decorator as well, since torch refuses one name twice.
"""

from __future__ import annotations

import itertools
import threading
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from torch_pruner import exc, log
from torch_pruner.compiler.driver import Compiler
from torch_pruner.compiler.kernels import Context
from torch_pruner.compiler.stores import store_for
from torch_pruner.config import Config
from torch_pruner.dynamo import reports
from torch_pruner.dynamo.build import build_graph
from torch_pruner.dynamo.checked import CheckedCall, run_eager
from torch_pruner.dynamo.decompositions import decomposition_table
from torch_pruner.dynamo.vendor import AtenVendor
from torch_pruner.log import PhaseTimer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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
    compile_as = partial(_compile_aten, config=config, name=name)

    def aot() -> Callable[..., Any]:
        with timer.phase("capture"):
            compiled: Callable[..., Any] = aot_autograd(
                fw_compiler=partial(compile_as, kind="forward", timer=timer),
                bw_compiler=partial(compile_as, kind="backward", timer=PhaseTimer()),
                inference_compiler=partial(compile_as, kind="inference", timer=timer),
                partition_fn=min_cut_rematerialization_partition,
                decompositions=decomposition_table(),
            )(gm, list(example_inputs))
        return compiled

    return _or_eager(aot, lambda: gm.forward, name, config)


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
    attempt: Callable[[], Callable[..., Any]],
    eager: Callable[[], Callable[..., Any]],
    name: str,
    config: Config,
) -> Callable[..., Any]:
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
) -> Callable[..., Any]:
    label = name if kind == "inference" else f"{name}.{kind}"

    def attempt() -> Callable[..., Any]:
        with _compile_lock:
            return _build(gm, example_inputs, config, label, kind, timer)

    return _or_eager(attempt, lambda: _boxed(gm), label, config)


def _build(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: Config,
    label: str,
    kind: str,
    timer: PhaseTimer,
) -> Callable[..., Any]:
    if not gm.graph.output_node().args[0]:
        return _boxed(gm)
    store = store_for(config)
    threads = config.threads or torch.get_num_threads()
    compiler = Compiler(config, store, Context.make(config, threads), AtenVendor(), timer)
    with timer.phase("lower"):
        static = static_inputs(example_inputs) if kind == "inference" else frozenset()
        mutated = mutated_inputs() if kind == "inference" else ()
        built = build_graph(
            gm, compiler, static=static, mutated=mutated, fallback=config.fallback, name=label
        )
    report = built.report(label, dict(timer.seconds), compiler.tunings)
    reports.add(report)
    if config.check != "first-call" or not built.compiled:
        return built.call

    def drop() -> None:
        for compiled in built.compiled:
            for task in compiled.tasks:
                store.drop_kernel(compiler.context.kernel_key(task.workload))
        reports.failed(label, "its first result differed from eager's")

    return CheckedCall(gm, built.call, label, strict=config.strict, on_mismatch=drop)


def static_inputs(example_inputs: Sequence[Any]) -> frozenset[int]:
    """Positions of parameters and buffers that the graph itself does not change."""
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None:
        return frozenset()
    mutated = {i for i, info in enumerate(metadata.input_info) if info.mutates_data}
    return frozenset(
        i for i in metadata.static_input_indices if i not in mutated and i < len(example_inputs)
    )


def mutated_inputs() -> Sequence[int]:
    """Positions of the inputs whose new values are the graph's first outputs, in that order.

    Empty where torch does more with them than to copy the new value into the input.
    """
    context = torch._guards.TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or metadata.tokens:
        return ()
    positions: Sequence[int] = metadata.mutated_inp_runtime_indices
    infos = [metadata.input_info[i] for i in positions]
    return () if any(i.mutates_metadata or i.mutates_storage_metadata for i in infos) else positions


def _boxed(gm: fx.GraphModule) -> Callable[[list[Any]], list[Any]]:
    def call(args: list[Any]) -> list[Any]:
        values = list(args)
        args.clear()
        return run_eager(gm, values)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
