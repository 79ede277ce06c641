"""The space of attention on a GPU."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families.gpu import (
    BARRIER_S,
    L2_SPEED,
    LAUNCH_S,
    OWN,
    PAD,
    PHASES,
    REGISTERS,
    SCORE_OPS,
    GpuSketch,
    column,
)
from torch_pruner.families.gpu_attention.form import GpuAttentionDecisions
from torch_pruner.families.space import Array, Decisions, Mask, Symbols
from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.contraction import traffic_bytes
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.task import Task


class GpuAttentionSketch(GpuSketch[GpuAttentionDecisions[Array]]):
    """Scores in shared memory, both products in tensor cores."""

    name = "gpu_attention"
    decisions = GpuAttentionDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        att = attention_of(task.spec)
        if att is None:
            raise ValueError("the kernel graph is not attention")
        self.att = att
        # In whole steps of tensor cores.
        self.depth, self.width = -(-att.depth // 16) * 16, -(-att.width // 8) * 8

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return (column([16, 32, 64, 128]), column([32, 64, 128]))

    def _shared(self, c: GpuAttentionDecisions[Array]) -> Array:
        bm, bn = c.bm, c.bn
        halves = (bm + bn) * (self.depth + PAD) + bn * (self.width + PAD) + bm * (bn + PAD)
        rows = bm * (bn + 2) + 4 * bm + 4 * bm  # scores; what is kept of rows and by threads
        result: Array = 2.0 * halves + 4.0 * rows + 10 * 128  # every array begins at a whole 128
        return result

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        sums = (c.bn + self.width) / 2
        fits = self._shared(c) <= self.card.shared_bytes_per_block
        result: Mask = fits & (sums + OWN <= REGISTERS - 40)
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, card, att = self.columns(decisions), self.card, self.att
        bm, bn, threads = c.bm, c.bn, 2.0 * c.bm
        shared, registers = self._shared(c), (c.bn + self.width) / 2 + OWN + 24
        blocks = att.groups * np.ceil(att.queries / bm)
        keys = np.minimum(att.keys, (att.queries + bm) / 2) if att.causal else float(att.keys)
        turns = np.ceil(keys / bn)
        resident = self.resident(threads, shared, registers)
        each, pace = self.busy(blocks, threads, resident)
        dtype = self.task.spec.nodes[self.task.spec.nodes[att.out].inputs[1]].dtype
        item = float(ITEMSIZE[dtype])
        products = 2.0 * bm * bn * turns * (self.depth + self.width)
        # A score is written, compared, raised and written again: on CUDA cores.
        scores = SCORE_OPS * bm * bn * turns
        one = products / (card.peak_flops(dtype) / card.multiprocessors)
        one = one + scores / (card.float32_flops / card.multiprocessors)
        compute = each * one / pace
        traffic = blocks * (bm * self.depth + keys * (self.depth + self.width)) * item
        unique = float(traffic_bytes(self.task.spec))
        share = np.minimum(1.0, blocks / card.multiprocessors)
        memory = np.maximum(
            traffic / (card.dram_bytes_per_s * L2_SPEED), unique / card.dram_bytes_per_s
        ) / (self.aligned(self.depth * item) * share)
        waits = np.ceil(each / np.maximum(resident, 1.0)) * turns * PHASES * BARRIER_S
        operations = blocks * products
        ones = np.ones(len(decisions))
        return Symbols(
            registers, products / threads, shared, threads, traffic * ones, each,
            self.depth * item * ones, operations * ones,
            np.maximum(compute, memory) + waits + LAUNCH_S,
        )  # fmt: skip
