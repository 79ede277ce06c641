"""What attention by Triton leaves open, and what parts of its keys leave in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.families.gpu_attention.form import FACTS
from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

N = TypeVar("N")


class GpuTritonAttentionDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    bm: N  # rows of a block: queries of its heads
    bn: N  # keys of a turn
    warps: N
    stages: N  # turns whose keys shared memory holds at once
    split: N = 1  # type: ignore[assignment]  # blocks that share the keys of the same queries
    heads: N = 1  # type: ignore[assignment]  # of the same keys and values, in one block


def padded(extent: int) -> int:
    """Of a tile's axis: a power of two, of tensor cores' 16 at least."""
    return max(16, 1 << (extent - 1).bit_length())


def parameters(spec: Graph, decisions: GpuTritonAttentionDecisions[int]) -> Parameters:
    """Scratch, where blocks share keys: sums of each part, and ``FACTS`` of each of its rows."""
    att = attention_of(spec)
    assert att is not None
    if decisions.split == 1:
        return Parameters()
    rows = (decisions.split, att.groups, att.queries)
    sums, facts = (BufferSpec((*rows, extent), "float32") for extent in (att.width, FACTS))
    return Parameters(scratch=(sums, facts))
