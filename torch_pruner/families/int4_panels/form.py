"""Products of many rows with weights of four bits: parameters. Decisions are the contraction's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Parameters
from torch_pruner.families.int4_rows.form import copies, int4_product
from torch_pruner.graph.contraction import copied_shape
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.families.contraction.form import ContractionDecisions
    from torch_pruner.graph.ir import Graph


def parameters(spec: Graph, decisions: ContractionDecisions[int]) -> Parameters:
    """Panels; scratch in order: the first operand as float32, sums between blocks."""
    found = int4_product(spec)
    if found is None:
        raise ValueError("no product with constant weights of four bits")
    con, block = found.con, decisions.vl * decisions.nv
    scratch: list[BufferSpec] = []
    if copies(spec, con):
        scratch.append(BufferSpec(copied_shape(spec, con), con.acc_dtype))
    if decisions.kb > 1:
        chunks, tiles = con.chunked(decisions.tm, decisions.mc)
        tasks = -(-con.n // block) * chunks
        scratch.append(BufferSpec((tasks, tiles, decisions.tm, block), con.acc_dtype))
    return Parameters(found.packs(block), tuple(scratch))
