"""The space of products by warpgroups."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from torch_pruner.codegen.parts.gpu.warpgroup_shapes import (
    ACROSS,
    COLUMNS,
    LINE,
    PIECES,
    THREADS,
    M,
)
from torch_pruner.families.gpu import (
    AS_THEY_LIE,
    EARLY_S,
    L2_SPEED,
    LAUNCH_S,
    OWN,
    QUARTERS,
    SHARED_BYTES_A_CYCLE,
    SPLIT_S,
    SUMS,
    WARP,
    WORD_CYCLES,
    GpuSketch,
    column,
)
from torch_pruner.families.gpu_dots.form import stored_bytes
from torch_pruner.families.gpu_product.form import has_narrow_weights, weights_lie
from torch_pruner.families.gpu_warpgroup.form import GpuWarpgroupDecisions, kinds
from torch_pruner.families.space import Array, Decisions, Mask, Symbols
from torch_pruner.graph.contraction import contraction_of, traffic_bytes
from torch_pruner.graph.ops import ITEMSIZE

BARRIER_BYTES = 1024  # of shared memory for the barriers of what arrives whole, and alignment
ITEM, SUM_BYTES = 2, 4  # bytes of an element, and of a sum
# Fitted to products of 128 to 4096 rows in float16 on an H100, weights and activations in its
# second cache where they fit (docs/gpu.md), in cycles of its clock.
MMA_SHARE = 0.77  # of the peak
FILL_BYTES = 46.0  # that reach a multiprocessor in a cycle
TURN_CYCLES = 500.0  # of a turn that waits for nothing: a barrier, addresses, the first product
WAIT_CYCLES = 1500.0  # for tiles that were asked for a turn before; a quarter of it for two turns
ASKED_CYCLES = 6.0  # for a thread to ask for sixteen bytes
EDGE_CYCLES = 1800.0  # of a block before its first product and after its last
SUM_CYCLES = 4.0  # to write one of a thread's
MEETING_CYCLES = 1000.0  # of blocks of a cluster that wait for each other twice; not measured
REMOTE_BYTES = 14.0  # that a multiprocessor reads in a cycle of others' shared memory; not measured
AT_ONCE = 3.0  # a multiprocessor may take so many times its share of what memory hands out


class GpuWarpgroupSketch(GpuSketch[GpuWarpgroupDecisions[Array]]):
    """Tiles in shared memory, which tensor cores read by themselves."""

    name = "gpu_warpgroup"
    decisions = GpuWarpgroupDecisions

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        rows, stages = [M, 2 * M, 4 * M], [3, 4, 5, 6, 7, 8]
        pack = [1, 0] if weights_lie(self.task.spec) else [1]
        early = self.early(kinds(self.task.spec)[1] == PIECES)  # packed, or could be
        parts = [1, 2, 4, 8]
        options = (rows, list(COLUMNS), [64, 128], stages, [1, 2], parts, [0, 1], pack, early)
        return tuple(column(o) for o in options)

    @cached_property
    def _narrow(self) -> bool:
        return has_narrow_weights(self.task.spec)

    def _whole(self, c: GpuWarpgroupDecisions[Array]) -> Mask:
        """Whether the second operand's tiles arrive whole."""
        result: Mask = (c.pack == 1) & (kinds(self.task.spec)[1] == PIECES)
        return result

    def _shared(self, c: GpuWarpgroupDecisions[Array]) -> Array:
        barriers = np.where(self._whole(c), BARRIER_BYTES, 0)
        left = c.cluster * c.bm * c.bn * SUM_BYTES
        result: Array = c.stages * (c.bm + c.bn) * c.bk * ITEM + barriers + left
        return result

    def _registers(self, c: GpuWarpgroupDecisions[Array]) -> Array:
        result: Array = c.bm * c.bn / (c.warpgroups * THREADS) + OWN
        return result

    def valid(self, decisions: Decisions) -> Mask:
        c, con = self.columns(decisions), contraction_of(self.task.spec)
        sums = c.bm * c.bn / (c.warpgroups * THREADS)
        across = kinds(self.task.spec, pack=False)[1] == ACROSS
        kept = (c.bn % LINE == 0) | self._whole(c) | (not across)
        shares = c.bm % (M * c.warpgroups) == 0
        room = self._shared(c) <= self.card.shared_bytes_per_block
        even = np.ceil(con.depth / c.bk) % c.split == 0
        even &= (c.split == 1) | (con.groups * con.rows * con.n * c.split < 2**31)
        even &= (c.cluster == 0) | (c.split > 1)
        result: Mask = kept & shares & room & even & (sums <= SUMS)
        return result

    def _turn_cycles(self, c: GpuWarpgroupDecisions[Array], together: Array) -> Array:
        """Of one turn of a block, ``together`` of which a multiprocessor has at once."""
        card = self.card
        peak = MMA_SHARE * card.float16_flops / card.multiprocessors / card.frequency_hz
        products = 2.0 * c.bm * c.bn * c.bk / peak
        filled = (c.bm + c.bn) * c.bk * ITEM / FILL_BYTES
        threads = c.warpgroups * THREADS
        asked = c.bm + np.where(self._whole(c) | self._narrow, 0.0, c.bn)
        asked = asked * c.bk / 8 / threads * ASKED_CYCLES
        if self._narrow:  # threads wait for weights, and make halves of them
            made = c.bn * c.bk * (WORD_CYCLES + 1.0)
            asked = asked + WAIT_CYCLES / 2 + made / np.minimum(threads, WARP * QUARTERS)
        alone = TURN_CYCLES + asked + WAIT_CYCLES / (c.stages - 2.0) ** 2
        result: Array = np.maximum(together * np.maximum(products, filled), alone)
        return result

    def _meeting_cycles(self, c: GpuWarpgroupDecisions[Array]) -> Array:
        """Of a block that leaves its sums and adds up its share of all blocks'."""
        left = c.bm * c.bn * SUM_BYTES
        others = left * (c.split - 1) / c.split / REMOTE_BYTES
        result: Array = MEETING_CYCLES + left / SHARED_BYTES_A_CYCLE + others
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, card, con = self.columns(decisions), self.card, contraction_of(self.task.spec)
        threads, shared, registers = c.warpgroups * THREADS, self._shared(c), self._registers(c)
        down, across = np.ceil(con.rows / c.bm), np.ceil(con.n / c.bn)
        calls = self.task.together
        blocks = calls * con.groups * down * across * c.split
        turns = np.ceil(con.depth / c.bk) / c.split
        sums = c.bm * c.bn / threads
        depth = turns * c.bk
        operations = 2.0 * blocks * c.bm * c.bn * depth
        stored = stored_bytes(self.task.spec, con) if self._narrow else ITEM
        traffic = blocks * (c.bm * ITEM + c.bn * stored) * depth
        unique = float(traffic_bytes(self.task.spec)) * calls
        contiguous = c.bk * ITEM
        resident = np.maximum(self.resident(threads, shared, registers), 1.0)
        each = np.ceil(blocks / card.multiprocessors)
        together = np.minimum(each, resident)
        waves = np.ceil(each / resident)
        block = turns * self._turn_cycles(c, together) + EDGE_CYCLES + sums * SUM_CYCLES
        compute = waves * block / card.frequency_hz
        share = np.minimum(1.0, AT_ONCE * blocks / card.multiprocessors)
        # When the last of it is there, the last products begin.
        memory = unique / (card.dram_bytes_per_s * share) + EDGE_CYCLES / 2 / card.frequency_hz
        latency = np.maximum(compute, memory) + LAUNCH_S - EARLY_S * c.early
        # Parts of sums are written, read again and added by a launch of their own.
        parts = 2.0 * calls * c.split * con.groups * con.rows * con.n * ITEMSIZE[con.acc_dtype]
        adding = parts / (card.dram_bytes_per_s * L2_SPEED) + SPLIT_S
        adding = np.where(
            c.cluster > 0, waves * self._meeting_cycles(c) / card.frequency_hz, adding
        )
        latency = latency + np.where(c.split > 1, adding, 0.0)
        latency = latency * np.where(c.pack == 0, AS_THEY_LIE, 1.0)
        return Symbols(
            registers, 2.0 * sums * depth, shared, threads, traffic, each, contiguous, operations,
            latency,
        )  # fmt: skip
