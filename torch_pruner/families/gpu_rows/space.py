"""The space of rows on a GPU, a block each."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from torch_pruner.families.gpu import (
    COMBINED_S,
    ELEMENT_S,
    THREAD_S,
    WARP,
    GpuSweep,
    column,
)
from torch_pruner.families.gpu_rows.form import GpuRowsDecisions
from torch_pruner.families.space import Array, Decisions, Symbols
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.rows import row_domain


class GpuRowsSketch(GpuSweep[GpuRowsDecisions[Array]]):
    """A block per row."""

    name = "gpu_rows"
    decisions = GpuRowsDecisions

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return (column([32, 64, 128, 256, 512, 1024]),)

    def symbols(self, decisions: Decisions) -> Symbols:
        c, domain = self.columns(decisions), row_domain(self.task.spec)
        blocks = np.full(len(decisions), float(domain.rows))
        passes = len(domain.reductions) + 1
        turns = np.ceil(domain.width / c.threads)
        item = ITEMSIZE[self.task.spec.nodes[domain.reductions[0]].dtype]
        work = float(domain.rows * domain.width * len(self.task.spec.nodes))
        found = self._estimate(c.threads, blocks, work, np.minimum(WARP, domain.width) * item)
        rounds = np.ceil(found.s6_rounds / np.maximum(self.card.threads / c.threads, 1.0))
        combined = len(domain.reductions) * (WARP + c.threads / WARP)
        waits = rounds * (passes * turns * ELEMENT_S + combined * COMBINED_S + c.threads * THREAD_S)
        return Symbols(
            found.s1_registers, found.s2_tile_ops, found.s3_cache_bytes, found.s4_tasks,
            found.s5_traffic_bytes, found.s6_rounds, found.s7_contiguous_bytes, found.s8_ops,
            found.latency_s + waits,
        )  # fmt: skip
