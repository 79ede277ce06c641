"""The space of attention on a GPU."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families.gpu import (
    COPY_CYCLES,
    FRAGMENT_CYCLES,
    L2_SPEED,
    LAUNCH_S,
    LOAD_CYCLES,
    MMA_CYCLES,
    OWN,
    PAD,
    QUARTERS,
    QUERIES,
    REGISTERS,
    SCORE_CYCLES,
    SHARED_BYTES_A_CYCLE,
    SPLIT_S,
    STEP_CYCLES,
    TURN_CYCLES,
    WAIT_CYCLES,
    WARP,
    GpuSketch,
    column,
)
from torch_pruner.families.gpu_attention.form import FACTS, GpuAttentionDecisions
from torch_pruner.families.space import Array, Decisions, Mask, Symbols
from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.contraction import traffic_bytes
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.shared_heads import heads_of_a_block

if TYPE_CHECKING:
    from torch_pruner.task import Task


MOST_ROWS = 128  # of a block
FILLED = 4  # blocks of a multiprocessor that leave nothing to gain from more


class GpuAttentionSketch(GpuSketch[GpuAttentionDecisions[Array]]):
    """Scores in registers, both products in tensor cores."""

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
        newer = self.card.capability >= (8, 0)
        ways = column([1, 2] if newer else [1]), column([0, 1] if newer else [0])
        # Of a power of two alone, turns over 257 keys would be a third longer than the keys.
        tiles = column([16, 32, 64, 128]), column([*range(32, 161, 16)])
        return (*tiles, *ways, column(self._splits()), column(self._heads()))

    def _splits(self) -> list[int]:
        """Tiles of queries that fill a card share no keys, and causal ones each have others."""
        att = self.att
        blocks = att.groups * -(-att.queries // QUERIES)
        if att.causal or blocks >= FILLED * self.card.multiprocessors:
            return [1]
        return [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]

    def _heads(self) -> list[int]:
        """A block has so many heads of the same keys; those whose queries fill one, no other's."""
        return heads_of_a_block(self.task.spec, self.att, MOST_ROWS)

    @property
    def _result(self) -> float:
        """Elements of a part's sums and facts, of one group."""
        return float(self.att.queries * (self.att.width + FACTS))

    @property
    def _dtype(self) -> str:
        nodes = self.task.spec.nodes
        return nodes[nodes[self.att.out].inputs[1]].dtype

    def _shared(self, c: GpuAttentionDecisions[Array]) -> Array:
        keys = c.stages * c.bn * (self.depth + self.width + 2 * PAD)
        result: Array = ITEMSIZE[self._dtype] * (c.bm * (self.depth + PAD) + keys)
        return result + 3 * 128  # every array begins at a whole 128

    def _registers(self, c: GpuAttentionDecisions[Array]) -> Array:
        # Scores and results of 16 rows, and what the next step of tensor cores takes.
        fragments = 2 * 4 + np.maximum(c.bn, float(self.width)) / 8 * 4
        result: Array = (c.bn + self.width) / 2 + fragments + OWN
        return result

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        fits = self._shared(c) <= self.card.shared_bytes_per_block
        room = self._registers(c) <= REGISTERS
        turns = np.ceil(self.att.keys / c.bn)
        useful = (c.stages == 1) | ((c.ahead == 1) & (turns > c.split))
        useful &= (turns % c.split == 0) & (c.split * self.att.groups * self._result < 2**31)
        held = self.resident(2.0 * c.bm, self._shared(c), self._registers(c)) >= 1
        result: Mask = fits & room & useful & held
        return result

    def _turn_s(self, c: GpuAttentionDecisions[Array], together: Array) -> Array:
        """Seconds of one turn over keys of a block, of which as many run ``together``."""
        warps = c.bm / QUERIES
        sharing = np.maximum(1.0, warps * together / QUARTERS)
        scores, sums = c.bn / 8, self.width / 8.0
        first = scores * MMA_CYCLES + (1 + scores / 2) * FRAGMENT_CYCLES
        second = sums * MMA_CYCLES + sums / 2 * FRAGMENT_CYCLES
        products = (self.depth / 16) * (STEP_CYCLES + first * sharing)
        products = products + (c.bn / 16) * (STEP_CYCLES + second * sharing)
        powers = c.bn / 2 * SCORE_CYCLES * sharing
        # Every warp reads all keys and values, and shared memory is one for all quarters.
        each = c.bn * (self.depth + self.width) * ITEMSIZE[self._dtype]
        fragments = each / SHARED_BYTES_A_CYCLE * warps * together
        # Of 16 bytes that a thread copies at a time.
        lines = c.bn * (self.depth + self.width) * ITEMSIZE[self._dtype] / 16 / (warps * WARP)
        copies = lines * np.where(c.ahead == 1, COPY_CYCLES, LOAD_CYCLES)
        begun = np.where(c.stages > 1, 1.0, 0.25)
        cycles = TURN_CYCLES + WAIT_CYCLES / begun + products + powers + copies + fragments
        result: Array = cycles / self.card.frequency_hz
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, card, att = self.columns(decisions), self.card, self.att
        bm, bn, threads = c.bm, c.bn, 2.0 * c.bm
        shared, registers = self._shared(c), self._registers(c)
        blocks = att.groups / c.heads * np.ceil(c.heads * att.queries / bm) * c.split
        keys = np.minimum(att.keys, (att.queries + bm) / 2) if att.causal else float(att.keys)
        turns = np.ceil(keys / bn) / c.split
        keys = keys / c.split  # of a block
        resident = np.maximum(self.resident(threads, shared, registers), 1.0)
        each, _ = self.busy(blocks, threads, resident)
        item = float(ITEMSIZE[self._dtype])
        products = 2.0 * bm * bn * turns * (self.depth + self.width)
        waves = np.ceil(each / resident)
        compute = waves * turns * self._turn_s(c, np.minimum(each, resident))
        traffic = blocks * (bm * self.depth + keys * (self.depth + self.width)) * item
        unique = float(traffic_bytes(self.task.spec))
        share = np.minimum(1.0, blocks / card.multiprocessors)
        memory = np.maximum(
            traffic / (card.dram_bytes_per_s * L2_SPEED), unique / card.dram_bytes_per_s
        ) / (self.aligned(self.depth * item) * share)
        operations = blocks * products
        # Parts of results are written, read again and joined by a launch of their own.
        parts = 2.0 * c.split * att.groups * self._result * ITEMSIZE["float32"]
        joining = parts / (card.dram_bytes_per_s * L2_SPEED) + SPLIT_S
        latency = np.maximum(compute, memory) + LAUNCH_S + np.where(c.split > 1, joining, 0.0)
        ones = np.ones(len(decisions))
        return Symbols(
            registers, products / threads, shared, threads, traffic * ones, each,
            self.depth * item * ones, operations * ones, latency,
        )  # fmt: skip
