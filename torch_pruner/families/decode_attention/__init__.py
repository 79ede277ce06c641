"""Attention of few queries over many keys, as decoding has it, in one kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.decode_attention import form
from torch_pruner.families.decode_attention.form import DecodeDecisions
from torch_pruner.families.kinds import is_attention

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class DecodeAttentionFamily(Family):
    """See the module."""

    name = "decode_attention"
    decisions = DecodeDecisions

    def matches(self, task: Task) -> bool:
        return is_attention(task.spec) and self.space().fits(task)

    def space(self) -> type[Sketch]:
        from torch_pruner.families.decode_attention.space import DecodeAttentionSketch

        return DecodeAttentionSketch

    def parameters(self, spec: Graph, decisions: DecodeDecisions[int]) -> Parameters:
        return Parameters(scratch=form.scratch(spec, decisions))

    def serial(self, decisions: Mapping[str, int]) -> bool:
        return decisions["tasks"] == 1

    def combines_last(self, spec: Graph, decisions: DecodeDecisions[int]) -> bool:
        return decisions.shares > 1

    def emit(
        self,
        spec: Graph,
        decisions: DecodeDecisions[int],
        signature: Signature,
        *,
        host: bool = False,
    ) -> Emitted:
        from torch_pruner.families.decode_attention.emit import emit

        return emit(spec, decisions, signature)


FAMILY = DecodeAttentionFamily()
