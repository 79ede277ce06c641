"""The space of products on a GPU: tiles in shared memory."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from torch_pruner.families.gpu import (
    AS_THEY_LIE,
    FRAGMENT_CYCLES,
    L2_SPEED,
    LAUNCH_S,
    MMA_CYCLES,
    MMA_SHARE,
    OWN,
    PAD,
    PLAIN_CYCLES,
    QUARTERS,
    REGISTERS,
    SPLIT_S,
    STEP_CYCLES,
    SUMS,
    TURN_CYCLES,
    WAIT_CYCLES,
    WARP,
    WORD_CYCLES,
    GpuSketch,
    column,
)
from torch_pruner.families.gpu_dots.form import stored_bytes
from torch_pruner.families.gpu_product.form import (
    GpuProductDecisions,
    has_narrow_weights,
    weights_lie,
)
from torch_pruner.families.space import Array, Decisions, Mask, Symbols
from torch_pruner.graph.adjacency import columns_apart, rows_together
from torch_pruner.graph.contraction import constant_operand, contraction_of, traffic_bytes
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.precision import is_tf32


class GpuProductSketch(GpuSketch[GpuProductDecisions[Array]]):
    """Tiles in shared memory, on CUDA cores or in tensor cores."""

    name = "gpu_product"
    decisions = GpuProductDecisions

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        dtype = self._dtype
        halves = dtype == "float16" or (dtype == "bfloat16" and self.card.has_bfloat16)
        sides, tiles = [16, 32, 64, 128, 256], [1, 2, 4, 8, 16, 32, 64]
        flags = [0, 1] if halves or self._tf32 else [0]
        flags = [1] if self._narrow else flags
        ahead = [0, 1] if 1 in flags and self.card.capability >= (8, 0) else [0]
        stages = [1, 2, 3, 4] if len(ahead) > 1 else [1, 2]
        split = [1, 2, 4, 8]
        pack = [1, 0] if 1 in flags and weights_lie(self.task.spec) else [1]
        options = (
            sides, sides, [8, 16, 32, 64, 128], tiles, tiles, stages, flags, ahead, split, pack,
        )  # fmt: skip
        return tuple(column(o) for o in options)

    @property
    def _dtype(self) -> str:
        return self.task.spec.nodes[contraction_of(self.task.spec).a].dtype

    @property
    def _tf32(self) -> bool:
        """Whether tensor cores may multiply float32, rounded."""
        spec = self.task.spec
        return self.card.tf32_flops > 0 and is_tf32(spec.nodes[contraction_of(spec).anchor])

    @cached_property
    def _narrow(self) -> bool:
        return has_narrow_weights(self.task.spec)

    @cached_property
    def _constant(self) -> bool:
        spec = self.task.spec
        return constant_operand(spec, contraction_of(spec)) is not None

    @cached_property
    def _apart(self) -> bool:
        """Whether columns of the second operand lie along the reduction."""
        return columns_apart(self.task.spec, contraction_of(self.task.spec))

    def _threads(self, c: GpuProductDecisions[Array]) -> Array:
        per = np.where(c.tensor == 1, float(WARP), 1.0)
        result: Array = (c.bm / c.tm) * (c.bn / c.tn) * per
        return result

    def _registers(self, c: GpuProductDecisions[Array], sums: Array) -> Array:
        fragments = 2.0 * (c.tm / 16 * 4 + c.tn / 8 * 2)
        result: Array = sums + np.where(c.tensor == 1, fragments, c.tm + c.tn) + OWN
        return result

    def _shared(self, c: GpuProductDecisions[Array]) -> Array:
        con = contraction_of(self.task.spec)
        item = np.where(c.tensor == 1, ITEMSIZE[self._dtype], ITEMSIZE[con.acc_dtype])
        lines = (c.tensor == 1) & (not rows_together(self.task.spec, con))
        a = np.where(lines, c.bm * (c.bk + PAD), c.bk * (c.bm + PAD))
        apart = (c.tensor == 1) & ((c.pack == 0) | (not self._constant)) & self._apart
        apart |= self._narrow
        b = np.where(apart, c.bn * (c.bk + PAD), c.bk * (c.bn + PAD))
        result: Array = c.stages * (a + b) * item
        return result

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        threads, sums = self._threads(c), c.bm * c.bn / np.maximum(self._threads(c), 1.0)
        divides = (c.bm % c.tm == 0) & (c.bn % c.tn == 0)
        room = self._shared(c) <= self.card.shared_bytes_per_block
        fits = (threads >= WARP) & (threads <= 1024) & room
        plain = (c.tensor == 0) & (c.tm <= 16) & (c.tn <= 16)
        fragments = (c.tm % 16 == 0) & (c.tn % 8 == 0) & (c.bk % 16 == 0)
        kinds = plain | ((c.tensor == 1) & fragments)
        deep = (c.tensor == 1) & (c.stages > 1)
        kinds = kinds & np.where(c.ahead == 1, deep, c.stages <= 2)
        con, split = contraction_of(self.task.spec), c.split
        even = np.ceil(con.depth / c.bk) % split == 0
        even &= (split == 1) | (con.groups * con.rows * con.n * split < 2**31)
        kinds &= (c.pack == 1) | (c.tensor == 1)
        # More registers than there are for a block's threads would spill. Steps along a turn are
        # unrolled, and the assembler keeps some of their addresses.
        steps = np.where(c.tensor == 1, c.bk / 4, 0.0)
        held = self.resident(threads, self._shared(c), self._registers(c, sums) + steps) >= 1
        result: Mask = divides & fits & (sums <= SUMS) & kinds & even & held
        return result

    def _turn_s(self, c: GpuProductDecisions[Array], together: Array) -> Array:
        """Seconds of one turn of a block, ``together`` of which a multiprocessor has at once."""
        down, across = c.tm / 16, c.tn / 8
        sharing = np.maximum(1.0, self._threads(c) / WARP * together / QUARTERS)
        step = (down * across * MMA_CYCLES + (down + across / 2) * FRAGMENT_CYCLES) * sharing
        steps = np.where(c.tensor == 1, c.bk / (8 if self._tf32 else 16), 0.0)
        early = (c.ahead == 1) & (not self._narrow)
        begun = np.where(early, c.stages - 1.0, np.where(c.stages > 1, 0.4, 0.25))
        plain = np.where(c.tensor == 1, 0.0, c.bk * PLAIN_CYCLES)
        if self._narrow:  # each weight is made a half, by threads of all blocks
            steps_of_threads = c.bn * c.bk * (WORD_CYCLES + 1.0) / WARP / QUARTERS
            plain = plain + steps_of_threads * np.maximum(together, 1.0)
        cycles = TURN_CYCLES + WAIT_CYCLES / begun + steps * (STEP_CYCLES + step) + plain
        result: Array = cycles / self.card.frequency_hz
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, card, con = self.columns(decisions), self.card, contraction_of(self.task.spec)
        tensor = c.tensor == 1
        threads, shared = self._threads(c), self._shared(c)
        item = float(ITEMSIZE[self._dtype])
        down, across = np.ceil(con.rows / c.bm), np.ceil(con.n / c.bn)
        calls = self.task.together
        blocks = calls * con.groups * down * across * c.split
        turns = np.ceil(con.depth / c.bk) / c.split
        sums = c.bm * c.bn / threads
        registers = self._registers(c, sums)
        depth = turns * c.bk
        operations = 2.0 * blocks * c.bm * c.bn * depth
        stored = stored_bytes(self.task.spec, con) if self._narrow else item
        traffic = blocks * (c.bm * item + c.bn * stored) * depth
        unique = float(traffic_bytes(self.task.spec)) * calls
        contiguous = np.minimum(c.bk, c.bn) * item
        each, pace = self.busy(blocks, threads, self.resident(threads, shared, registers))
        # Shared memory hands a warp a value of each thread in a cycle, in which a multiprocessor
        # does four of its multiply-adds.
        issue = np.minimum(1.0, c.tm * c.tn / (4.0 * (c.tm + c.tn)))
        spilled = np.minimum(1.0, REGISTERS / registers)
        useful = threads / (np.ceil(threads / WARP) * WARP)
        fastest = card.tf32_flops if self._tf32 else card.peak_flops(self._dtype)
        peak = np.where(
            tensor, MMA_SHARE * fastest, card.peak_flops(self._dtype, tensor_cores=False)
        )
        one = 2.0 * c.bm * c.bn * depth / (peak / card.multiprocessors)
        resident = np.maximum(self.resident(threads, shared, registers), 1.0)
        waves = np.ceil(each / resident)
        plain = each * one / (pace * issue * spilled * useful)
        compute = np.where(tensor, each * one, plain)
        turn = self._turn_s(c, np.minimum(each, resident))
        compute = np.maximum(compute, waves * turns * turn)
        share = np.minimum(1.0, blocks / card.multiprocessors)
        memory = np.maximum(
            traffic / (card.dram_bytes_per_s * L2_SPEED), unique / card.dram_bytes_per_s
        ) / (self.aligned(contiguous) * share)
        # When the last of it is there, the last turn begins.
        latency = np.maximum(compute, memory + turn) + LAUNCH_S
        # Parts of sums are written, read again and added by a launch of their own.
        parts = 2.0 * calls * c.split * con.groups * con.rows * con.n * ITEMSIZE[con.acc_dtype]
        adding = parts / (card.dram_bytes_per_s * L2_SPEED) + SPLIT_S
        latency = latency + np.where(c.split > 1, adding, 0.0)
        latency = latency * np.where(c.pack == 0, AS_THEY_LIE, 1.0)
        return Symbols(
            registers, 2.0 * sums * depth, shared, threads, traffic, each, contiguous, operations,
            latency,
        )  # fmt: skip
