"""Gradient of attention: decisions, and scratch of a task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.graph.attention_gradient import AttentionGradient, gradient_of
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")


class AttentionGradientDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    nv: N  # vectors of queries in a panel, and in a register tile of scores
    qp: N  # panels of queries in a tile
    tm: N  # keys of a register tile
    tr: N  # queries of a register tile of their gradient
    nc: N  # vectors of columns of a register tile of gradients
    kb: N  # keys of a block
    tasks: N  # parallel tasks
    pairs: N = 0  # type: ignore[assignment]  # 1: products of two bfloat16 at once


@dataclass(frozen=True, slots=True)
class Columns:
    """``count`` columns of a row as vectors of ``column`` elements, the last of which overlaps."""

    count: int
    column: int

    @property
    def slots(self) -> int:
        return -(-self.count // self.column)

    @property
    def wide(self) -> int:
        return self.slots * self.column


@dataclass(frozen=True, slots=True)
class Plan:
    """How the gradient is cut: a task takes whole heads, block of keys by block, tile of queries
    by tile."""

    found: AttentionGradient
    panel: int  # queries of a panel
    lanes: int  # queries of a tile
    tiles: int
    kb: int
    blocks: int
    tasks: int
    per_task: int
    each: int  # numbers of a sum that one step multiplies: 2 where they are words of two bfloat16
    depth: int  # steps of the product of queries and keys
    width: int  # of the product of the result's gradient and values
    queries: Columns  # as they lead to the gradient of keys
    keys: Columns  # as they lead to that of queries
    grads: Columns  # of the result, as they lead to that of values


def plan_of(spec: Graph, decisions: AttentionGradientDecisions[int]) -> Plan:
    found = gradient_of(spec)
    assert found is not None
    nodes, panel = spec.nodes, decisions.nv * decisions.vl
    lanes = decisions.qp * panel

    def columns(product: int) -> Columns:
        count = nodes[product].shape[-1]
        return Columns(count, decisions.vl if count >= decisions.vl else 1)

    each = 2 if decisions.pairs else 1
    per_task = -(-found.groups // max(1, min(decisions.tasks, found.groups)))
    kb = min(decisions.kb, found.keys)
    return Plan(
        found,
        panel,
        lanes,
        -(-found.queries // lanes),
        kb,
        -(-found.keys // kb),
        -(-found.groups // per_task),
        per_task,
        each,
        nodes[nodes[found.scores].inputs[0]].shape[-1] // each,
        nodes[nodes[found.along].inputs[0]].shape[-1] // each,
        columns(found.into_keys),
        columns(found.into_queries),
        columns(found.into_values),
    )


def scratch(spec: Graph, decisions: AttentionGradientDecisions[int]) -> tuple[BufferSpec, ...]:
    """Per parallel task: copies of a block's keys and values, sums of their gradients, weights of a
    tile and their gradient, copies of a tile's queries and of the result's gradient, turned and
    not, sums of a head's gradient of queries, and keys once more. What register tiles read as
    vectors lies in panels as wide as these.

    With pairs what is multiplied is words of two numbers of a sum, or bfloat16, two of which are
    read as a word; last, the gradient of scores once more, in words of two keys.
    """
    plan = plan_of(spec, decisions)
    sums, taken, made = "float32", "float32", "float32"
    if plan.each > 1:
        taken, made = "int32", "bfloat16"
    keys = -(-plan.kb // plan.each)
    shapes = [
        (plan.kb, plan.depth, taken),
        (plan.kb, plan.width, taken),
        (plan.kb, plan.queries.wide, sums),
        (plan.kb, plan.grads.wide, sums),
        (plan.kb, plan.lanes, made),
        (plan.kb, plan.lanes, made),
        (plan.depth, plan.lanes, taken),
        (plan.width, plan.lanes, taken),
        (plan.lanes // plan.each, plan.queries.wide, taken),
        (plan.lanes // plan.each, plan.grads.wide, taken),
        (plan.tiles * plan.lanes, plan.keys.wide, sums),
        (keys, plan.keys.wide, taken),
        *([(keys, plan.lanes, taken)] if plan.each > 1 else []),
    ]
    return tuple(BufferSpec((plan.tasks, *shape), dtype) for *shape, dtype in shapes)
