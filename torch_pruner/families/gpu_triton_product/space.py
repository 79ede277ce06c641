"""The space of products by Triton."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from torch_pruner.families.gpu import (
    AS_THEY_LIE,
    L2_SPEED,
    LAUNCH_S,
    OWN,
    SPLIT_S,
    SUMS,
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

# Nothing here was measured on a card. The rates are those of other kernels that were: products by
# warpgroups, and by ``mma`` (``families.gpu``, ``gpu_warpgroup.space``).
MMA_SHARE = 0.70  # of the peak: wgmma and tcgen05 from tiles that threads copied
OLDER_SHARE = 0.59  # the same by mma.sync, on cards whose peak that is
FILL_BYTES = 46.0
TURN_CYCLES = 500.0
WAIT_CYCLES = 1500.0
ASKED_CYCLES = 6.0  # for a thread to ask for what it copies at once
EDGE_CYCLES = 1800.0
SUM_CYCLES = 4.0
CAREFUL = 1.1  # of the time: a draft of another family that is as fast was run on a card
COPIED = 16  # bytes at once, at most


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

    @cached_property
    def _wide(self) -> bool:
        """Whether warpgroups, or a whole multiprocessor, multiply from shared memory."""
        return self.card.capability[0] in (9, 10)

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
        fragments = 0.0 if self._wide else (c.bm + c.bn) * 16.0 * self._item / 4 / threads * 2
        result: Array = sums + 2.0 * places + fragments + OWN
        return result

    def valid(self, decisions: Decisions) -> Mask:
        c, con = self.columns(decisions), contraction_of(self.task.spec)
        sums = c.bm * c.bn / (c.warps * float(WARP))
        room = self._shared(c) <= self.card.shared_bytes_per_block
        held = self._registers(c) <= self.card.registers / (c.warps * WARP)
        held &= self._registers(c) <= 255
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

    def _turn_cycles(self, c: GpuTritonProductDecisions[Array], together: Array) -> Array:
        """Of one turn of a block, ``together`` of which a multiprocessor has at once."""
        card = self.card
        flops = card.tf32_flops if self._item == 4 else card.float16_flops
        large = self._wide & (c.bm >= 64)
        # On cards whose peak is that of wgmma or tcgen05, mma.sync reaches what it does on Hopper.
        older = OLDER_SHARE * min(1.0, 989e12 / card.float16_flops)
        peak = np.where(large, MMA_SHARE, older) * flops
        peak = peak / card.multiprocessors / card.frequency_hz
        products = 2.0 * c.bm * c.bn * c.bk / peak
        filled = (c.bm + c.bn) * c.bk * self._item / FILL_BYTES
        pieces = c.bm * c.bk * self._item / self._copied + c.bn * c.bk * self._item / COPIED
        asked = pieces / (c.warps * WARP) * ASKED_CYCLES
        begun = np.maximum(c.stages - 1.0, 0.5) ** 2
        alone = TURN_CYCLES + asked + WAIT_CYCLES / begun
        result: Array = np.maximum(together * np.maximum(products, filled), alone)
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
        contiguous = np.minimum(c.bk * item, np.maximum(float(self._copied), item))
        resident = np.maximum(self.resident(threads, shared, registers), 1.0)
        each = np.ceil(tiles / card.multiprocessors)
        held = np.where(c.blocks > 0, 1.0, np.minimum(each, resident))
        waves = np.ceil(each / held)
        # A block that goes on to its next tile has asked for it while it writes the one before.
        edge = np.where(c.blocks > 0, EDGE_CYCLES / 2, EDGE_CYCLES)
        block = turns * self._turn_cycles(c, held) + edge + sums * SUM_CYCLES
        compute = waves * block / card.frequency_hz
        share = np.minimum(1.0, 3.0 * tiles / card.multiprocessors)
        # Tiles of neighbouring rows and columns are read once where their blocks run together.
        again = np.where(c.near > 1, 0.5, 1.0) * np.maximum(traffic - unique, 0.0)
        memory = unique / (card.dram_bytes_per_s * share)
        memory = np.maximum(memory, again / (4.0 * card.dram_bytes_per_s))
        latency = np.maximum(compute, memory + EDGE_CYCLES / 2 / card.frequency_hz) + LAUNCH_S
        parts = 2.0 * c.split * con.groups * con.rows * con.n * ITEMSIZE[con.acc_dtype]
        adding = parts / (card.dram_bytes_per_s * L2_SPEED) + SPLIT_S
        latency = latency + np.where(c.split > 1, adding, 0.0)
        latency = latency * np.where(c.pack == 0, AS_THEY_LIE, 1.0)
        latency = latency * CAREFUL * self.task.together  # its calls are launches of their own
        return Symbols(
            registers, 2.0 * sums * depth, shared, threads, traffic, each, contiguous, operations,
            latency,
        )  # fmt: skip
