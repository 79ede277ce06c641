"""The spaces of kernels on GPUs: what ``gpu_*`` families emit, with Pruner's symbols of each point.

Level 0 is a thread with its registers, level 1 a multiprocessor with its shared memory, level 2 the
card with its memory. The latency is Pruner's (ASPLOS 2025, section 4.1, equation 1): operations
over the peak times the penalties of compute, bytes over the bandwidth times those of memory. Unlike
the release it counts bytes and not elements, asks how many blocks a multiprocessor holds at once,
and takes the slower of the two, since copies and products overlap.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families.space import Array, C, Decisions, Sketch, Symbols
from torch_pruner.graph.contraction import traffic_bytes

if TYPE_CHECKING:
    from torch_pruner.cards import Card
    from torch_pruner.task import Task

WARP = 32
PAD = 8  # elements after each line of a tile: see gpu_product.emit
REGISTERS = 255  # of a thread, at most
OWN = 40  # registers for addresses and counters
TRANSACTION = 32  # bytes of a sector
SUMS = 128  # a thread keeps at most; more would spill
EARLY_S = 0.4e-6  # of LAUNCH_S, where weights were asked for before that; not measured
L2_SPEED = 1.03  # of memory's
LAUNCH_S = 2.2e-6  # until a kernel's first result, after another that it does not wait for
# What follows, and the two lines above, were fitted to 69 products in float16 and 30 other kernels
# measured on an H100 (docs/data/h100-kernels.json and -products.json), in cycles of its clock. The
# logarithms of what the products took and of what is expected differ by 0.14 (root mean square).
TURN_CYCLES = 263.0  # a barrier, a wait for copies, and the addresses of the next
WAIT_CYCLES = 68.0  # for copies that were begun a turn before; less where they were begun earlier
STEP_CYCLES = 20.0  # of tensor cores along the reduction, until the first fragments are there
FRAGMENT_CYCLES = 30.0  # to load one, while others are multiplied
MMA_CYCLES = 8.7  # of a warp that has a quarter of a multiprocessor for itself
PLAIN_CYCLES = 40.0  # of CUDA cores, for one position of the reduction; not measured
MMA_SHARE = 0.59  # of the peak that wgmma reaches and mma.sync can
QUARTERS = 4  # of a multiprocessor, each with tensor cores of its own
SPLIT_S = 2.9e-6  # the launch that adds parts of sums up, which waits for the one before
ELEMENT_S = 17e-9  # a pass of a thread over its elements of a row, each
NEIGHBOUR_S = 4e-9  # one more neighbour of it in a vector; not measured
COMBINED_S = 9e-9  # a value of shared memory, where threads combine what each has summed up
EXCHANGES = 5  # until all threads of a warp have what each of them had
EXCHANGE_S = 15e-9  # between the threads of a warp, each time; not measured
THREAD_S = 0.6e-9  # of a block, to start it
WARPS_TO_HIDE = 8.0  # a multiprocessor needs to keep its pipelines busy
WORD_CYCLES = 3.0  # of a thread, to make a weight of a word a number; not measured
AS_THEY_LIE = 1.01  # of the time with packed weights, beside what is known; not measured
QUERIES = 16  # of attention, for each warp
# Of attention, chosen by hand so that the eight drafts for 12 heads of 64, 128 tokens, come in the
# order in which an H100 ran them: a score of a thread, and 16 bytes that it copies, with and
# without waiting for them.
SCORE_CYCLES = 10.0
LOAD_CYCLES = 20.0
COPY_CYCLES = 5.0
SHARED_BYTES_A_CYCLE = 128.0  # of shared memory, for all warps of a multiprocessor


def column(values: list[int]) -> Decisions:
    return np.array(values, dtype=np.int64)


class GpuSketch(Sketch[C]):
    """Shared by all: a card, and how many blocks of a kernel it runs at once."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        card = task.target.card
        if card is None:
            raise ValueError("the task's target is no GPU")
        self.card: Card = card

    def default(self) -> Decisions:
        return self.best_predicted()

    def early(self, known: bool) -> list[int]:
        """Whether a kernel may ask for weights before it waits; ``known``: nobody writes them."""
        return [1, 0] if known and self.card.has_early_launches else [0]

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


class GpuSweep(GpuSketch[C]):
    """Kernels whose time is the way of their inputs and outputs."""

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        return (column([64, 128, 256, 512]),)

    def _estimate(
        self, threads: Array, blocks: Array, operations: float, contiguous: Array | float
    ) -> Symbols:
        card, moved = self.card, float(traffic_bytes(self.task.spec))
        full = np.ones(len(threads))
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

    def _waiting(self, found: Symbols, threads: Array, seconds: Array | float) -> Symbols:
        """The same, where a thread of blocks of ``threads`` waits for ``seconds`` in all."""
        held = np.minimum(self.card.threads // threads, self.card.blocks)
        rounds = np.ceil(found.s6_rounds / np.maximum(held, 1.0))
        waits = rounds * (seconds + threads * THREAD_S)
        return replace(found, latency_s=found.latency_s + waits)
