"""The space of windows and short reductions on a GPU."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families.gpu import ELEMENT_S, WARP, GpuSweep
from torch_pruner.families.gpu_columns.form import GpuColumnsDecisions
from torch_pruner.families.space import Array
from torch_pruner.graph.ops import ITEMSIZE, OpKind

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions, Symbols


class GpuColumnsSketch(GpuSweep[GpuColumnsDecisions[Array]]):
    """One thread per output element: windows, and reductions over outer axes."""

    name = "gpu_columns"
    decisions = GpuColumnsDecisions

    def symbols(self, decisions: Decisions) -> Symbols:
        c, spec = self.columns(decisions), self.task.spec
        numel, item = spec.nodes[spec.outputs[0]].numel, ITEMSIZE[spec.nodes[spec.outputs[0]].dtype]
        depth, summed = 0, 0
        for node in spec.nodes:
            if node.kind is OpKind.WINDOW:
                depth += math.prod(node.attr("kernel"))
            elif node.kind is OpKind.REDUCE:
                summed += spec.nodes[node.inputs[0]].numel // max(node.numel, 1)
        work = float(numel * (depth + summed))
        found = self._estimate(c.threads, np.ceil(numel / c.threads), work, WARP * item)
        return self._waiting(found, c.threads, summed * ELEMENT_S) if summed else found
