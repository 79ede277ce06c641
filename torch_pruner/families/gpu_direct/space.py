"""The space of products on a GPU, one thread per element."""

from __future__ import annotations

import numpy as np

from torch_pruner.families.gpu import (
    L2_SPEED,
    LAUNCH_S,
    WARP,
    GpuSweep,
)
from torch_pruner.families.gpu_direct.form import GpuDirectDecisions
from torch_pruner.families.space import Array, Decisions, Symbols
from torch_pruner.graph.contraction import contraction_of
from torch_pruner.graph.ops import ITEMSIZE

APART = 3.0  # lines of a cache that a warp's neighbours touch, over those that would do
READ_S = 60e-9  # a step of the reduction, whose operands come from a cache (both: on an H100)


class GpuDirectSketch(GpuSweep[GpuDirectDecisions[Array]]):
    """One thread per output element of a product."""

    name = "gpu_direct"
    decisions = GpuDirectDecisions

    def symbols(self, decisions: Decisions) -> Symbols:
        c, con = self.columns(decisions), contraction_of(self.task.spec)
        numel = con.groups * con.rows * con.n
        item = ITEMSIZE[self.task.spec.nodes[con.anchor].dtype]
        found = self._estimate(c.threads, np.ceil(numel / c.threads), float(con.flops), WARP * item)
        # Both operands come from a cache for every product.
        reads = 2.0 * con.flops / 2.0 * ITEMSIZE[self.task.spec.nodes[con.a].dtype]
        cached = reads / (self.card.dram_bytes_per_s * L2_SPEED / APART)
        depth = con.depth * READ_S
        latency = np.maximum(found.latency_s, np.maximum(cached, depth) + LAUNCH_S)
        return Symbols(
            found.s1_registers, found.s2_tile_ops, found.s3_cache_bytes, found.s4_tasks,
            found.s5_traffic_bytes, found.s6_rounds, found.s7_contiguous_bytes, found.s8_ops,
            latency,
        )  # fmt: skip
