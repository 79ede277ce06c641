"""The process that compiles: it is asked for graphs, and leaves what it made in the cache.

Started by ``queue`` through ``torch_pruner.tuner.measure.worker``, whose pipes it uses. It gives
way to everything else on the machine, and what it starts for timing does, too.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

import torch

from torch_pruner.background.request import Answer, CompileRequest
from torch_pruner.devices import device_for
from torch_pruner.log import PhaseTimer
from torch_pruner.tuner.measure.priority import give_way

if TYPE_CHECKING:
    from collections.abc import Callable

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
    timer = PhaseTimer()
    if request.config.threads:
        torch.set_num_threads(request.config.threads)
    compiler = device_for(torch.device("cpu"), request.config).compiler(request.config, timer)
    found = compiler.compile(request.graph, request.inputs, request.outputs)
    return Answer(found.choices, timer.seconds)


def make(_argument: str) -> CompileService:
    """What ``worker --relay`` calls, in a process of its own."""
    give_way()
    return CompileService()
