"""The space of register-tiled contractions, with the draft model's estimates for CPUs.

The symbols are those of Pruner's Symbol-based Analyzer. Decisions: see ``form``.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.contraction.flow import contraction_flow
from torch_pruner.families.contraction.form import (
    PACKED_NEAR,
    ContractionDecisions,
    packs_near,
    partial_sums,
)
from torch_pruner.families.contraction.memory import scattered_cycles, waiting_seconds
from torch_pruner.families.contraction.packing import packed_cycles
from torch_pruner.families.contraction.sizes import drafted_sizes
from torch_pruner.families.contraction.tiles import MAX_ROWS, TileTables, tile_tables
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.adjacency import columns_adjacent, reduction_stride, rows_adjacent
from torch_pruner.graph.contraction import (
    NEAR_BYTES,
    constant_operand,
    contraction_of,
    copied_shape,
    copies_first,
    is_widened,
)
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.strided import matrix_strides

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.flow import FlowStep
    from torch_pruner.task import Task


_FEW, _LONG = 8, 256  # rows; positions of a reduction
_WIDE_PANEL = 0.05  # for each vector of a row beyond two (Zen 4)
_SHORT_LINE = 12  # elements of a line of a kernel, all channels: LLVM unrolls as many
_TAKEN_BY_LINE, _SPILLING = 7, 0.15  # registers; time that each beyond those left adds
WIDEN_CYCLES = 1.5  # to make float32 of a vector of narrower elements, into a near cache

TURNED_CYCLES = 1.0  # of a step of rows that are neighbours, whose lines serve several tiles


class ContractionSketch(Sketch[ContractionDecisions[Array]]):
    """See the module. One sketch serves matmul and convolution of every kind."""

    name = "contraction"
    decisions = ContractionDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.con, *self._fewer = drafted_sizes(task.spec, contraction_of(task.spec))
        self.constant = constant_operand(task.spec, self.con) is not None
        # For a few rows (decoding) it is a cache of keys or values, which weights have pushed out.
        self.far = self.constant or self.con.rows < _FEW
        self.scattered = scattered_cycles(task, self.con)
        self.itemsize = ITEMSIZE[self.con.acc_dtype]
        self.stored: float = ITEMSIZE[task.spec.nodes[self.con.b].dtype]  # bytes of a weight
        self.widen_cycles = WIDEN_CYCLES
        self.lanes = max(1, task.target.vector_bytes // self.itemsize)

    @cached_property
    def widths(self) -> list[int]:
        """Elements of a vector: half of one, too, where columns fill it better and none is lost.

        Where one pipe multiplies a whole vector in a cycle it is two of half the width.
        """
        half, n = self.lanes // 2, self.con.n
        halves = self.task.target.vector_bytes == 64 and self.task.target.fma_per_cycle == 1
        fills = half and -(-n // half) * half < -(-n // self.lanes) * self.lanes
        return [self.lanes, half] if halves and fills else [self.lanes]

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        con, widths = self.con, self.widths
        vectors = -(-con.n // min(widths))
        rows = [t for t in range(1, MAX_ROWS + 1) if t <= con.rows] or [1]
        chunks = [c for c in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if c <= con.rows] or [1]
        columns = [v for v in (1, 2, 3, 4, 6) if v <= vectors] or [1]
        unroll = [u for u in (1, 2, 4) if u <= con.k[-1]] or [1]
        parallel = [0, 1] if self.task.threads > 1 else [0]
        pack = [1] if self.constant else [0, 1, PACKED_NEAR]
        pack = pack if packs_near(self.task.spec, con) else pack[:2]
        ahead = [0, 1] if self.constant else [0]
        return tuple(
            np.array(d, dtype=np.int64)
            for d in (
                widths,
                rows,
                columns,
                chunks,
                [0, 1],
                unroll,
                pack,
                parallel,
                ahead,
                con.reduction_blocks(),
            )
        )

    def valid(self, decisions: Decisions) -> Mask:
        c = self.columns(decisions)
        con, registers = self.con, self.task.target.vector_registers
        tiles = self._by_rows.tiles[c.tm.astype(np.int64)]
        blocks = np.ceil(con.n / (c.nv * c.vl))
        filled = c.nv <= np.maximum(np.ceil(con.n / c.vl), 1)
        fits = c.tm * c.nv + c.nv + 1 <= registers
        chunked = (c.mc == 1) | (c.mc <= tiles)
        direct = (c.pack > 0) | (con.n % (c.nv * c.vl) == 0)
        tasks = con.groups * blocks * c.mc
        shared = (c.par == 0) | (tasks >= 2)
        serial = (c.par == 1) | (c.mc == 1)  # chunks only serve parallelism,
        serial |= np.bool_(con.shares_rows)  # and what groups share
        ordered = (c.order == 0) | (c.mc > 1)
        follows = (c.ahead == 0) | (con.groups * blocks > 1)  # there is a next panel
        blocked = (c.kb == 1) | (c.pack > 0)  # a block of a panel lies in one piece
        near = con.depth / c.kb * c.nv * c.vl * self.itemsize <= NEAR_BYTES
        blocked &= (c.pack != PACKED_NEAR) | near
        result: Mask = (
            fits & filled & chunked & direct & shared & serial & ordered & follows & blocked
        )
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        found = self._symbols(decisions)
        for smaller in self._smaller:  # as if time went with rows, and both sizes count alike
            less = smaller._symbols(decisions).latency_s * (self.con.rows / smaller.con.rows)
            found = replace(found, latency_s=np.sqrt(found.latency_s * less))
        return found

    @cached_property
    def _smaller(self) -> list[ContractionSketch]:
        """This sketch at fewer rows."""
        found = []
        for con in self._fewer:
            sketch = copy.copy(self)
            for name in ("_by_rows", "domains", "widths", "_smaller"):
                sketch.__dict__.pop(name, None)
            sketch.con, sketch._fewer = con, []
            found.append(sketch)
        return found

    def _symbols(self, decisions: Decisions) -> Symbols:
        """The symbols at ``self.con``'s rows."""
        c, con, target = self.columns(decisions), self.con, self.task.target
        spec, threads, size = self.task.spec, self.task.threads, self.itemsize
        bn = c.nv * c.vl
        tiles, blocks = self._by_rows.tiles[c.tm.astype(np.int64)], np.ceil(con.n / bn)
        per_chunk = np.ceil(tiles / c.mc)
        tasks = con.groups * blocks * c.mc

        registers = c.tm * c.nv + c.nv + 1  # S1
        fmas = c.tm * c.nv
        second = self.stored

        widened = is_widened(spec, con, self.constant, c)
        panel = con.depth * bn * np.where(widened, size, second)
        rows_bytes = c.tm * size * (con.depth if con.conv is None else con.k[-1] * 2)
        held = (panel + rows_bytes) / c.kb  # S3
        kernel = max(1.0, float(np.prod(con.k[:-1])))
        a_bytes = con.rows * con.depth * size / kernel  # each input element once
        busy = self._tile_cycles(c, c.nv)
        spilled = np.where(
            held > 0.8 * target.l1_bytes,
            np.maximum(0, panel / machine.bytes_per_cycle(held, target) - 0.6 * busy),
            0,
        )
        tile_cycles = self._busiest(c, busy, self._tile_cycles(c, self._last(c))) + spilled
        rows_reread = np.where(c.order == 0, a_bytes / c.mc, rows_bytes)
        chunk_bytes = panel + a_bytes / c.mc / con.groups
        stream = chunk_bytes / machine.bytes_per_cycle(panel + rows_reread, target) * 0.3
        if con.shares_rows:
            stream = self._pieces(c, a_bytes) / c.mc

        # Constants come from memory: waiting for a panel is in part hidden by the work on it.
        cold = con.depth * bn * second / machine.memory_bytes_per_cycle(target)
        cold = cold / np.where(c.order == 0, c.mc, 1)
        stream = stream + self._brought_near(c, widened)
        exposed = cold * self._exposed(c) if self.far else 0.0

        task_s = (per_chunk * tile_cycles + stream + exposed) / target.frequency_hz
        seconds, rounds = machine.parallel_seconds(tasks, task_s, c.par, threads)
        seconds = seconds + self._preparation(c, widened)
        foreign = self._foreign(c) * a_bytes * con.groups
        seconds = seconds + foreign / machine.foreign_bytes_per_s(target)
        seconds = seconds + waiting_seconds(self.task, con, c, a_bytes, self.scattered)
        traffic = con.groups * (blocks * panel + np.where(c.order == 0, blocks, 1) * a_bytes)
        weights = con.groups * con.n * con.depth * second
        # A core alone gets its share of what memory gives.
        cores = np.where(c.par == 1, target.cores, 1.0)
        rate = machine.memory_bytes_per_cycle(target) * target.frequency_hz
        floor = weights / rate / cores * float(self.far)
        launch = np.where(c.par == 1, machine.LAUNCH_S, 0.0)
        columns = np.ceil(con.n / c.vl) * c.vl
        return Symbols(
            registers,
            fmas * con.depth,
            held,
            tasks,
            traffic,
            rounds,
            np.where(c.pack > 0, bn, c.vl) * second,
            2.0 * con.groups * columns * tiles * c.tm * con.depth,
            launch + machine.from_memory(seconds - launch, floor),
        )

    @cached_property
    def _by_rows(self) -> TileTables:
        return tile_tables(self.con, self.task.spec.nodes[self.con.a].shape[2:])

    def _brought_near(self, c: ContractionDecisions[Array], widened: Mask) -> Array:
        """Cycles in which a task makes a panel of its own, as float32 or as columns beside."""
        con = self.con
        if self.constant:
            return np.where(widened, con.depth * c.nv * self.widen_cycles, 0.0)
        each = packed_cycles(self.task.spec, con, self.lanes)
        return np.where(c.pack == PACKED_NEAR, con.depth * c.nv * c.vl * each, 0.0)

    def _exposed(self, c: ContractionDecisions[Array]) -> Array:
        """Share of the time of a panel's way from memory that the work on it does not hide."""
        exposed: Array = np.where(c.ahead == 1, 0.1, 0.6)
        if self.task.target.reads_ahead and self.stored == self.itemsize:
            # Floats that pass once: see ``in_place``, whose measurements these are, too.
            once = self._by_rows.tiles[c.tm.astype(np.int64)] == 1
            floats = np.where(c.ahead == 1, 0.2, 0.1) + _WIDE_PANEL * np.maximum(0, c.nv - 2)
            exposed = np.where(once, floats, exposed)
        return exposed

    def _last(self, c: ContractionDecisions[Array]) -> Array:
        """Vectors of the last panel."""
        vectors = np.ceil(self.con.n / c.vl)
        last: Array = vectors - (np.ceil(vectors / c.nv) - 1) * c.nv
        return last

    def _tile_cycles(self, c: ContractionDecisions[Array], vectors: Array) -> Array:
        """Cycles of one tile of so many vectors, operands in the first cache."""
        con, tm = self.con, c.tm
        height = tm.astype(np.int64)
        crossing = self._by_rows.crossing[height]
        cut = np.where(con.n % c.vl != 0, 6.0 * c.vl * tm, 0.0)
        cut = np.where(vectors == self._last(c), cut, 0.0)
        work = tm * vectors * (c.vl / self.lanes)  # in whole vectors
        steps = con.depth * self._by_rows.inside[height]
        cycles = (
            steps * self._step_cycles(c, vectors) * (1 + crossing) * self._crowding(tm, vectors)
        )
        carried = (c.kb - 1) * (work * 4 + 60) + partial_sums(con, c.kb) * work * 3
        result: Array = cycles + work * (2 + self._epilogue()) + 20 + cut + carried
        return result

    def _crowding(self, tm: Array, vectors: Array) -> Array:
        """How much longer a tile takes whose sums leave too few registers for a line of a kernel.

        LLVM unrolls a short one, keeps what neighbouring rows share of the input, and spills it.
        Measured on first layers of one to four channels (docs/experiments.md).
        """
        con, conv, sums = self.con, self.con.conv, tm * vectors
        if conv is None or con.form != "conv" or con.k[-1] * conv.kernel[-1] > _SHORT_LINE:
            return np.ones(np.shape(sums))
        if (conv.kernel[-1] - 1) * conv.dilation[-1] < conv.stride[-1]:  # nothing is shared
            return np.ones(np.shape(sums))
        free = self.task.target.vector_registers - _TAKEN_BY_LINE
        result: Array = 1 + _SPILLING * np.maximum(sums + vectors - free, 0)
        return result

    def _busiest(self, c: ContractionDecisions[Array], whole: Array, last: Array) -> Array:
        """Cycles of a tile in the mean over the panels of the thread with most to do.

        Tasks are dealt in order; the last panel, which may be narrower, comes last.
        """
        blocks = np.ceil(self.con.n / (c.nv * c.vl))
        mean = ((blocks - 1) * whole + last) / blocks
        threads = np.where(c.par == 1, self.task.threads, 1)
        rounds = np.ceil(blocks * c.mc / threads)
        full = np.minimum(rounds, (blocks - 1) * c.mc)
        first = (full * whole + (rounds - full) * last) / rounds
        result: Array = np.where((c.order == 1) | (self.con.groups > 1), mean, first)
        return result

    def _foreign(self, c: ContractionDecisions[Array]) -> Array:
        """Share of the first operand that a thread reads and another one has written.

        Kernels that divide rows divide them alike: what a core reads lies in its own cache.
        """
        threads = self.task.threads
        alike = (c.order == 1) & (c.mc % threads == 0)
        alike = alike | (c.par == 0) | (self.con.groups >= threads and not self.con.shares_rows)
        share: Array = np.where(alike, 0.0, 1 - 1 / threads)
        return share

    def _pieces(self, c: ContractionDecisions[Array], a_bytes: float) -> Array:
        """Cycles in which a group gets its piece of every line of the cache that it shares.

        ``a_bytes``: of the group's part of the input. Before the next group comes to the rest of a
        line the whole input has passed by, or a chunk of it.
        """
        con, size = self.con, self.itemsize
        piece = con.k[-1] * size
        whole = a_bytes * con.groups
        between = np.where(c.order == 1, whole / c.mc, whole)
        lines = a_bytes / piece * max(piece, machine.CACHE_LINE)
        cycles: Array = lines / machine.bytes_per_cycle(between, self.task.target)
        return cycles

    def _step_cycles(self, c: ContractionDecisions[Array], vectors: Array) -> Array:
        """Cycles of one position of the reduction."""
        con, target = self.con, self.task.target
        fmas, bn = c.tm * vectors, vectors * c.vl
        row_loads = fmas if con.form == "depthwise" else c.tm
        load_cycles = (row_loads + vectors) / machine.LOADS_PER_CYCLE
        direct = (c.pack == 0) & ~np.bool_(columns_adjacent(self.task.spec, self.con))
        load_cycles = load_cycles + np.where(direct, bn * 1.5, 0.0)  # a gather for every vector
        issued = fmas + row_loads + vectors + (1 + c.ahead) / c.ku
        issued = issued + np.where(
            is_widened(self.task.spec, con, self.constant, c), 0.0, self._conversions(c, vectors)
        )
        pipes = target.fma_per_cycle * (self.lanes / c.vl)
        fma_cycles = np.maximum(fmas / pipes, machine.FMA_LATENCY)
        fma_cycles = np.maximum(fma_cycles, issued / machine.ISSUED_PER_CYCLE)
        overhead = (0.5 + 0.5 * c.ahead) / c.ku
        apart = self._second_stride
        far = machine.stride_cycles(apart, con.depth, target) if con.depth > 1 else 0.0
        in_place = (c.pack == 0) & ~direct & np.bool_(not self.constant)
        busy = np.maximum(fma_cycles, load_cycles)
        step: Array = busy + overhead + np.where(in_place, far, 0.0) + self._far_rows(c)
        return step

    @cached_property
    def _second_stride(self) -> int:
        """Bytes between positions of the reduction in the second operand, as it lies."""
        spec, con = self.task.spec, self.con
        strides = matrix_strides(spec, con.b) if con.form == "matmul" else None
        return (strides[0] if strides else con.n) * ITEMSIZE[spec.nodes[con.b].dtype]

    def _far_rows(self, c: ContractionDecisions[Array]) -> Array:
        """Cycles of a step whose numbers of the first operand lie far from the last ones."""
        spec, con = self.task.spec, self.con
        stride = reduction_stride(spec, con) if con.depth > 1 else 0
        cycles = machine.stride_cycles(stride, con.depth, self.task.target)
        if stride < machine.PAGE:
            turned = con.depth >= _LONG and not stride and rows_adjacent(spec, con)
            cycles = TURNED_CYCLES if turned else min(cycles, TURNED_CYCLES)
        return np.full(np.shape(c.tm), cycles, dtype=np.float64)

    def _conversions(self, c: ContractionDecisions[Array], vectors: Array) -> Array:
        """Instructions that make floats of narrow operands in one position of the reduction."""
        nodes, con = self.task.spec.nodes, self.con
        if con.acc_dtype != "float32":
            return 0.0 * vectors
        second = vectors if nodes[con.b].dtype in ("bfloat16", "float16", "int8") else 0.0 * vectors
        return second + (c.tm if nodes[con.a].dtype in ("bfloat16", "float16") else 0.0)

    def flow(self, decisions: Decisions) -> Sequence[FlowStep]:
        return contraction_flow(self, decisions)

    def default(self) -> Decisions:
        return self.best_predicted(6_000)

    def _epilogue(self) -> float:
        after = set(range(self.con.anchor + 1, len(self.task.spec.nodes)))
        return machine.pointwise_cycles(self.task.spec, after)

    def _preparation(self, c: ContractionDecisions[Array], widened: Mask) -> Array:
        """Seconds for copies made before the loop: first operand, packed second one."""
        con, target, spec = self.con, self.task.target, self.task.spec
        cores = np.where(c.par == 1, self.task.threads, 1)
        elements = float(np.prod(copied_shape(spec, con)))
        copied = copies_first(spec, con, widened)
        copy = elements * self.itemsize / 16.0
        if con.shares_rows:  # too few products for each element to make up for its way
            size = np.array(elements * self.itemsize)
            copy = copy + float(size / machine.bytes_per_cycle(size, target))
        cycles = np.where(copied, copy, 0.0)
        if not self.constant:
            each = packed_cycles(spec, con, self.lanes)
            cycles = cycles + np.where(c.pack == 1, con.groups * con.n * con.depth * each, 0.0)
        seconds: Array = cycles / cores / target.frequency_hz
        return seconds + np.where((cycles > 0) & (c.par == 1), machine.LAUNCH_S, 0.0)
