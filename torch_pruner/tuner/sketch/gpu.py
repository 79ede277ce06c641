"""The spaces of kernels on GPUs: what ``codegen.gpu`` emits, with Pruner's symbols of each point.

Level 0 is a thread with its registers, level 1 a multiprocessor with its shared memory, level 2 the
card with its memory. The latency is Pruner's (ASPLOS 2025, section 4.1, equation 1): operations
over the peak times the penalties of compute, bytes over the bandwidth times those of memory. Unlike
the release it counts bytes and not elements, asks how many blocks a multiprocessor holds at once,
and takes the slower of the two, since copies and products overlap.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.contraction import contraction_of, traffic_bytes
from torch_pruner.graph.ops import ITEMSIZE, OpKind
from torch_pruner.graph.precision import is_tf32
from torch_pruner.graph.rows import row_domain
from torch_pruner.tuner.sketch.base import Array, Decisions, Mask, Sketch, Symbols

if TYPE_CHECKING:
    from torch_pruner.cards import Card
    from torch_pruner.task import Task

WARP = 32
PAD = 8  # elements after each line of a tile: see codegen.gpu.product
REGISTERS = 255  # of a thread, at most
OWN = 40  # registers for addresses and counters
TRANSACTION = 32  # bytes of a sector
SUMS = 128  # a thread keeps at most; more would spill
L2_SPEED = 3.0  # of memory's
LAUNCH_S = 3e-6
WARPS_TO_HIDE = 8.0  # a multiprocessor needs to keep its pipelines busy
SCORE_OPS = 60.0  # of attention, for one score
PHASES = 5  # of a turn over the keys, of which only the first waits for memory
BARRIER_S = 0.2e-6  # a turn of the reduction: copies wait for memory


def _column(values: list[int]) -> Decisions:
    return np.array(values, dtype=np.int64)


class GpuSketch(Sketch):
    """Shared by all: a card, and how many blocks of a kernel it runs at once."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        card = task.target.card
        if card is None:
            raise ValueError("the task's target is no GPU")
        self.card: Card = card

    def default(self) -> Decisions:
        return self.best_predicted()

    def resident(self, threads: Array, shared: Array, registers: Array) -> Array:
        """Blocks that a multiprocessor holds at once: the scarcest of its resources decides."""
        card = self.card
        whole_warps = np.ceil(threads / WARP) * WARP
        limits = [
            np.full(len(threads), float(card.blocks)),
            np.floor(card.threads / whole_warps),
            np.floor(card.shared_bytes / np.maximum(shared, 1.0)),
            np.floor(card.registers / (whole_warps * np.minimum(registers, REGISTERS))),
        ]
        result: Array = np.minimum.reduce(limits)
        return result

    def busy(self, blocks: Array, threads: Array, resident: Array) -> tuple[Array, Array]:
        """(blocks of the busiest multiprocessor, share of its pace that the warps it holds reach).

        The first is Pruner's wave quantisation, P of level 2; the second its occupancy.
        """
        each = np.ceil(blocks / self.card.multiprocessors)
        held = np.minimum(each, np.maximum(resident, 1.0)) * np.ceil(threads / WARP)
        return each, np.minimum(1.0, held / WARPS_TO_HIDE)

    def aligned(self, contiguous: Array | float) -> Array:
        """P of memory at level 2: useful bytes of the sectors that a contiguous read touches."""
        sectors = np.ceil(np.asarray(contiguous, dtype=np.float64) / TRANSACTION)
        result: Array = contiguous / (np.maximum(sectors, 1.0) * TRANSACTION)
        return result


class GpuProductSketch(GpuSketch):
    """Tiles in shared memory, on CUDA cores or in tensor cores."""

    name = "gpu_product"
    names = ("bm", "bn", "bk", "tm", "tn", "stages", "tensor", "ahead", "split")

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        dtype = self._dtype
        halves = dtype == "float16" or (dtype == "bfloat16" and self.card.has_bfloat16)
        sides, tiles = [16, 32, 64, 128, 256], [1, 2, 4, 8, 16, 32, 64]
        flags = [0, 1] if halves or self._tf32 else [0]
        ahead = [0, 1] if len(flags) > 1 and self.card.capability >= (8, 0) else [0]
        stages = [1, 2, 3, 4] if len(ahead) > 1 else [1, 2]
        split = [1, 2, 4, 8]
        options = (sides, sides, [8, 16, 32, 64], tiles, tiles, stages, flags, ahead, split)
        return tuple(_column(o) for o in options)

    @property
    def _dtype(self) -> str:
        return self.task.spec.nodes[contraction_of(self.task.spec).a].dtype

    @property
    def _tf32(self) -> bool:
        """Whether tensor cores may multiply float32, rounded."""
        spec = self.task.spec
        return self.card.tf32_flops > 0 and is_tf32(spec.nodes[contraction_of(spec).anchor])

    def _threads(self, c: dict[str, Array]) -> Array:
        per = np.where(c["tensor"] == 1, float(WARP), 1.0)
        result: Array = (c["bm"] / c["tm"]) * (c["bn"] / c["tn"]) * per
        return result

    def _shared(self, c: dict[str, Array]) -> Array:
        con = contraction_of(self.task.spec)
        item = np.where(c["tensor"] == 1, ITEMSIZE[self._dtype], ITEMSIZE[con.acc_dtype])
        a = np.where(c["tensor"] == 1, c["bm"] * (c["bk"] + PAD), c["bk"] * (c["bm"] + PAD))
        result: Array = c["stages"] * (a + c["bk"] * (c["bn"] + PAD)) * item
        return result

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        threads, sums = self._threads(c), c["bm"] * c["bn"] / np.maximum(self._threads(c), 1.0)
        divides = (c["bm"] % c["tm"] == 0) & (c["bn"] % c["tn"] == 0)
        room = self._shared(c) <= self.card.shared_bytes_per_block
        fits = (threads >= WARP) & (threads <= 1024) & room
        plain = (c["tensor"] == 0) & (c["tm"] <= 16) & (c["tn"] <= 16)
        fragments = (c["tm"] % 16 == 0) & (c["tn"] % 8 == 0) & (c["bk"] % 16 == 0)
        kinds = plain | ((c["tensor"] == 1) & fragments)
        deep = (c["tensor"] == 1) & (c["stages"] > 1)
        kinds = kinds & np.where(c["ahead"] == 1, deep, c["stages"] <= 2)
        con, split = contraction_of(self.task.spec), c["split"]
        even = np.ceil(con.depth / c["bk"]) % split == 0
        even &= (split == 1) | (con.groups * con.rows * con.n * split < 2**31)
        result: Mask = divides & fits & (sums <= SUMS) & kinds & even
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, card, con = self.columns(decisions), self.card, contraction_of(self.task.spec)
        tensor = c["tensor"] == 1
        threads, shared = self._threads(c), self._shared(c)
        item = float(ITEMSIZE[self._dtype])
        down, across = np.ceil(con.rows / c["bm"]), np.ceil(con.n / c["bn"])
        blocks = con.groups * down * across * c["split"]
        turns = np.ceil(con.depth / c["bk"]) / c["split"]
        sums = c["bm"] * c["bn"] / threads
        fragments = c["tm"] / 16 * 4 + c["tn"] / 8 * 2
        registers = sums + np.where(tensor, fragments, c["tm"] + c["tn"]) + OWN
        depth = turns * c["bk"]
        operations = 2.0 * blocks * c["bm"] * c["bn"] * depth
        traffic = blocks * (c["bm"] + c["bn"]) * depth * item
        unique = float(traffic_bytes(self.task.spec))
        contiguous = np.minimum(c["bk"], c["bn"]) * item
        each, pace = self.busy(blocks, threads, self.resident(threads, shared, registers))
        # Reading a tile's row and column from shared memory takes a share of the issue slots.
        issue = np.where(
            tensor,
            c["tm"] * c["tn"] / (c["tm"] * c["tn"] + 8.0 * (c["tm"] + c["tn"])),
            c["tm"] * c["tn"] / (c["tm"] * c["tn"] + 0.5 * (c["tm"] + c["tn"])),
        )
        spilled = np.minimum(1.0, REGISTERS / registers)
        useful = threads / (np.ceil(threads / WARP) * WARP)
        fastest = card.tf32_flops if self._tf32 else card.peak_flops(self._dtype)
        peak = np.where(tensor, fastest, card.peak_flops(self._dtype, tensor_cores=False))
        one = 2.0 * c["bm"] * c["bn"] * depth / (peak / card.multiprocessors)
        compute = each * one / (pace * issue * spilled * useful)
        share = np.minimum(1.0, blocks / card.multiprocessors)
        memory = np.maximum(
            traffic / (card.dram_bytes_per_s * L2_SPEED), unique / card.dram_bytes_per_s
        ) / (self.aligned(contiguous) * share)
        waits = each / np.maximum(self.resident(threads, shared, registers), 1.0)
        latency = np.maximum(compute, memory) + LAUNCH_S
        hidden = np.where(c["ahead"] == 1, 2.0 * c["stages"], c["stages"])
        latency = latency + waits * turns * BARRIER_S / hidden
        # Parts of sums are written, read again and added by a launch of their own.
        parts = 2.0 * c["split"] * con.groups * con.rows * con.n * ITEMSIZE[con.acc_dtype]
        adding = parts / (card.dram_bytes_per_s * L2_SPEED) + LAUNCH_S
        latency = latency + np.where(c["split"] > 1, adding, 0.0)
        return Symbols(
            registers, 2.0 * sums * depth, shared, threads, traffic, each, contiguous, operations,
            latency,
        )  # fmt: skip


class GpuAttentionSketch(GpuSketch):
    """Scores in shared memory, both products in tensor cores."""

    name = "gpu_attention"
    names = ("bm", "bn")

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
        return (_column([16, 32, 64, 128]), _column([32, 64, 128]))

    def _shared(self, c: dict[str, Array]) -> Array:
        bm, bn = c["bm"], c["bn"]
        halves = (bm + bn) * (self.depth + PAD) + bn * (self.width + PAD) + bm * (bn + PAD)
        rows = bm * (bn + 2) + 4 * bm + 4 * bm  # scores; what is kept of rows and by threads
        result: Array = 2.0 * halves + 4.0 * rows + 10 * 128  # every array begins at a whole 128
        return result

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        sums = (c["bn"] + self.width) / 2
        fits = self._shared(c) <= self.card.shared_bytes_per_block
        result: Mask = fits & (sums + OWN <= REGISTERS - 40)
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, card, att = self.columns(decisions), self.card, self.att
        bm, bn, threads = c["bm"], c["bn"], 2.0 * c["bm"]
        shared, registers = self._shared(c), (c["bn"] + self.width) / 2 + OWN + 24
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
        waits = each / np.maximum(resident, 1.0) * turns * PHASES * BARRIER_S
        operations = blocks * products
        ones = np.ones(len(decisions))
        return Symbols(
            registers, products / threads, shared, threads, traffic * ones, each,
            self.depth * item * ones, operations * ones,
            np.maximum(compute, memory) + waits + LAUNCH_S,
        )  # fmt: skip


class _GpuSweep(GpuSketch):
    """Kernels whose time is the way of their inputs and outputs."""

    names: ClassVar[tuple[str, ...]] = ("threads",)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return (_column([64, 128, 256, 512]),)

    def _estimate(
        self, c: dict[str, Array], blocks: Array, operations: float, contiguous: Array | float
    ) -> Symbols:
        card, moved = self.card, float(traffic_bytes(self.task.spec))
        threads, full = c["threads"], np.ones(len(c["threads"]))
        registers = full * OWN
        each, pace = self.busy(blocks, threads, self.resident(threads, full, registers))
        compute = each * threads * (operations / (blocks * threads)) / pace
        compute = compute / (card.float32_flops / card.multiprocessors)
        share = np.minimum(1.0, blocks / card.multiprocessors) * pace
        memory = moved / (card.dram_bytes_per_s * self.aligned(contiguous) * share)
        return Symbols(
            registers, operations / (blocks * threads), full * 0.0, threads, full * moved, each,
            full * contiguous, full * operations, np.maximum(compute, memory) + LAUNCH_S,
        )  # fmt: skip


class GpuElementwiseSketch(_GpuSweep):
    """Kernels without a reduction."""

    name = "gpu_elementwise"
    names = ("vl", "threads")

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return (_column([1, 2, 4]), _column([64, 128, 256, 512]))

    def valid(self, decisions: Decisions) -> Mask:
        result: Mask = self._numel % decisions[:, 0] == 0
        return result

    @property
    def _numel(self) -> int:
        return self.task.spec.nodes[self.task.spec.outputs[0]].numel

    def symbols(self, decisions: Decisions) -> Symbols:
        c = self.columns(decisions)
        item = ITEMSIZE[self.task.spec.nodes[self.task.spec.outputs[0]].dtype]
        blocks = np.ceil(self._numel / (c["vl"] * c["threads"]))
        work = float(self._numel * len(self.task.spec.nodes))
        return self._estimate(c, blocks, work, c["vl"] * WARP * item)


class GpuColumnsSketch(_GpuSweep):
    """One thread per output element: windows, and reductions over outer axes."""

    name = "gpu_columns"

    def symbols(self, decisions: Decisions) -> Symbols:
        c, spec = self.columns(decisions), self.task.spec
        numel, item = spec.nodes[spec.outputs[0]].numel, ITEMSIZE[spec.nodes[spec.outputs[0]].dtype]
        depth = 0
        for node in spec.nodes:
            if node.kind is OpKind.WINDOW:
                depth += math.prod(node.attr("kernel"))
            elif node.kind is OpKind.REDUCE:
                depth += spec.nodes[node.inputs[0]].numel // max(node.numel, 1)
        return self._estimate(c, np.ceil(numel / c["threads"]), float(numel * depth), WARP * item)


class GpuDirectSketch(_GpuSweep):
    """One thread per output element of a product."""

    name = "gpu_direct"

    def symbols(self, decisions: Decisions) -> Symbols:
        c, con = self.columns(decisions), contraction_of(self.task.spec)
        numel = con.groups * con.rows * con.n
        item = ITEMSIZE[self.task.spec.nodes[con.anchor].dtype]
        found = self._estimate(c, np.ceil(numel / c["threads"]), float(con.flops), WARP * item)
        # Both operands come from a cache for every product.
        reads = 2.0 * con.flops / 2.0 * ITEMSIZE[self.task.spec.nodes[con.a].dtype]
        cached = reads / (self.card.dram_bytes_per_s * L2_SPEED * 4.0)
        latency = np.maximum(found.latency_s, cached + LAUNCH_S)
        return Symbols(
            found.s1_registers, found.s2_tile_ops, found.s3_cache_bytes, found.s4_tasks,
            found.s5_traffic_bytes, found.s6_rounds, found.s7_contiguous_bytes, found.s8_ops,
            latency,
        )  # fmt: skip


class GpuRowsSketch(_GpuSweep):
    """A block per row."""

    name = "gpu_rows"

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return (_column([32, 64, 128, 256, 512, 1024]),)

    def symbols(self, decisions: Decisions) -> Symbols:
        c, domain = self.columns(decisions), row_domain(self.task.spec)
        blocks = np.full(len(decisions), float(domain.rows))
        passes = len(domain.reductions) + 1
        turns = np.ceil(domain.width / c["threads"])
        item = ITEMSIZE[self.task.spec.nodes[domain.reductions[0]].dtype]
        work = float(domain.rows * domain.width * len(self.task.spec.nodes))
        found = self._estimate(c, blocks, work, np.minimum(WARP, domain.width) * item)
        rounds = np.ceil(found.s6_rounds / np.maximum(self.card.threads / c["threads"], 1.0))
        waits = rounds * (passes * turns * BARRIER_S + 3 * len(domain.reductions) * BARRIER_S)
        return Symbols(
            found.s1_registers, found.s2_tile_ops, found.s3_cache_bytes, found.s4_tasks,
            found.s5_traffic_bytes, found.s6_rounds, found.s7_contiguous_bytes, found.s8_ops,
            found.latency_s + waits,
        )  # fmt: skip
