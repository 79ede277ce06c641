"""The space of attention kernels: tiles of queries whose scores stay in a core's cache.

Decisions: see ``form``.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.attention.form import AttentionDecisions
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.attention_masks import constant_masks, gathered_masks, shared_masks
from torch_pruner.graph.contraction import accumulator
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.precision import takes_bfloat16

if TYPE_CHECKING:
    from torch_pruner.task import Task

# For one vector of scores: its power and what is done with it, and reading a mask lane by lane.
_POWER_CYCLES, _GATHER_CYCLES = 9.0, 20.0
_TILE_CYCLES = 10.0  # until a register tile has begun and ended
_COPY_CYCLES = 4.0  # of one vector, most of which is waiting: rows of a head lie apart
_FORWARDED_CYCLES = 8.0  # from a store to a load of the same bytes


class AttentionSketch(Sketch[AttentionDecisions[Array]]):
    """See the module."""

    name = "attention"
    decisions = AttentionDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        att = attention_of(task.spec)
        if att is None:
            raise ValueError("the kernel graph is not attention")
        self.att = att
        self.itemsize = ITEMSIZE[accumulator(task.spec.nodes[att.out].dtype)]
        self.lanes = max(1, task.target.vector_bytes // self.itemsize)
        self.slots = -(-att.width // self.lanes) if att.width >= self.lanes else att.width
        self.narrow = att.width < 2 * self.lanes  # so that queries may lie in lanes throughout
        constant, shared = constant_masks(task.spec, att), shared_masks(task.spec, att)
        apart = set(gathered_masks(task.spec, att)) - set(constant)
        self.shared = len(apart & set(shared))  # masks that heads share
        self.apart = len(apart) - self.shared
        self.halves = task.spec.nodes[att.out].dtype in ("bfloat16", "float16")

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        att, vectors = self.att, -(-self.att.queries // self.lanes)
        queries = [v for v in (1, 2, 3, 4) if v <= vectors]
        keys = [t for t in (4, 6, 8, 12, 16) if t <= att.keys] or [1]
        rows = [2, 4, 6, 8, 12, 16]
        columns = [c for c in (1, 2, 3, 4) if c <= self.slots]
        if self.narrow:
            columns = sorted({*columns, *(c for c in (2, 3, 4, 5, 6, 8) if c <= att.width)})
        blocks = [b for b in (32, 64, 128, 256) if b < att.keys] + [att.keys]
        heads = att.batch[-1] if att.batch else 1
        order = [0, 1] if heads > 1 else [0]
        tasks = [1, self.task.threads] if self.task.threads > 1 else [1]
        turned = [0, 1] if self.narrow else [0]
        options = (
            [self.lanes], queries, keys, rows, columns, blocks, order, [0, 1, 2], turned, tasks,
            [0, 1] if self._paired() else [0],
        )  # fmt: skip
        return tuple(np.array(o, dtype=np.int64) for o in options)

    def _paired(self) -> bool:
        """Whether products of two bfloat16 at once are worth a try."""
        spec, att = self.task.spec, self.att
        halves = all(takes_bfloat16(spec, i) for i in (att.scores, att.out))
        fits = halves and att.depth % 2 == 0 and att.width >= self.lanes
        return fits and machine.multiplies_pairs(self.task.target)

    def valid(self, decisions: Decisions) -> Mask:
        c, registers = self.columns(decisions), self.task.target.vector_registers
        scores = c.tm * c.nv + c.nv + 1 <= registers
        products = (c.tr * c.nc + c.nc + 1 <= registers) & (c.nc <= self.slots)
        products &= c.tr <= c.nv * self.lanes
        columns = (c.nv * c.nc + 2 * c.nv + 1 <= registers) | (c.nv * c.nc == 1)
        # What does not matter to a turned product has one option.
        columns &= (c.tr == self.domains[3][0]) & (c.kb == self.att.keys)
        units = self.att.groups * np.ceil(self.att.queries / (c.nv * self.lanes))
        second = np.where(c.turned == 1, columns, products)
        # Pairs are made when keys and values are copied, and of an even number of keys.
        paired = (c.pack == 2) & (c.turned == 0) & ((c.kb % 2 == 0) | (c.kb == self.att.keys))
        result: Mask = scores & second & ((c.tasks == 1) | (units > 1)) & ((c.pairs == 0) | paired)
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, att, target, size = self.columns(decisions), self.att, self.task.target, self.itemsize
        lanes = c.nv * self.lanes
        whole, rest = np.divmod(att.queries, lanes)
        tiles = whole + (rest > 0)
        units = att.groups * tiles
        # The last tile has as many vectors as its queries need, and more keys to a tile of scores.
        vectors = np.maximum(np.ceil(rest / self.lanes), 1)
        seen = np.full(len(decisions), float(att.keys))
        if att.causal:
            seen = np.minimum(att.keys, lanes * (whole + 1) / 2)
        end = np.full(len(decisions), float(min(att.keys, att.queries if att.causal else att.keys)))
        copies = self._copies(c)
        cycles = whole * self._tile(c, c.nv, c.tm, lanes, seen)
        last = self._tile(c, vectors, np.floor(c.tm * c.nv / vectors), rest, end)
        cycles = (cycles + np.where(rest > 0, last, 0.0)) / tiles
        cycles = cycles + att.keys * copies / np.where(c.order == 0, tiles, 1)

        per_task = np.ceil(units / c.tasks)
        parallel = c.tasks > 1
        seconds = per_task * cycles / target.frequency_hz
        seconds = seconds + np.where(parallel, machine.LAUNCH_S + machine.TASK_S, 0.0)
        keys = (whole * seen + (rest > 0) * end) / tiles
        pair = att.keys * (att.depth + att.width) * size
        traffic = units * pair + 2.0 * att.groups * att.queries * att.width * size
        ops = units * 2.0 * lanes * keys * (att.depth + att.width)
        tile = np.where(c.turned == 1, c.nc * c.nv, c.tr * c.nc)
        ones = np.ones(len(decisions))
        return Symbols(
            np.maximum(c.tm * c.nv, tile) + 5,
            tile * keys,
            self._held(c, lanes) + self._block(c, lanes),
            c.tasks,
            traffic,
            per_task,
            self.lanes * size * ones,
            ops * ones,
            seconds * ones,
        )

    def _tile(
        self, c: AttentionDecisions[Array], nv: Array, tm: Array, rows: Array, keys: Array
    ) -> Array:
        """Cycles of a tile of ``rows`` queries in ``nv`` vectors, which sees so many ``keys``."""
        att, target, size = self.att, self.task.target, self.itemsize
        lanes, whole_slots = nv * self.lanes, self.slots
        convert = np.where(c.pack < 2, tm * 1.0, 0.0) if self.halves else 0.0
        step = self._step(tm, nv) + convert
        step = np.where(c.pairs == 1, self._pair_step(tm, nv) / 2, step)
        score = np.ceil(keys / tm) * (att.depth * step + _TILE_CYCLES + 2 * tm * nv)
        shared = np.where(c.order == 1, max(1, att.batch[-1] if att.batch else 1), 1)
        masks = self.apart * _GATHER_CYCLES + self.shared * (
            np.where(c.order == 1, _GATHER_CYCLES / 4, _GATHER_CYCLES) / shared
        )
        words = np.where(c.pairs == 1, machine.WORD_CYCLES, 0.0)
        softmax = keys * nv * (_POWER_CYCLES + self._between() + masks + words)
        blocks = np.ceil(keys / c.kb)
        groups, left = np.divmod(rows, c.tr)
        passes, columns = np.divmod(whole_slots, c.nc)
        product = np.zeros(len(c.nv))
        for many, some in ((groups, c.tr), (np.where(left > 0, 1, 0), left)):
            for times, wide in ((passes, c.nc), (np.where(columns > 0, 1, 0), columns)):
                ends = blocks * (_TILE_CYCLES + 2 * some * wide)
                step = self._step(some, wide)
                step = np.where(c.pairs == 1, self._pair_step(some, wide) / 2, step)
                product = product + many * times * (keys * step + ends)
        # The first columns are multiplied while powers are made, which hides what they wait for.
        passes = np.ceil(att.width / c.nc)
        later = (passes - 1) * (self._step(c.nc, nv) + nv / machine.LOADS_PER_CYCLE)
        turned = keys * (c.nc * nv / target.fma_per_cycle + c.nc / machine.LOADS_PER_CYCLE + later)
        product = np.where(c.turned == 1, turned, product)
        scattered = np.where((c.pack == 0) & (att.width * size < 1024), 1.15, 1.0)
        product = product * scattered
        product = product * np.where(self._block(c, lanes) > 0.8 * target.l1_bytes, 1.25, 1.0)
        score = score * np.where(self._held(c, lanes) > 0.8 * target.l1_bytes, 1.25, 1.0)
        ends = 0.5 * lanes * att.depth + 2.0 * rows * self.slots
        resident = att.keys * lanes * size
        spilled = np.where(resident > 0.7 * target.l2_bytes, 3 * keys * lanes * size / 10.0, 0.0)
        pair = att.keys * (att.depth + att.width) * size
        far = (c.order == 1) | (pair + resident > 0.8 * target.l2_bytes)
        stream = np.where(far, 0.3 * pair / 10.0, 0.0)
        result: Array = score + softmax + product + ends + spilled + stream
        return result

    def _step(self, rows: Array, vectors: Array) -> Array:
        """Cycles of one step of a register tile."""
        target = self.task.target
        # As many sums as cover the latency leave no slack: whatever holds one up holds up all.
        fma = np.maximum(rows * vectors / target.fma_per_cycle, machine.FMA_LATENCY + 0.5)
        # Products of one vector each have a number of their own: it takes a register, unless they
        # read it from memory, and sums that lose theirs go through memory at every step.
        lost = (
            (vectors == 1)
            & (2 * rows + 1 > target.vector_registers)
            & (self.lanes * self.itemsize < 64)
        )
        fma = np.maximum(fma, np.where(lost, machine.FMA_LATENCY + _FORWARDED_CYCLES, 0.0))
        cycles: Array = np.maximum(fma, (rows + vectors) / machine.LOADS_PER_CYCLE) + 0.5
        return cycles

    def _pair_step(self, rows: Array, vectors: Array) -> Array:
        """The same of products of pairs."""
        dots = machine.dot_cycles(rows * vectors, self.task.target)
        dots = np.maximum(dots, machine.FMA_LATENCY + 0.5)
        cycles: Array = np.maximum(dots, (rows + vectors) / machine.LOADS_PER_CYCLE) + 0.5
        return cycles

    def _copies(self, c: AttentionDecisions[Array]) -> Array:
        """Cycles of copying one key, or its value, or both."""
        vectors = np.select([c.pack == 0, c.pack == 1], [0, self.slots], 2 * self.slots)
        # Of what is packed into words twice as many numbers are read, one lane from each two.
        cycles: Array = np.where(c.pairs == 1, 2.0, 1.0) * _COPY_CYCLES * vectors
        return cycles

    def _held(self, c: AttentionDecisions[Array], lanes: Array) -> Array:
        """Bytes that tiles of scores read again and again."""
        depth = np.where(c.pairs == 1, self.att.depth / 2, self.att.depth)
        held: Array = (depth + c.tm) * lanes * self.itemsize
        return held

    def _block(self, c: AttentionDecisions[Array], lanes: Array) -> Array:
        """Bytes that the tiles of a block of the second product read again and again."""
        columns = np.minimum(c.nc * self.lanes, self.att.width)
        each = np.where(c.pairs == 1, self.itemsize / 2, self.itemsize)
        found: Array = np.minimum(c.kb, self.att.keys) * (columns + lanes) * each
        return found

    def default(self) -> Decisions:
        return self.best_predicted(20_000)

    def _between(self) -> float:
        """Cycles of one vector from the product to the powers, but for the exponential."""
        spec, att = self.task.spec, self.att
        nodes = {i for i in att.inner if spec.nodes[i].shape == att.shape and i < att.powers}
        return machine.pointwise_cycles(spec, nodes)
