"""Matmul of bfloat16 by AVX512-BF16: register tiles of float32 sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.bf16_pairs import form
from torch_pruner.families.bf16_pairs.form import Bf16PairsDecisions
from torch_pruner.families.kinds import is_product

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.phases import Division
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class Bf16PairsFamily(Family):
    """See the module."""

    name = "bf16_pairs"
    decisions = Bf16PairsDecisions

    def matches(self, task: Task) -> bool:
        return is_product(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.bf16_pairs.space import Bf16PairsSketch

        return Bf16PairsSketch

    def parameters(self, spec: Graph, decisions: Bf16PairsDecisions[int]) -> Parameters:
        return form.parameters(spec, self.name, decisions.nv * form.COLUMNS, decisions.way)

    def serial(self, decisions: Mapping[str, int]) -> bool:
        return decisions["tasks"] == 1

    def division(self, spec: Graph, decisions: Bf16PairsDecisions[int]) -> Division | None:
        return form.division(spec, decisions)

    def emit(
        self,
        spec: Graph,
        decisions: Bf16PairsDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.bf16_pairs.emit import emit

        return emit(spec, decisions, signature)


FAMILY = Bf16PairsFamily()
