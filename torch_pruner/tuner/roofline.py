"""A lower bound on the latency of a task: reaching it ends the search for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.graph.contraction import contraction_at
from torch_pruner.graph.ops import FLOATS, OpKind

if TYPE_CHECKING:
    from torch_pruner.task import Task


def roofline_s(task: Task) -> float:
    """Seconds that the contraction's arithmetic takes at peak, or its weights' way from memory.

    0 where that is not known. Activations may come from caches, so they are not counted.
    """
    anchors = [i for i, n in enumerate(task.spec.nodes) if n.kind is OpKind.CONTRACT]
    if not anchors or task.spec.nodes[anchors[0]].dtype not in FLOATS:
        return 0.0
    flops = sum(contraction_at(task.spec, i).flops for i in anchors)
    if len(anchors) == 1 and (fewer := families.operations(task)) is not None:
        flops = min(flops, fewer)
    nodes = (task.spec.nodes[i] for i in task.spec.inputs)
    weights = sum(n.nbytes for n in nodes if n.attr("static"))
    compute_s = flops / task.target.peak_flops(task.spec.nodes[anchors[0]].dtype, task.threads)
    in_cache = weights <= task.target.l3_bytes
    return max(compute_s, 0.0 if in_cache else weights / task.target.dram_bytes_per_s)
