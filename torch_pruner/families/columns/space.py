"""The space of reductions over outer axes, and of windows."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.columns.form import ColumnsDecisions, line_windows
from torch_pruner.families.space import Array
from torch_pruner.families.sweeps import (
    Sweep,
    inner_axis_kept,
)
from torch_pruner.graph.ops import ITEMSIZE, OpKind

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions, Symbols
    from torch_pruner.task import Task

# Measured on an Emerald Rapids: of every line that is reduced one vector is read, and the next one
# after all lines, which takes longer than reading in order.
_APART = 1.6


class ColumnsSketch(Sweep[ColumnsDecisions[Array]]):
    """Every output element has its own accumulator; the output's innermost axis is vectorised."""

    name = "columns"
    decisions = ColumnsDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        nodes = task.spec.nodes
        if any(n.op == "window_argmax" for n in nodes):  # widened to int64 only as it is stored
            kept = [n for n in nodes if n.kind is OpKind.WINDOW]
            kept += [nodes[n.inputs[0]] for n in kept]
            item = max(4, *(ITEMSIZE[n.dtype] for n in kept))
            self.vl = max(1, task.target.vector_bytes // item)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return tuple(
            np.array(d, dtype=np.int64) for d in ([self.vl], self._chunks(), self._parallel())
        )

    def _steps(self) -> int:
        """Vectors, and the elements that are left: as slow as vectors, each."""
        shape = self.task.spec.nodes[self.task.spec.outputs[0]].shape
        line = shape[-1] if shape and shape[-1] >= 2 * self.vl else math.prod(shape)
        whole, rest = divmod(line, self.vl)
        return math.prod(shape) // max(line, 1) * (whole + rest)

    def symbols(self, decisions: Decisions) -> Symbols:
        spec = self.task.spec
        depth = 0.0
        for node in spec.nodes:
            if node.kind is OpKind.WINDOW:
                depth += math.prod(node.attr("kernel"))
            elif node.kind is OpKind.REDUCE:
                source = spec.nodes[node.inputs[0]].shape
                depth += math.prod(source[a] for a in node.attr("axes"))
        per_element = 1.0 + machine.pointwise_cycles(spec, set(range(len(spec.nodes))))
        near = inner_axis_kept(spec) or line_windows(spec)
        gather = 1.0 if near else self.vl * 1.0
        cycles = np.full(len(decisions), depth * max(machine.FMA_LATENCY, per_element) * gather)
        if near and all(n.kind is not OpKind.WINDOW for n in spec.nodes):
            moved = self._moved()
            rate = machine.bytes_per_cycle(np.full(len(decisions), moved), self.task.target)
            cycles = np.maximum(cycles, _APART * moved / self.steps / rate)
        return self._estimate(
            decisions, cycles, self.steps, depth * spec.nodes[spec.outputs[0]].numel
        )
