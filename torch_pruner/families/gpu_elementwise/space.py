"""The space of kernels without a reduction on a GPU."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families.gpu import (
    WARP,
    GpuSweep,
    column,
)
from torch_pruner.families.gpu_elementwise.form import GpuElementwiseDecisions
from torch_pruner.families.space import Array
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions, Mask, Symbols


class GpuElementwiseSketch(GpuSweep[GpuElementwiseDecisions[Array]]):
    """Kernels without a reduction."""

    name = "gpu_elementwise"
    decisions = GpuElementwiseDecisions

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return (column([1, 2, 4]), column([64, 128, 256, 512]))

    def valid(self, decisions: Decisions) -> Mask:
        result: Mask = self._numel % decisions[:, 0] == 0
        return result

    @property
    def _numel(self) -> int:
        return self.task.spec.nodes[self.task.spec.outputs[0]].numel

    def symbols(self, decisions: Decisions) -> Symbols:
        c = self.columns(decisions)
        item = ITEMSIZE[self.task.spec.nodes[self.task.spec.outputs[0]].dtype]
        blocks = np.ceil(self._numel / (c.vl * c.threads))
        work = float(self._numel * len(self.task.spec.nodes))
        return self._estimate(c.threads, blocks, work, c.vl * WARP * item)
