"""What a candidate costs in memory, from its parameters alone: nothing is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.pareto import Footprint

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph
    from torch_pruner.task import Candidate


def footprint_of(spec: Graph, candidate: Candidate) -> Footprint:
    """Bytes that a kernel of ``spec`` needs that runs as ``candidate`` says.

    Raises ``KeyError`` for a family that nobody knows here, ``ValueError`` for decisions that it
    does not. What a vendor's library allocates is not known and counts as nothing.
    """
    takes = families.signature_of(spec, candidate)
    packed = sum(layout.nbytes for layout in takes.packs if layout is not None)
    read = sum(
        spec.nodes[i].nbytes
        for i, layout in zip(spec.inputs, takes.packs, strict=True)
        if layout is None and spec.nodes[i].attr("static")
    )
    return Footprint(packed, packed + read, sum(buffer.nbytes for buffer in takes.scratch))
