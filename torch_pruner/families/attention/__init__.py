"""Attention in one kernel: tiles of queries whose scores stay in a core's cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.attention import form
from torch_pruner.families.attention.form import AttentionDecisions
from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.kinds import is_attention, weights_are_scaled

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class AttentionFamily(Family):
    """See the module."""

    name = "attention"
    decisions = AttentionDecisions

    def matches(self, task: Task) -> bool:
        return is_attention(task.spec) and not weights_are_scaled(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.attention.space import AttentionSketch

        return AttentionSketch

    def parameters(self, spec: Graph, decisions: AttentionDecisions[int]) -> Parameters:
        return Parameters(form.packs(spec, decisions), form.scratch(spec, decisions))

    def emit(
        self,
        spec: Graph,
        decisions: AttentionDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.attention.emit import emit

        return emit(spec, decisions, signature)


FAMILY = AttentionFamily()
