"""Rows that are neighbours in memory: each lane of a vector reduces its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family
from torch_pruner.families.kinds import is_reduction
from torch_pruner.families.lane_per_row.form import LanePerRowDecisions

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class LanePerRowFamily(Family):
    """See the module."""

    name = "lane_per_row"
    decisions = LanePerRowDecisions

    def matches(self, task: Task) -> bool:
        return is_reduction(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.lane_per_row.space import LanePerRowSketch

        return LanePerRowSketch

    def emit(
        self,
        spec: Graph,
        decisions: LanePerRowDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.lane_per_row.emit import emit

        return emit(spec, decisions, signature)


FAMILY = LanePerRowFamily()
