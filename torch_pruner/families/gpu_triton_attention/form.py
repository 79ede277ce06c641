"""What attention by Triton leaves open; what its parts leave in memory is ``gpu_attention``'s."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

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
