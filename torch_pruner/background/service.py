"""The process that compiles: it is asked for graphs, and leaves what it made in the cache.

Started by ``queue`` through ``torch_pruner.tuner.measure.worker``, whose pipes it uses. It gives
way to everything else on the machine, and what it starts for timing does, too.
"""

from __future__ import annotations

import importlib
import os
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.background.compile_process import VENDOR
from torch_pruner.background.request import Answer, CompileRequest
from torch_pruner.background.resting import RestingExecutor, cpu_seconds
from torch_pruner.compiler.context import Context
from torch_pruner.compiler.driver import Compiler
from torch_pruner.compiler.executors import local_executor
from torch_pruner.compiler.host_toolchain import HostToolchain
from torch_pruner.compiler.stores import store_for
from torch_pruner.log import PhaseTimer
from torch_pruner.tuner.measure.lean import without_torch
from torch_pruner.tuner.measure.meter import RAPL
from torch_pruner.tuner.measure.priority import give_way

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.graph.ir import Graph
    from torch_pruner.tuner.measure.base import MeasureExecutor
    from torch_pruner.tuner.measure.protocol import Message

MAX_ERROR = 4000  # characters


class CompileService:
    """Answers requests one by one; no exception leaves it."""

    def handle(self, message: Message, reply: Callable[[Message], None]) -> None:
        try:
            answer = compiled(CompileRequest.from_message(message)).to_message()
        except Exception as err:
            traceback.print_exc()
            text = f"{type(err).__name__}: {err}"
            answer = {"ok": False, "error": text[:MAX_ERROR]}
        reply(answer)


def compiled(request: CompileRequest) -> Answer:
    """Have everything that ``request`` needs in its cache. Raises what ``Compiler`` does."""
    timer, config = PhaseTimer(), request.config
    threads = config.threads or os.cpu_count() or 1
    compiler = Compiler(
        config, store_for(config), Context.make(config, threads),
        HostToolchain(threads, beside=False),
        executor=lambda: _executor(request, threads),
        vendor=_LateVendor(threads) if request.times_vendor else None, timer=timer,
    )  # fmt: skip
    found = compiler.compile(request.graph, request.inputs, request.outputs)
    return Answer(found.choices, timer.seconds)


def _executor(request: CompileRequest, threads: int) -> MeasureExecutor:
    """A search of hours rests while who asked for it, the parent of this process, is at work."""
    meter = RAPL if request.config.objective == "energy" else None
    found = local_executor(threads, request.config.seed, meter)
    if request.config.effort != "full":
        return found
    parent = os.getppid()
    return RestingExecutor(found, lambda: cpu_seconds(parent))


@dataclass(frozen=True, slots=True)
class _LateVendor:
    """torch's own kernels, imported when one is to be timed."""

    threads: int

    def runs(self, spec: Graph) -> bool:
        from torch_pruner.devices.aten import runs

        return runs(spec)

    def latency_s(self, spec: Graph) -> float | None:
        import torch

        from torch_pruner.devices.aten import AtenVendor

        torch.set_num_threads(self.threads)
        return AtenVendor().latency_s(spec)


def make(argument: str) -> CompileService:
    """What ``worker --relay`` calls, in a process of its own.

    ``argument``: how nice it is, and "vendor" where torch's kernels may have to be timed. torch has
    to be imported before TVM then, and not at all otherwise.
    """
    nice, _, vendor = argument.partition(" ")
    give_way(int(nice))
    if vendor != VENDOR:
        with without_torch():
            importlib.import_module("torch_pruner.codegen.build.program")
    return CompileService()
