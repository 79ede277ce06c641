"""What rows on a GPU leave open, and what the threads of a row share in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.rows import RowDomain

N = TypeVar("N")

KEPT_BYTES = 32 << 10  # of a block's shared memory, for values that several passes read


class GpuRowsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    threads: N  # of a row: whole warps, unless rows are abreast
    vl: N = 1  # type: ignore[assignment]  # neighbours that a thread takes at once
    rows: N = 1  # type: ignore[assignment]  # of a block
    abreast: N = 0  # type: ignore[assignment]  # 1: neighbouring threads have neighbouring rows


def kept_in_memory(spec: Graph, domain: RowDomain, rows: int) -> tuple[int, ...]:
    """Values of which shared memory has room for ``rows`` rows; others are computed once more."""
    found, room = [], KEPT_BYTES
    for k in domain.kept_values:
        dtype = spec.nodes[k].dtype
        size = rows * domain.width * max(ITEMSIZE[dtype], 4 if dtype == "bfloat16" else 1)
        if size <= room:
            room -= size
            found.append(k)
    return tuple(found)
