"""What an attention kernel takes: scores, queries and sums of a tile, and copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.attention import attention_of, attention_plan
from torch_pruner.graph.contraction import accumulator
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph


def scratch(spec: Graph, decisions: Mapping[str, int]) -> tuple[BufferSpec, ...]:
    """Per parallel task: a tile's scores, queries and sums; copies of values, keys, masks."""
    att = attention_of(spec)
    assert att is not None
    plan, dtype = attention_plan(spec, att, decisions), accumulator(spec.nodes[att.out].dtype)
    copies = (
        BufferSpec((plan.tasks, att.keys, plan.slots * plan.column), dtype),
        BufferSpec((plan.tasks, att.keys, att.depth), dtype),
    )
    return (
        BufferSpec((plan.tasks, att.keys, plan.lanes), dtype),
        BufferSpec((plan.tasks, att.depth, plan.lanes), dtype),
        BufferSpec((plan.tasks, plan.lanes, plan.slots * plan.column), dtype),
        *copies[: decisions["pack"]],
        *(BufferSpec((plan.tasks, att.keys, plan.lanes), spec.nodes[m].dtype) for m in plan.masks),
    )
