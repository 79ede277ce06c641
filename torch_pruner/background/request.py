"""What the process that compiles is asked for, and what it answers: values and their messages."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch_pruner.compiler.choice import Choice
from torch_pruner.config import OPTIONS, Config
from torch_pruner.graph.ir import Graph
from torch_pruner.log import PHASES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.graph.layout import Order
    from torch_pruner.tuner.measure.protocol import Message


NICE: Mapping[str, int] = MappingProxyType({"none": 9, "quick": 5, "full": 13})
"""By effort. While eager serves, it is to keep 0.8 of its rate; drafted programs are faster, and
keep more than that beside a search of seconds; one of hours is hardly to be noticed."""


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """A graph to compile for the CPU under ``config``; what is made is in its cache then.

    ``inputs`` and ``outputs`` give the memory order of each.
    """

    config: Config
    graph: Graph
    inputs: tuple[Order, ...]
    outputs: tuple[Order, ...]

    @property
    def times_vendor(self) -> bool:
        """Whether torch's own kernels may have to be timed for it."""
        config = self.config
        return config.effort != "none" and config.on_miss == "tune" and config.library

    @property
    def nice(self) -> int:
        """How much the process gives way, of 0 to 19: see docs/background.md for the figures."""
        if not self.times_vendor:
            return NICE["none"]
        return NICE[self.config.effort]

    def to_message(self) -> Message:
        """As a frame for the process; ``from_message`` is the inverse."""
        return {
            "cmd": "compile",
            "options": {name: getattr(self.config, name) for name in OPTIONS},
            "graph": self.graph.to_json(),
            "inputs": [list(order) for order in self.inputs],
            "outputs": [list(order) for order in self.outputs],
        }

    @staticmethod
    def from_message(message: Message) -> CompileRequest:
        """Raises ``KeyError``, ``TypeError`` or ``ValueError`` for what is no request."""
        return CompileRequest(
            Config.from_options(None, message["options"]),
            Graph.from_json(message["graph"]),
            _orders(message["inputs"]),
            _orders(message["outputs"]),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What compiling did: how every kernel is to run, by workload, and seconds by phase."""

    choices: Mapping[str, Choice]
    seconds: Mapping[str, float]

    def to_message(self) -> Message:
        """As a frame for who asked; ``from_message`` is the inverse."""
        choices = {workload: choice.to_json() for workload, choice in self.choices.items()}
        return {"ok": True, "choices": choices, "seconds": dict(self.seconds)}

    @staticmethod
    def from_message(message: Message) -> Answer:
        """Raises an exception of Python's own for what is no answer."""
        choices = {str(w): Choice.from_json(c) for w, c in message["choices"].items()}
        seconds = {k: float(v) for k, v in message["seconds"].items() if k in PHASES}
        return Answer(choices, seconds)


def _orders(given: Sequence[Sequence[int]]) -> tuple[Order, ...]:
    return tuple(tuple(map(int, order)) for order in given)
