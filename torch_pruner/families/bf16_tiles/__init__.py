"""Matmul of bfloat16 by AMX: tiles of 16 by 16 sums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.bf16_pairs import form
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

    def matches(self, task: Task) -> bool:
        return is_product(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.bf16_tiles.space import TilesSketch

        return TilesSketch

    def parameters(self, spec: Graph, decisions: Any) -> Parameters:
        return form.parameters(spec, self.name, decisions)

    def emit(
        self, spec: Graph, decisions: Any, signature: Signature, *, host: bool = False
    ) -> Emitted:
        from torch_pruner.families.bf16_tiles.emit import emit

        return emit(spec, decisions, signature)

    def allowed(self) -> bool:
        return tiles_allowed()


FAMILY = Bf16TilesFamily()
