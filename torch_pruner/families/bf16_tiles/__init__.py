"""Matmul of bfloat16 by AMX: tiles of 16 by 16 sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.bf16_tiles import form
from torch_pruner.families.bf16_tiles.form import Bf16TilesDecisions
from torch_pruner.families.kinds import is_product
from torch_pruner.target import tiles_allowed

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class Bf16TilesFamily(Family):
    """See the module."""

    name = "bf16_tiles"
    decisions = Bf16TilesDecisions

    def matches(self, task: Task) -> bool:
        return is_product(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.bf16_tiles.space import Bf16TilesSketch

        return Bf16TilesSketch

    def parameters(self, spec: Graph, decisions: Bf16TilesDecisions[int]) -> Parameters:
        return form.parameters(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: Bf16TilesDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.bf16_tiles.emit import emit

        return emit(spec, decisions, signature)

    def allowed(self) -> bool:
        return tiles_allowed()


FAMILY = Bf16TilesFamily()
