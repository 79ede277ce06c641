"""Attention's gradient in one kernel: weights are made again, tile by tile, and never kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.attention_gradient import form
from torch_pruner.families.attention_gradient.form import AttentionGradientDecisions
from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.kinds import is_attention_gradient

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class AttentionGradientFamily(Family):
    """See the module."""

    name = "attention_gradient"
    decisions = AttentionGradientDecisions

    def matches(self, task: Task) -> bool:
        return is_attention_gradient(task.spec)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.attention_gradient.space import AttentionGradientSketch

        return AttentionGradientSketch

    def parameters(self, spec: Graph, decisions: AttentionGradientDecisions[int]) -> Parameters:
        return Parameters(scratch=form.scratch(spec, decisions))

    def serial(self, decisions: Mapping[str, int]) -> bool:
        return decisions.get("tasks") == 1

    def emit(
        self,
        spec: Graph,
        decisions: AttentionGradientDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.attention_gradient.emit import emit

        return emit(spec, decisions, signature)


FAMILY = AttentionGradientFamily()
