"""Attention: decisions, packed masks, and scratch for a tile's scores, queries, sums and copies."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.graph.attention import attention_of, attention_plan
from torch_pruner.graph.attention_masks import constant_masks, hiding_mask
from torch_pruner.graph.contraction import accumulator
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")


class AttentionDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    vl: N  # lanes: elements of one vector
    nv: N  # vectors of queries in a tile
    tm: N  # keys of a tile of scores
    tr: N  # queries of a tile of the second product
    nc: N  # vectors of columns of a tile of the second product; turned: columns
    kb: N  # keys of a block of the second product
    order: N  # order of units: 0 head by head, 1 the heads of a tile of queries together
    pack: N  # copies for each head: 0 none, 1 of values, 2 of values and keys
    turned: N  # 1: lanes hold queries in the second product, too, and not columns
    tasks: N  # parallel tasks
    pairs: N = 0  # type: ignore[assignment]  # 1: products of two bfloat16 at once


def packs(spec: Graph, decisions: AttentionDecisions[int]) -> dict[int, PackLayout]:
    """Constant masks that no copy is made of: queries for neighbours, of whole vectors."""
    att = attention_of(spec)
    assert att is not None
    plan = attention_plan(spec, att, decisions)
    block = -(-att.queries // decisions.vl) * decisions.vl
    found: dict[int, PackLayout] = {}
    for node, mask in constant_masks(spec, att).items():
        if node not in plan.masks:
            groups = math.prod(mask.batch)
            shape = (groups, 1, att.keys, block)
            found[mask.index] = PackLayout(mask.view, "matmul", groups, block, shape)
    return found


def scratch(spec: Graph, decisions: AttentionDecisions[int]) -> tuple[BufferSpec, ...]:
    """Per parallel task: a tile's scores, queries and sums; copies of values, keys, masks. With
    pairs queries and copies are words of two numbers.

    Last, where a mask may hide keys, how many keys some query of the tile sees.
    """
    att = attention_of(spec)
    assert att is not None
    plan, dtype = attention_plan(spec, att, decisions), accumulator(spec.nodes[att.out].dtype)
    each, taken = (2, "int32") if decisions.pairs else (1, dtype)
    copies = (
        BufferSpec((plan.tasks, -(-att.keys // each), plan.slots * plan.column), taken),
        BufferSpec((plan.tasks, att.keys, att.depth // each), taken),
    )
    return (
        BufferSpec((plan.tasks, att.keys, plan.lanes), dtype),
        BufferSpec((plan.tasks, att.depth // each, plan.lanes), taken),
        BufferSpec((plan.tasks, plan.lanes, plan.slots * plan.column), dtype),
        *copies[: decisions.pack],
        *(BufferSpec((plan.tasks, att.keys, plan.lanes), spec.nodes[m].dtype) for m in plan.masks),
        *(BufferSpec((plan.tasks,), "int32") for m in plan.masks if m == hiding_mask(spec, att)),
    )
