"""The space of elementwise kernels that turn what they read across."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.space import Array
from torch_pruner.families.sweeps import GATHERED_CYCLES, Sweep
from torch_pruner.families.transposed.form import TransposedDecisions, crossed
from torch_pruner.graph.strided import reads_apart

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions, Symbols
    from torch_pruner.task import Task

_TILES = (1, 2, 4, 8)
_SHUFFLED = 1.2  # cycles of an exchange between two vectors, for each of them
_APART = 0.6  # of what reading takes, where each line that is read is far from the one before


class TransposedSketch(Sweep[TransposedDecisions[Array]]):
    """Squares of operands that lie across are turned in registers."""

    name = "transposed"
    decisions = TransposedDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        found = crossed(task.spec, self.vl)
        assert found is not None
        self.crossing = found
        shape, (start, stop) = task.spec.nodes[task.spec.outputs[0]].shape, found.down
        self.down = -(-math.prod(shape[start:stop]) // self.vl)  # squares below each other
        self.across = -(-math.prod(shape[found.along :]) // self.vl)
        self.lead = math.prod(shape[:start]) * math.prod(shape[stop : found.along])

    def _steps(self) -> int:
        return self.lead * self.down * self.across

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        tiles = [t for t in _TILES if t == 1 or t <= self.down]
        return tuple(
            np.array(d, dtype=np.int64)
            for d in ([self.vl], tiles, self._chunks(), self._parallel())
        )

    def symbols(self, decisions: Decisions) -> Symbols:
        spec, turned = self.task.spec, len(self.crossing.nodes)
        nodes = set(range(len(spec.nodes)))
        cycles = 2.0 + machine.pointwise_cycles(spec, nodes) + len(spec.inputs)
        cycles += turned * (2.0 + _SHUFFLED * math.log2(self.vl))
        apart = max(0, reads_apart(spec, self.vl) - turned)
        cycles += apart * self.vl * GATHERED_CYCLES
        # Of a line of such an operand a square takes a vector; the next below it finds the rest.
        c, moved = self.columns(decisions), self._moved()
        rate = machine.bytes_per_cycle(np.full(len(decisions), moved), self.task.target)
        fetched = np.maximum(self.vl * cycles, moved / max(self.steps, 1) / rate)
        fetched += (
            _APART
            * turned
            * self.vl
            * self.task.target.vector_bytes
            / (rate * np.minimum(c.tile, 4))
        )
        return self._estimate(decisions, fetched, self.steps, spec.nodes[spec.outputs[0]].numel)
