"""Kernels of TVM MetaSchedule's own space: a trace says how, decisions say the layouts it chose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_pruner.families.base import Family, Parameters
from torch_pruner.families.metaschedule import form

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted, ScheduledKernel
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Candidate, Task


class MetaScheduleFamily(Family):
    """See the module. Its candidates come from the strategy of that name alone."""

    name = "metaschedule"

    def matches(self, task: Task) -> bool:
        return False  # MetaSchedule has a space of its own, which is not a sketch

    def space(self) -> type[Sketch]:
        raise LookupError("the space of MetaSchedule is TVM's: use the strategy of that name")

    def parameters(self, spec: Graph, decisions: Any) -> Parameters:
        return form.parameters(spec, decisions)

    def emit(
        self, spec: Graph, decisions: Any, signature: Signature, *, host: bool = False
    ) -> Emitted:
        raise LookupError("a trace makes a whole function: see schedule")

    def schedule(
        self,
        spec: Graph,
        candidate: Candidate,
        target: TargetSpec,
        *,
        host: bool = False,
        past_caches: bool = False,
    ) -> ScheduledKernel:
        from torch_pruner.families.metaschedule.emit import replay  # MetaSchedule: seconds

        signature = self.signature(spec, dict(candidate.decisions))
        return replay(spec, candidate, target, signature)


FAMILY = MetaScheduleFamily()
