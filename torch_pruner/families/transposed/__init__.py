"""Kernels without a reduction, some of whose operands lie across: squares of those are turned in
registers, so that every line of memory is read and written whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family
from torch_pruner.families.kinds import is_elementwise
from torch_pruner.families.transposed.form import TransposedDecisions, crossed

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class TransposedFamily(Family):
    """See the module."""

    name = "transposed"
    decisions = TransposedDecisions
    one_pass = True

    def matches(self, task: Task) -> bool:
        from torch_pruner.families.sweeps import lanes_of

        return is_elementwise(task.spec) and crossed(task.spec, lanes_of(task)) is not None

    def space(self) -> type[Sketch]:
        from torch_pruner.families.transposed.space import TransposedSketch

        return TransposedSketch

    def emit(
        self,
        spec: Graph,
        decisions: TransposedDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.transposed.emit import emit

        return emit(spec, decisions, signature)


FAMILY = TransposedFamily()
