"""What a row kernel takes: a row of scratch for what is kept between passes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.graph.rows import row_domain
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph


def row_tasks(spec: Graph, decisions: Mapping[str, int]) -> tuple[int, int]:
    """(rows of one parallel task, number of tasks) of a row kernel."""
    rows = row_domain(spec).rows
    chunk = max(1, min(decisions["chunk"], rows)) if decisions["par"] else rows
    return chunk, -(-rows // chunk)


def scratch(spec: Graph, decisions: Mapping[str, int]) -> tuple[BufferSpec, ...]:
    """One row of scratch per parallel task for every value kept between passes."""
    domain = row_domain(spec)
    tasks = row_tasks(spec, decisions)[1]
    return tuple(BufferSpec((tasks, domain.width), spec.nodes[k].dtype) for k in domain.kept_values)
