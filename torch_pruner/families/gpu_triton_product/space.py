"""The space of products by Triton."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from torch_pruner.families.gpu import (
    AS_THEY_LIE,
    FRAGMENT_CYCLES,
    L2_SPEED,
    LAUNCH_S,
    MMA_CYCLES,
    OWN,
    QUARTERS,
    SPLIT_S,
    STEP_CYCLES,
    SUMS,
    TURN_CYCLES,
    WAIT_CYCLES,
    WARP,
    GpuSketch,
    column,
)
from torch_pruner.families.gpu_product.form import weights_lie
from torch_pruner.families.gpu_triton_product.form import GpuTritonProductDecisions
from torch_pruner.families.space import Array, Decisions, Mask, Symbols
from torch_pruner.graph.adjacency import rows_together
from torch_pruner.graph.contraction import contraction_of, traffic_bytes
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.strided import only_viewed, reach

# Nothing here was measured on a card: the cycles are those of kernels of ours with the same
# instructions (``families.gpu`` for ``mma``, ``gpu_warpgroup.space`` for those of whole groups of
# warps), and what Triton does otherwise is guessed.
SHARE_IN_GROUPS = 0.70  # of the peak: threads copy both operands' tiles, bulk copies none
FILL_BYTES = 46.0
TURN_IN_GROUPS, WAIT_IN_GROUPS = 500.0, 1500.0
ASKED_CYCLES = 6.0  # for a thread to ask for what it copies at once
EDGE_CYCLES = 1800.0
SUM_CYCLES = 4.0
CAREFUL = 1.1  # of the time: a draft of another family that is as fast was run on a card
APART = 1.01  # of the time, where blocks of the same columns do not run together
COPIED = 16  # bytes at once, at most
AHEAD = 4  # bytes at once, at least, of copies that pass registers by
IN_GROUPS = ((9, 0), (10, 0), (10, 3))  # capabilities whose groups of warps multiply
GROUP_ROWS = 64  # of a tile, at least, for that
MOST_REGISTERS = 230  # by this count; of what has more some spill
AT_ONCE = 3.0  # a multiprocessor may take so many times its share of what memory hands out


class GpuTritonProductSketch(GpuSketch[GpuTritonProductDecisions[Array]]):
    """Tiles whose way to the tensor cores Triton finds."""

    name = "gpu_triton_product"
    decisions = GpuTritonProductDecisions

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        pack = [1, 0] if weights_lie(self.task.spec) else [1]
        options = (
            [16, 32, 64, 128, 256], [16, 32, 64, 128, 256], [32, 64, 128], [4, 8], [2, 3, 4, 5],
            [1, 8], [1, 2, 4, 8], pack, [0, self.card.multiprocessors],
        )  # fmt: skip
        return tuple(column(o) for o in options)

    @property
    def _item(self) -> int:
        spec = self.task.spec
        return ITEMSIZE[spec.nodes[contraction_of(spec).a].dtype]

    def _grouped(self, c: GpuTritonProductDecisions[Array]) -> Mask:
        """Whether groups of warps multiply from shared memory (``wgmma``, ``tcgen05``)."""
        result: Mask = (c.bm >= GROUP_ROWS) & (self.card.capability in IN_GROUPS)
        return result

    @cached_property
    def _copied(self) -> int:
        """Bytes of the first operand that a thread may ask for at once."""
        spec, con = self.task.spec, contraction_of(self.task.spec)
        if not only_viewed(spec, con.a):
            return self._item
        axis = (-2 if rows_together(spec, con) else -1) if con.conv is None else 1
        most = max(1, reach(spec, con.a, axis, COPIED // self._item))
        return most * self._item

    def _shared(self, c: GpuTritonProductDecisions[Array]) -> Array:
        result: Array = c.stages * (c.bm + c.bn) * c.bk * float(self._item)
        return result

    def _registers(self, c: GpuTritonProductDecisions[Array]) -> Array:
        threads = c.warps * float(WARP)
        sums = c.bm * c.bn / threads
        # Places of what a thread asks for, and what comes to registers on its way.
        places = c.bm * c.bk * self._item / self._copied / threads
        places = places + c.bn * c.bk * self._item / COPIED / threads
        down, across = self._of_warp(c)
        fragments = np.where(self._grouped(c), 0.0, 2.0 * (down * 4 + across * 2))
        result: Array = sums + 2.0 * places + fragments + OWN
        return result

    def valid(self, decisions: Decisions) -> Mask:
        c, con = self.columns(decisions), contraction_of(self.task.spec)
        sums = c.bm * c.bn / (c.warps * float(WARP))
        room = self._shared(c) <= self.card.shared_bytes_per_block
        held = self._registers(c) <= self.card.registers / (c.warps * WARP)
        held &= self._registers(c) <= MOST_REGISTERS
        even = np.ceil(con.depth / c.bk) % c.split == 0
        even &= (c.split == 1) | (con.groups * con.rows * con.n * c.split < 2**31)
        tiles = con.groups * np.ceil(con.rows / c.bm) * np.ceil(con.n / c.bn)
        turns = np.ceil(con.depth / c.bk) / c.split
        in_turns = (c.blocks == 0) | ((c.split == 1) & (tiles > c.blocks))
        useful = (c.near == 1) | ((con.rows > c.bm) & (con.n > c.bn))
        useful &= c.stages <= np.maximum(turns, 2)
        # A warp of mma.sync has 16 rows by 8 columns at least.
        useful &= c.bm * c.bn >= c.warps * 128
        result: Mask = room & held & even & in_turns & useful & (sums <= SUMS)
        return result

    def _of_warp(self, c: GpuTritonProductDecisions[Array]) -> tuple[Array, Array]:
        """Tiles of 16 rows and of 8 columns that a warp multiplies: Triton makes it as square as
        it can."""
        most = np.log2(np.minimum(c.warps, c.bm / 16))
        square = np.round(np.log2(np.sqrt(c.warps * c.bm / c.bn)))
        rows = 2.0 ** np.clip(square, 0.0, most)
        return c.bm / 16 / rows, np.maximum(c.bn / 8 / (c.warps / rows), 1.0)

    def _turn_cycles(self, c: GpuTritonProductDecisions[Array], together: Array) -> Array:
        """Of one turn of a block, ``together`` of which a multiprocessor has at once."""
        card, item = self.card, self._item
        pieces = c.bm * c.bk * item / self._copied + c.bn * c.bk * item / COPIED
        asked = pieces / (c.warps * WARP) * ASKED_CYCLES
        flops = card.tf32_flops if item == 4 else card.float16_flops
        peak = SHARE_IN_GROUPS * flops / card.multiprocessors / card.frequency_hz
        products = 2.0 * c.bm * c.bn * c.bk / peak
        filled = (c.bm + c.bn) * c.bk * item / FILL_BYTES
        alone = TURN_IN_GROUPS + asked + WAIT_IN_GROUPS / np.maximum(c.stages - 1.0, 0.5) ** 2
        grouped = np.maximum(together * np.maximum(products, filled), alone)
        down, across = self._of_warp(c)
        sharing = np.maximum(1.0, c.warps * together / QUARTERS)
        step = (down * across * MMA_CYCLES + (down + across / 2) * FRAGMENT_CYCLES) * sharing
        steps = c.bk * item / 32
        begun = np.maximum(c.stages - 1.0, 0.4) if self._copied >= AHEAD else 0.4
        # To ask for copies of sixteen bytes is in what was measured.
        small = c.bm * c.bk * item * (1.0 / self._copied - 1.0 / COPIED)
        small = small / (c.warps * WARP) * ASKED_CYCLES
        apart = TURN_CYCLES + WAIT_CYCLES / begun + small + steps * (STEP_CYCLES + step)
        result: Array = np.where(self._grouped(c), grouped, apart)
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, card, con = self.columns(decisions), self.card, contraction_of(self.task.spec)
        threads, shared, registers = c.warps * float(WARP), self._shared(c), self._registers(c)
        tiles = con.groups * np.ceil(con.rows / c.bm) * np.ceil(con.n / c.bn) * c.split
        turns = np.ceil(con.depth / c.bk) / c.split
        sums = c.bm * c.bn / threads
        depth, item = turns * c.bk, float(self._item)
        operations = 2.0 * tiles * c.bm * c.bn * depth
        traffic = tiles * (c.bm + c.bn) * item * depth
        unique = float(traffic_bytes(self.task.spec))
        contiguous = c.bk * item
        if con.conv is not None and self._copied == self._item:  # neighbours are positions
            contiguous = np.minimum(c.bm, float(con.m[-1])) * item
        resident = np.maximum(self.resident(threads, shared, registers), 1.0)
        each = np.ceil(tiles / card.multiprocessors)
        held = np.where(c.blocks > 0, 1.0, np.minimum(each, resident))
        waves = np.ceil(each / held)
        # A block that goes on to its next tile has asked for it while it writes the one before.
        edge = np.where(c.blocks > 0, EDGE_CYCLES / 2, EDGE_CYCLES)
        grouped = self._grouped(c)
        edge = np.where(grouped, edge + sums * SUM_CYCLES, 0.0)
        turn = self._turn_cycles(c, held)
        compute = waves * (turns * turn + edge) / card.frequency_hz
        filling = unique / (
            card.dram_bytes_per_s * np.minimum(1.0, AT_ONCE * tiles / card.multiprocessors)
        )
        share = self.aligned(contiguous) * np.minimum(1.0, tiles / card.multiprocessors)
        reading = (
            np.maximum(traffic / (card.dram_bytes_per_s * L2_SPEED), unique / card.dram_bytes_per_s)
            / share
        )
        # When the last of it is there, the last products begin.
        last = np.where(grouped, EDGE_CYCLES / 2, turn) / card.frequency_hz
        latency = np.maximum(compute, np.where(grouped, filling, reading) + last) + LAUNCH_S
        latency = latency * np.where((c.near == 1) & (con.rows > c.bm), APART, 1.0)
        parts = 2.0 * c.split * con.groups * con.rows * con.n * ITEMSIZE[con.acc_dtype]
        adding = parts / (card.dram_bytes_per_s * L2_SPEED) + SPLIT_S
        latency = latency + np.where(c.split > 1, adding, 0.0)
        latency = latency * np.where(c.pack == 0, AS_THEY_LIE, 1.0)
        latency = latency * CAREFUL * self.task.together  # its calls are launches of their own
        return Symbols(
            registers, 2.0 * sums * depth, shared, threads, traffic, each, contiguous, operations,
            latency,
        )  # fmt: skip
