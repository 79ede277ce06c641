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
    depth: int  # of the product of queries and keys
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
        nodes[nodes[found.scores].inputs[0]].shape[-1],
        nodes[nodes[found.along].inputs[0]].shape[-1],
        columns(found.into_keys),
        columns(found.into_queries),
        columns(found.into_values),
    )


def scratch(spec: Graph, decisions: AttentionGradientDecisions[int]) -> tuple[BufferSpec, ...]:
    """Per parallel task: copies of a block's keys and values, sums of their gradients, weights of a
    tile and their gradient, copies of a tile's queries and of the result's gradient, turned and
    not, sums of a head's gradient of queries, and keys once more. What register tiles read as
    vectors lies in panels as wide as these."""
    plan = plan_of(spec, decisions)
    shapes = [
        (plan.kb, plan.depth),
        (plan.kb, plan.width),
        (plan.kb, plan.queries.wide),
        (plan.kb, plan.grads.wide),
        (plan.kb, plan.lanes),
        (plan.kb, plan.lanes),
        (plan.depth, plan.lanes),
        (plan.width, plan.lanes),
        (plan.lanes, plan.queries.wide),
        (plan.lanes, plan.grads.wide),
        (plan.tiles * plan.lanes, plan.keys.wide),
        (plan.kb, plan.keys.wide),
    ]
    return tuple(BufferSpec((plan.tasks, *shape), "float32") for shape in shapes)
