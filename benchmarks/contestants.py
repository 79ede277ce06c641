"""The compilers and runtimes that compete on one network, each as a function without arguments.

In: a network, its inputs and the number of threads. Out: a call that computes the outputs. Whatever
a contestant cannot do is an exception with the reason. Nothing is imported before it is wanted, so
that a peer that is not installed is a reason like any other.
"""

from __future__ import annotations

import faulthandler
import signal
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import models
from benchmarks.conversion import positional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from torch import nn

GRACE_S = 30.0
"""A contestant that is still busy so long after its time limit takes the process with it."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The same for every contestant. ``onnx`` names the file for each runtime that wants one.

    ``options`` are those of pruner's contestants, ``quick`` and ``drafts`` what those
    of lower effort have instead, ``stock`` what the one has whose kernels MetaSchedule finds.
    """

    module: nn.Module
    inputs: models.Inputs
    precision: str
    threads: int
    options: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    onnx: Mapping[str, str] = field(default_factory=dict)
    stock: Mapping[str, Any] = field(default_factory=dict)
    drafts: Mapping[str, Any] = field(default_factory=dict)


class TookTooLong(TimeoutError):
    """A contestant was not ready within its time limit."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raises ``TookTooLong`` in the block after ``seconds``; native code that does not come back
    ends the process a little later. Only in the main thread; None: no limit."""
    if seconds is None:
        yield
        return

    def late(_signal: int, _frame: object) -> None:
        raise TookTooLong(f"not ready within {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    try:
        faulthandler.dump_traceback_later(seconds + GRACE_S, exit=True)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def eager(setting: Setting) -> Callable[[], object]:
    module, inputs = setting.module, setting.inputs
    return lambda: models.call(module, inputs)


def _compiled(**options: Any) -> Callable[[Setting], Callable[[], object]]:
    def prepare(setting: Setting) -> Callable[[], object]:
        function = torch.compile(setting.module, backend="inductor", options=options)
        return lambda: models.call(function, setting.inputs)

    return prepare


def pruner(setting: Setting) -> Callable[[], object]:
    return _ours(setting, setting.options)


def pruner_quick(setting: Setting) -> Callable[[], object]:
    """With the default effort and budget, and a cache of its own: it takes nothing from ``full``
    and gives nothing."""
    return _ours(setting, setting.quick)


def pruner_none(setting: Setting) -> Callable[[], object]:
    """With drafts that nothing measured, and a cache of its own."""
    return _ours(setting, setting.drafts)


def metaschedule(setting: Setting) -> Callable[[], object]:
    """Kernels as MetaSchedule finds them in its own space, in the programs that hold ours."""
    return _ours(setting, setting.stock)


def _ours(setting: Setting, options: Mapping[str, Any]) -> Callable[[], object]:
    options = {"threads": setting.threads, **options}
    function = torch.compile(setting.module, backend="pruner", options=options)
    return lambda: models.call(function, setting.inputs)


def onnxruntime(setting: Setting) -> Callable[[], object]:
    import onnxruntime as runtime

    options = runtime.SessionOptions()
    options.intra_op_num_threads = setting.threads
    options.inter_op_num_threads = 1
    options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.log_severity_level = 3
    session = runtime.InferenceSession(
        setting.onnx["onnxruntime"], options, providers=["CPUExecutionProvider"]
    )
    names = [value.name for value in session.get_inputs()]
    arrays = (x.numpy() for x in positional(setting.inputs))
    feeds = dict(zip(names, arrays, strict=True))
    return lambda: session.run(None, feeds)


def openvino(setting: Setting) -> Callable[[], object]:
    import openvino as runtime

    core = runtime.Core()
    hint = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[setting.precision]
    compiled = core.compile_model(
        core.read_model(setting.onnx["openvino"]),
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": hint,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": setting.threads,
        },
    )
    request = compiled.create_infer_request()
    # The model is in float32 whatever the hint says.
    values = [x.float() if x.is_floating_point() else x for x in positional(setting.inputs)]
    feeds = {k: x.numpy() for k, x in enumerate(values)}
    outputs = range(len(compiled.outputs))

    def call() -> object:
        found = request.infer(feeds, share_inputs=True, share_outputs=True)
        return [found[k] for k in outputs]

    return call


PREPARE: dict[str, Callable[[Setting], Callable[[], object]]] = {
    "eager": eager,
    "onnxruntime": onnxruntime,
    "openvino": openvino,
    "inductor": _compiled(),
    "inductor-freezing": _compiled(freezing=True),
    "inductor-max": _compiled(freezing=True, max_autotune=True),
    "metaschedule": metaschedule,
    "pruner-none": pruner_none,
    "pruner-quick": pruner_quick,
    "pruner": pruner,
}
"""In the order in which they are prepared: what can crash comes before what takes long."""

FROM_ONNX = ("onnxruntime", "openvino")
OURS = ("metaschedule", "pruner-none", "pruner-quick", "pruner")


def as_tensors(outputs: object) -> object:
    """The outputs of a runtime as torch tensors; a module's are returned as they are."""
    if isinstance(outputs, list):
        return [torch.from_numpy(x) for x in outputs]
    return outputs
