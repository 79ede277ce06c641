"""What attention on a GPU leaves open, and what parts of its keys leave in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")

FACTS = 2  # of a row in each part: its largest score, the sum of its powers


class GpuAttentionDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    bm: N  # rows of a block: queries of its heads
    bn: N  # keys of a turn
    stages: N  # turns whose keys shared memory holds at once
    ahead: N  # 1: copies are asynchronous where operands allow it
    split: N = 1  # type: ignore[assignment]  # blocks that share the keys of the same queries
    heads: N = 1  # type: ignore[assignment]  # of the same keys and values, in one block


def parameters(spec: Graph, split: int) -> Parameters:
    """Scratch, where ``split`` blocks share keys: sums of a part, ``FACTS`` of each of its rows."""
    att = attention_of(spec)
    assert att is not None
    if split == 1:
        return Parameters()
    rows = (split, att.groups, att.queries)
    sums, facts = (BufferSpec((*rows, extent), "float32") for extent in (att.width, FACTS))
    return Parameters(scratch=(sums, facts))
