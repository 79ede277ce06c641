"""The space of recurrences: tiles of rows and units, and how tasks share them out."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.recurrence.form import RecurrenceDecisions, recurrence_of
from torch_pruner.families.space import Array, Mask, Sketch, Symbols

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions
    from torch_pruner.task import Task

_VECTORS = (1, 2, 3, 4, 6, 8)  # of units, for each gate
_ROWS = (1, 2, 3, 4, 5, 6, 8, 12)
_UNROLLED = (1, 2, 4, 8)
_PER_THREAD = (1, 2, 4)
# Vectors' worth of instructions behind the sums of a vector of units.
_GATE_CYCLES = {"lstm": 5 * machine.EXPENSIVE_CYCLES, "gru": 3 * machine.EXPENSIVE_CYCLES}
_BESIDES = 12.0  # cycles of a tile beside its sums
_SHOWN = 0.25  # of reading beside sums
_FETCHED = 200.0  # cycles of a panel that fetching the next one takes


class RecurrenceSketch(Sketch[RecurrenceDecisions[Array]]):
    """The steps of recurrent layers."""

    name = "recurrence"
    decisions = RecurrenceDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.found = recurrence_of(task.spec)
        lanes = max(1, task.target.vector_bytes // 4)
        while lanes > self.found.units:
            lanes //= 2
        self.lanes = lanes

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        found, threads = self.found, self.task.threads
        vectors = -(-found.units // self.lanes)
        rows = [n for n in range(1, found.rows + 1) if found.rows % n == 0 and n <= 4 * threads]
        many = sorted({min(threads * k, vectors) for k in _PER_THREAD})
        options = (
            [self.lanes],
            [n for n in _VECTORS if n <= vectors],
            [n for n in _ROWS if n <= found.rows],
            [n for n in range(1, found.gates + 1) if found.gates % n == 0],
            [n for n in _UNROLLED if n <= found.units],
            [0, 1],
            rows if threads > 1 else [1],
            sorted({1, *many}) if threads > 1 else [1],
            [0, 1] if threads > 1 else [0],
        )
        return tuple(np.array(o, dtype=np.int64) for o in options)

    def valid(self, decisions: Decisions) -> Mask:
        c, found = self.columns(decisions), self.found
        tasks = found.directions * c.rows * c.units
        registers = c.tm * c.nv * c.gates + c.tm + 1
        result: Mask = np.where(c.spread == 1, tasks > 1, (c.rows == 1) & (c.units == 1))
        result &= registers <= self.task.target.vector_registers
        result &= (c.units <= np.ceil(found.units / (c.vl * c.nv))) & (c.tm <= found.rows / c.rows)
        result &= (c.ahead == 0) | (c.tm < found.rows / c.rows)
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, found, target = self.columns(decisions), self.found, self.task.target
        ones = np.ones(len(decisions))
        width = c.vl * c.nv
        panels = np.ceil(np.ceil(found.units / width) / c.units)  # of a task
        rows = found.rows / c.rows
        vectors = c.nv * c.gates
        whole, rest = np.floor(rows / c.tm), rows % c.tm
        tiles = whole + (rest > 0)
        of_tile = self._tile_cycles(c, c.tm * ones)
        of_last = np.where(rest > 0, self._tile_cycles(c, np.maximum(rest, 1.0)), 0.0)
        bytes_of_panel = found.units * found.gates * width * 4.0
        # A panel comes from where all of a thread's weights are, and stays near for its rows.
        tasks = found.directions * c.rows * c.units
        rounds = np.where(c.spread == 1, np.ceil(tasks / self.task.threads), tasks)
        streamed = bytes_of_panel * panels * np.where(c.units > 1, rounds, 1.0)
        read = bytes_of_panel / machine.bytes_per_cycle(streamed, target)
        near = bytes_of_panel / machine.bytes_per_cycle(bytes_of_panel, target)
        again = (tiles - 1) * near  # a panel passes by once more for every tile
        begun = np.where(c.ahead == 1, near, read)
        summed = whole * of_tile + of_last
        cycles = _beside(summed, begun + again) + np.where(c.ahead == 1, _FETCHED, 0.0)
        cycles = np.maximum(cycles, read)
        step_s = panels * cycles / target.frequency_hz
        meeting = np.where(c.units > 1, machine.BARRIER_S, 0.0)
        launched = np.where(c.spread == 1, machine.LAUNCH_S, 0.0)
        seconds = found.steps * (rounds * step_s + meeting) + launched
        ops = 2.0 * found.steps * found.rows * found.directions * found.units**2 * found.gates
        return Symbols(
            c.tm * vectors + c.tm + 1, c.tm * vectors * found.units, bytes_of_panel, tasks,
            found.directions * found.units * found.units * found.gates * 4.0 * c.rows, rounds,
            width * found.gates * 4.0, ops * ones, seconds,
        )  # fmt: skip

    def _tile_cycles(self, c: RecurrenceDecisions[Array], rows: Array) -> Array:
        """Cycles of so many rows with a panel in the first cache, and of the gates behind."""
        found, groups = self.found, self.found.gates / c.gates
        position = machine.tile_step_cycles(
            rows, c.nv * c.gates, np.full(len(rows), 2.0), c.ku, self.task.target
        )
        vectors = rows * c.nv  # of units
        after = vectors * _GATE_CYCLES.get(found.op, machine.EXPENSIVE_CYCLES)
        # Sums of a group wait in the first cache for those of the others.
        kept = 2.0 * vectors * found.gates / machine.LOADS_PER_CYCLE * (groups > 1)
        cycles: Array = groups * found.units * position + kept + after + _BESIDES
        return cycles

    def default(self) -> Decisions:
        return self.best_predicted()


def _beside(summed: Array, read: Array) -> Array:
    """Cycles of sums whose weights come from caches meanwhile: a part of the reading shows.

    Fitted to an LSTM of 256 units and eight rows on an Intel Xeon with AVX-512: tiles that read a
    panel of 64 KiB twice from the second cache took a tenth longer than those that read it once.
    """
    result: Array = np.maximum(summed, read) + _SHOWN * np.minimum(summed, read)
    return result
