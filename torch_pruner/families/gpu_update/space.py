"""The space of updates on a GPU."""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families.gpu import (
    ELEMENT_S,
    LAUNCH_S,
    OWN,
    SPLIT_S,
    WARP,
    GpuSketch,
    column,
)
from torch_pruner.families.gpu_update.form import GpuUpdateDecisions, Rows, rows_of
from torch_pruner.families.space import Array, Symbols
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions, Mask

_VECTORS = ("float32", "float16", "bfloat16")


class GpuUpdateSketch(GpuSketch[GpuUpdateDecisions[Array]]):
    """Rows at positions."""

    name = "gpu_update"
    decisions = GpuUpdateDecisions

    @cached_property
    def _rows(self) -> Rows:
        return rows_of(self.task.spec)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return (column([1, 2, 4]), column([64, 128, 256, 512]))

    def valid(self, decisions: Decisions) -> Mask:
        """Neighbours of a row are neighbours of the result. TVM prints vectors of floats best."""
        vl, last = decisions[:, 0], self._rows.tail[-1] if self._rows.tail else 1
        if self.task.spec.nodes[self._rows.update].dtype not in _VECTORS:
            last = 1
        result: Mask = last % vl == 0
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, card, spec, rows = self.columns(decisions), self.card, self.task.spec, self._rows
        node = spec.nodes[rows.update]
        item = float(ITEMSIZE[node.dtype])
        line = math.prod(rows.line)
        copied = 0 if node.attr("in_place") else node.numel
        blocks = rows.count * np.ceil(line / (c.vl * c.threads))
        moved = 2.0 * (rows.count * line + copied) * item
        full = np.ones(len(c.threads))
        resident = np.maximum(self.resident(c.threads, full, full * OWN), 1.0)
        each, pace = self.busy(blocks, c.threads, resident)
        contiguous = c.vl * WARP * item
        share = np.minimum(1.0, blocks / card.multiprocessors) * pace
        memory = moved / (card.dram_bytes_per_s * self.aligned(contiguous) * share)
        # Whether a later row is for the same place: the threads of a block look at all of them.
        looked = np.ceil(rows.count / c.threads) * ELEMENT_S if rows.count > 1 else 0.0
        waits = np.ceil(each / resident) * (looked + ELEMENT_S)
        latency = memory + waits + LAUNCH_S + (SPLIT_S if copied else 0.0)
        operations = float(rows.count * line * len(spec.nodes))
        return Symbols(
            full * OWN, operations / (blocks * c.threads), full * 0.0, c.threads, full * moved,
            each, contiguous, full * operations, latency,
        )  # fmt: skip
