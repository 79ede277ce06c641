"""What rows on a GPU leave open, and what the threads of a row share in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import accumulator
from torch_pruner.graph.ops import FLOATS, ITEMSIZE
from torch_pruner.graph.rows import row_domain
from torch_pruner.graph.signature import BufferSpec

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
    split: N = 1  # type: ignore[assignment]  # blocks that share each row


def held_dtypes(spec: Graph, reduction: int) -> tuple[str, ...]:
    """Of what a thread has of a reduction: the value, and of an extreme one's place both."""
    node = spec.nodes[reduction]
    if node.op in ("argmax", "argmin"):
        return _held(spec.nodes[node.inputs[0]].dtype), "int64"
    return (_held(accumulator(node.dtype) if node.op in ("sum", "prod") else node.dtype),)


def _held(dtype: str) -> str:
    """Threads exchange numbers of four or eight bytes."""
    narrow = "float32" if dtype in FLOATS else "int32"
    return dtype if ITEMSIZE[dtype] >= 4 else narrow


def parameters(spec: Graph, decisions: GpuRowsDecisions[int]) -> Parameters:
    """Scratch, where blocks share rows: what each part of each row gave, for every reduction."""
    if decisions.split == 1:
        return Parameters()
    domain = row_domain(spec)
    dtypes = [dtype for r in domain.reductions for dtype in held_dtypes(spec, r)]
    scratch = tuple(BufferSpec((decisions.split, domain.rows), dtype) for dtype in dtypes)
    return Parameters(scratch=scratch)


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
