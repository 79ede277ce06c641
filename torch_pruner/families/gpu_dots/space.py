"""The space of products of few rows on a GPU."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from torch_pruner.families.gpu import (
    EARLY_S,
    EXCHANGE_S,
    EXCHANGES,
    LAUNCH_S,
    OWN,
    QUARTERS,
    SHARED_BYTES_A_CYCLE,
    SUMS,
    WARP,
    WORD_CYCLES,
    GpuSketch,
    column,
)
from torch_pruner.families.gpu_dots.form import (
    GpuDotsDecisions,
    computes,
    gathered_bytes,
    never_written,
    stored_bytes,
    vectors,
    words_product,
)
from torch_pruner.families.space import Array, Decisions, Mask, Symbols
from torch_pruner.graph.contraction import contraction_of, traffic_bytes
from torch_pruner.graph.ops import ITEMSIZE

MOST_SUMS = SUMS // 4  # of a thread: each is exchanged
MOST_ASKED = 256  # bytes, in registers
MOST_PRODUCTS = 64  # of vectors, before a thread asks again: code that no loop shortens
WORD_BYTES, SUM_BYTES = 4, 4  # of a register, and of a sum
CHUNK = 8  # weights of a column that are floats at once: see codegen.parts.gpu.weights
# Of products that wait for memory; none of these was measured.
MEMORY_S = 0.8e-6  # from asking memory until the answer, under load
FLOAT_CYCLES = 1.0  # to make an element a number to multiply with, beside the products
COMPUTED_CYCLES = 16.0  # to compute one
SUM_CYCLES = 2.0  # of each exchange of a sum


class GpuDotsSketch(GpuSketch[GpuDotsDecisions[Array]]):
    """A few threads for each column."""

    name = "gpu_dots"
    decisions = GpuDotsDecisions

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        threads, along = [64, 128, 256, 512], [WARP * n for n in (1, 2, 4, 8, 16)]
        options = (threads, along, [1, 2, 4, 8], [1, 2, 4, 8], self.early(self._known))
        return tuple(column(o) for o in options)

    @cached_property
    def _known(self) -> bool:
        return never_written(self.task.spec, contraction_of(self.task.spec))

    @cached_property
    def _vl(self) -> int:
        return vectors(self.task.spec, contraction_of(self.task.spec))[0]

    def _shared(self, c: GpuDotsDecisions[Array]) -> Array:
        con = contraction_of(self.task.spec)
        left = c.threads / WARP * con.rows * c.columns * SUM_BYTES
        result: Array = left + gathered_bytes(self.task.spec, con)
        return result

    def _asked(self, c: GpuDotsDecisions[Array]) -> Array:
        """Bytes of weights that a thread asks for at once."""
        con, vl = contraction_of(self.task.spec), self._vl
        result: Array = c.columns * c.ahead * (vl * stored_bytes(self.task.spec, con))
        return result

    def _registers(self, c: GpuDotsDecisions[Array]) -> Array:
        con = contraction_of(self.task.spec)
        words = self._asked(c) / WORD_BYTES
        result: Array = OWN + con.rows * c.columns + words + (c.columns + 1) * CHUNK
        return result

    def valid(self, decisions: Decisions) -> Mask:
        c, con, vl = self.columns(decisions), contraction_of(self.task.spec), self._vl
        steps = np.ceil(con.depth / (c.along * vl))
        shares = (c.threads % c.along == 0) & (con.rows * c.columns <= MOST_SUMS)
        # Nobody waits for what does not exist: neither along the reduction nor across it.
        useful = (c.along == WARP) | (c.along * vl < 2 * con.depth)
        useful &= c.ahead <= steps
        useful &= (c.columns == 1) | (c.columns <= con.n)
        useful &= (c.early == 0) | (c.along * vl <= con.depth)
        shared = self._shared(c)
        asked = (self._asked(c) <= MOST_ASKED) & (con.rows * c.columns * c.ahead <= MOST_PRODUCTS)
        room = asked & (shared <= self.card.shared_bytes_per_block)
        room &= self.resident(c.threads, shared, self._registers(c)) >= 1
        result: Mask = shares & useful & room
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, card, con = self.columns(decisions), self.card, contraction_of(self.task.spec)
        calls, vl = self.task.together, self._vl
        groups = c.threads / c.along
        blocks = calls * con.groups * np.ceil(con.n / (groups * c.columns))
        shared, registers = self._shared(c), self._registers(c)
        resident = np.maximum(self.resident(c.threads, shared, registers), 1.0)
        each, pace = self.busy(blocks, c.threads, resident)
        steps = np.ceil(con.depth / (c.along * vl))
        item = stored_bytes(self.task.spec, con)
        # What all threads ask for at once, of what has to be on its way to keep memory busy.
        held = np.minimum(each, resident) * c.threads
        flying = held * self._asked(c) * card.multiprocessors / (card.dram_bytes_per_s * MEMORY_S)
        filled = np.minimum(1.0, blocks / card.multiprocessors)
        unique = float(traffic_bytes(self.task.spec)) * calls
        memory = unique / (card.dram_bytes_per_s * np.minimum(1.0, flying) * filled)
        # A multiprocessor starts an instruction of each of its quarters in a cycle.
        given = COMPUTED_CYCLES if computes(self.task.spec, con) else FLOAT_CYCLES
        made = FLOAT_CYCLES if words_product(self.task.spec) is None else WORD_CYCLES
        once = made + con.rows * (1.0 + given / c.columns)
        warps = c.threads / WARP
        issued = steps * vl * c.columns * once * warps / QUARTERS
        exchanged = EXCHANGES * con.rows * c.columns * SUM_CYCLES * warps / QUARTERS
        # Both operands pass by the first cache, to which the first operand comes back.
        taken = c.columns * item + con.rows * ITEMSIZE[self.task.spec.nodes[con.a].dtype]
        read = steps * vl * taken * c.threads / SHARED_BYTES_A_CYCLE
        compute = each * (np.maximum(issued / pace, read) + exchanged) / card.frequency_hz
        # Every block computes a first operand that memory has not, before it asks for weights.
        gathered = con.rows * con.depth if gathered_bytes(self.task.spec, con) else 0
        before = np.minimum(each, resident) * gathered * COMPUTED_CYCLES / (WARP * QUARTERS)
        ends = EXCHANGES * EXCHANGE_S + (exchanged + issued / steps) / card.frequency_hz
        latency = before / card.frequency_hz + np.maximum(compute, memory + ends) + LAUNCH_S
        latency = latency - EARLY_S * c.early
        operations = 2.0 * blocks * groups * c.columns * con.rows * steps * c.along * vl
        return Symbols(
            registers, 2.0 * con.rows * c.columns * steps * vl, shared, c.threads,
            unique + np.zeros(len(c.threads)), each, c.along * vl * item, operations, latency,
        )  # fmt: skip
