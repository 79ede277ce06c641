"""The space of attention by Triton."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families.gpu import (
    COPY_CYCLES,
    FRAGMENT_CYCLES,
    L2_SPEED,
    LAUNCH_S,
    MMA_CYCLES,
    OWN,
    QUARTERS,
    QUERIES,
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
from torch_pruner.families.gpu_attention.form import FACTS
from torch_pruner.families.gpu_attention.space import FILLED, MOST_ROWS
from torch_pruner.families.gpu_triton_attention.form import GpuTritonAttentionDecisions, padded
from torch_pruner.families.gpu_triton_product.space import GROUP_ROWS, IN_GROUPS, MOST_REGISTERS
from torch_pruner.families.space import Array, Decisions, Mask, Symbols
from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.contraction import traffic_bytes
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.shared_heads import heads_of_a_block

if TYPE_CHECKING:
    from torch_pruner.task import Task

# Nothing here was measured on a card: see ``gpu_triton_product.space``. Of ``mma`` the cycles are
# those of ``gpu_attention``.
SHARE_IN_GROUPS = 0.6  # of the peak
TURN_IN_GROUPS, WAIT_IN_GROUPS = 500.0, 600.0
CAREFUL = 1.2  # of the time: heads of 64 and 128 tokens took what was expected of ours


class GpuTritonAttentionSketch(GpuSketch[GpuTritonAttentionDecisions[Array]]):
    """Scores in registers, both products in tensor cores."""

    name = "gpu_triton_attention"
    decisions = GpuTritonAttentionDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        att = attention_of(task.spec)
        if att is None:
            raise ValueError("the kernel graph is not attention")
        self.att = att
        self.depth, self.width = padded(att.depth), padded(att.width)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        options = (
            [16, 32, 64, 128], [16, 32, 64, 128], [1, 2, 4, 8], [1, 2, 3, 4], self._splits(),
            self._heads(),
        )  # fmt: skip
        return tuple(column(o) for o in options)

    def _splits(self) -> list[int]:
        """Tiles of queries that fill a card share no keys, and causal ones each have others."""
        att = self.att
        if att.causal or att.groups * -(-att.queries // 16) >= FILLED * self.card.multiprocessors:
            return [1]
        return [1, 2, 4, 8, 16, 32]

    def _heads(self) -> list[int]:
        """A block has so many heads of the same keys; those whose queries fill one, no other's."""
        return heads_of_a_block(self.task.spec, self.att, MOST_ROWS)

    @property
    def _item(self) -> int:
        nodes = self.task.spec.nodes
        return ITEMSIZE[nodes[nodes[self.att.out].inputs[1]].dtype]

    @property
    def _result(self) -> float:
        """Elements of a part's sums and facts, of one group."""
        return float(self.att.queries * (self.att.width + FACTS))

    def _shared(self, c: GpuTritonAttentionDecisions[Array]) -> Array:
        keys = c.stages * c.bn * float(self.depth + self.width)
        result: Array = self._item * (c.bm * self.depth + keys)
        return result

    def _registers(self, c: GpuTritonAttentionDecisions[Array]) -> Array:
        threads = c.warps * float(WARP)
        # Scores, powers in half precision, results, and queries that stay.
        held = c.bm * (1.5 * c.bn + self.width + 0.5 * self.depth)
        fragments = c.bn * max(self.depth, self.width) * self._item / 4.0 / threads / 2
        result: Array = held / threads + np.minimum(fragments, 32.0) + OWN
        return result

    def valid(self, decisions: Decisions) -> Mask:
        c, att = self.columns(decisions), self.att
        registers, shared = self._registers(c), self._shared(c)
        fits = (shared <= self.card.shared_bytes_per_block) & (registers <= MOST_REGISTERS)
        turns = np.ceil(att.keys / c.bn)
        useful = (turns % c.split == 0) & (c.split * att.groups * self._result < 2**31)
        useful &= (c.bm >= c.warps * 16) & (c.stages <= np.maximum(turns / c.split, 1))
        useful &= (c.bn < 2 * att.keys) | (c.bn == 16)
        useful &= (c.bm < 2 * c.heads * att.queries) | (c.bm == 16)
        held = self.resident(c.warps * float(WARP), shared, registers) >= 1
        result: Mask = fits & useful & held
        return result

    def _turn_s(self, c: GpuTritonAttentionDecisions[Array], together: Array) -> Array:
        """Seconds of one turn over keys of a block, of which as many run ``together``."""
        card = self.card
        lines = c.bn * (self.depth + self.width) * float(self._item)
        sharing = np.maximum(1.0, c.warps * together / QUARTERS)
        powers = c.bm * c.bn / (c.warps * WARP) * SCORE_CYCLES * sharing
        copies = lines / 16 / (c.warps * WARP) * COPY_CYCLES
        begun = np.maximum(c.stages - 1.0, 0.25)
        peak = SHARE_IN_GROUPS * card.float16_flops / card.multiprocessors / card.frequency_hz
        products = 2.0 * c.bm * c.bn * (self.depth + self.width) / peak
        grouped = TURN_IN_GROUPS + WAIT_IN_GROUPS / begun + powers + copies + together * products
        down = c.bm / c.warps / QUERIES  # a warp has whole rows
        scores, sums = c.bn / 8, self.width / 8.0
        first = down * scores * MMA_CYCLES + (down + scores / 2) * FRAGMENT_CYCLES
        second = down * sums * MMA_CYCLES + sums / 2 * FRAGMENT_CYCLES
        multiplied = (self.depth / 16) * (STEP_CYCLES + first * sharing)
        multiplied = multiplied + (c.bn / 16) * (STEP_CYCLES + second * sharing)
        # Every warp reads all keys and values, and shared memory is one for all quarters.
        fragments = lines / SHARED_BYTES_A_CYCLE * c.warps * together
        apart = TURN_CYCLES + WAIT_CYCLES / begun + multiplied + powers + copies + fragments
        in_groups = (c.bm >= GROUP_ROWS) & (c.warps >= QUARTERS)
        in_groups &= card.capability in IN_GROUPS
        result: Array = np.where(in_groups, grouped, apart) / card.frequency_hz
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, card, att = self.columns(decisions), self.card, self.att
        bm, bn, threads = c.bm, c.bn, c.warps * float(WARP)
        shared, registers = self._shared(c), self._registers(c)
        blocks = att.groups / c.heads * np.ceil(c.heads * att.queries / bm) * c.split
        keys = np.minimum(att.keys, (att.queries + bm) / 2) if att.causal else float(att.keys)
        turns = np.ceil(keys / bn) / c.split
        keys = keys / c.split  # of a block
        resident = np.maximum(self.resident(threads, shared, registers), 1.0)
        each, _ = self.busy(blocks, threads, resident)
        item = float(self._item)
        products = 2.0 * bm * bn * turns * (self.depth + self.width)
        waves = np.ceil(each / resident)
        compute = waves * turns * self._turn_s(c, np.minimum(each, resident))
        traffic = blocks * (bm * self.depth + keys * (self.depth + self.width)) * item
        unique = float(traffic_bytes(self.task.spec))
        share = np.minimum(1.0, blocks / card.multiprocessors)
        memory = np.maximum(
            traffic / (card.dram_bytes_per_s * L2_SPEED), unique / card.dram_bytes_per_s
        ) / (self.aligned(self.att.depth * item) * share)
        operations = blocks * products
        # Parts of results are written, read again and joined by a launch of their own.
        parts = 2.0 * c.split * att.groups * self._result * ITEMSIZE["float32"]
        joining = parts / (card.dram_bytes_per_s * L2_SPEED) + SPLIT_S
        latency = np.maximum(compute, memory) + LAUNCH_S + np.where(c.split > 1, joining, 0.0)
        latency = latency * CAREFUL * self.task.together
        ones = np.ones(len(decisions))
        return Symbols(
            registers, products / threads, shared, threads, traffic * ones, each,
            self.depth * item * ones, operations * ones, latency,
        )  # fmt: skip
