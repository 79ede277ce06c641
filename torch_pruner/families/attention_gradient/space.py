"""The space of attention's gradient: tiles of queries by blocks of keys, weights made again.

Decisions: see ``form``.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.attention_gradient.form import AttentionGradientDecisions
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.graph.attention_gradient import gradient_of
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.precision import takes_bfloat16

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.task import Task

_TILE_CYCLES = 10.0  # until a register tile has begun and ended
_COPY_CYCLES = 4.0  # of one vector, most of which is waiting: rows of a head lie apart
_GATHER_CYCLES = 20.0  # of one vector of a mask in memory, whose lanes are queries
_WORDS = 3  # times that a vector of weights or of the gradient of scores is rounded or put in words
_SIZE = 4  # bytes of a number
_MOST_KEYS = 1024


class AttentionGradientSketch(Sketch[AttentionGradientDecisions[Array]]):
    """See the module."""

    name = "attention_gradient"
    decisions = AttentionGradientDecisions

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        found = gradient_of(task.spec)
        if found is None:
            raise ValueError("the kernel graph is not the gradient of attention")
        nodes = task.spec.nodes
        self.found = found
        self.lanes = max(1, task.target.vector_bytes // _SIZE)
        self.depth = nodes[nodes[found.scores].inputs[0]].shape[-1]
        self.width = nodes[nodes[found.along].inputs[0]].shape[-1]
        columns = [nodes[i].shape[-1] for i in found.outputs]
        self.slots = [-(-n // self.lanes) if n >= self.lanes else n for n in columns]

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        found, vectors = self.found, -(-self.found.queries // self.lanes)
        # More keys in one go would be sums of too many products.
        whole = [found.keys] if found.keys <= _MOST_KEYS else []
        options = (
            [self.lanes],
            [v for v in (1, 2, 3, 4) if v <= vectors],
            [p for p in (1, 2, 3, 4) if p <= vectors],
            [2, 3, 4, 6, 8, 12],
            [2, 4, 6, 8, 12],
            [c for c in (1, 2, 3, 4) if c <= max(self.slots)],
            [b for b in (48, 96, 192, 384) if b < found.keys] + whole,
            [1, self.task.threads] if self.task.threads > 1 and found.groups > 1 else [1],
            [0, 1] if self._paired() else [0],
        )
        return tuple(np.array(o, dtype=np.int64) for o in options)

    def _paired(self) -> bool:
        """Whether products of two bfloat16 at once are worth a try."""
        nodes, found = self.task.spec.nodes, self.found
        products = (found.scores, found.along, *found.outputs)
        halves = all(takes_bfloat16(self.task.spec, i) for i in products)
        fits = halves and self.depth % 2 == 0 and self.width % 2 == 0
        fits = fits and all(nodes[i].shape[-1] >= self.lanes for i in found.outputs)
        return fits and machine.multiplies_pairs(self.task.target)

    def valid(self, decisions: Decisions) -> Mask:
        c, registers = self.columns(decisions), self.task.target.vector_registers
        result: Mask = (
            (c.tm * c.nv + c.nv + 1 <= registers)
            & (c.tm * c.nc + c.nc + 1 <= registers)
            & (c.tr * c.nc + c.nc + 1 <= registers)
            & (c.nv * (c.qp - 1) < np.ceil(self.found.queries / c.vl))
            & (c.tr <= c.nv * c.vl)
            & ((c.kb == self.found.keys) | (c.kb % c.tm == 0))
            & ((c.pairs == 0) | (c.kb == self.found.keys) | (c.kb % 2 == 0))
        )
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, found, target = self.columns(decisions), self.found, self.task.target
        lanes = c.qp * c.nv * c.vl
        whole, rest = np.divmod(found.queries, lanes)
        blocks = np.ceil(found.keys / c.kb)
        # The last block may have fewer keys; causal tiles see half of what lies before them.
        keys = found.keys / blocks
        if found.causal:
            keys = keys * np.minimum(1.0, (found.queries + lanes) / (2.0 * found.keys))
        tiles = whole * self._tile(c, c.qp * c.nv, lanes, keys)
        last = self._tile(c, np.maximum(np.ceil(rest / c.vl), 1), rest, keys)
        tiles = tiles + np.where(rest > 0, last, 0.0)
        # Of what is packed into words twice as many numbers are read, one lane from each two.
        copied = np.where(c.pairs == 1, 2.0, 1.0) * _COPY_CYCLES
        copies = copied * (self.depth + self.width) / c.vl + 6.0 * sum(self.slots[1:])
        head = blocks * tiles + found.keys * copies + 4.0 * found.queries * self.slots[0]

        per_task = np.ceil(found.groups / c.tasks)
        launch = np.where(c.tasks > 1, machine.LAUNCH_S + machine.TASK_S, 0.0)
        seconds = per_task * head / target.frequency_hz + launch
        columns = 2.0 * (self.depth + self.width) + self.depth
        ops = found.groups * 2.0 * (whole + (rest > 0)) * lanes * keys * blocks * columns
        traffic = (
            found.groups
            * _SIZE
            * (
                2.0 * found.keys * (self.depth + self.width)
                + blocks * found.queries * 2.0 * (self.depth + self.width)
            )
        )
        ones = np.ones(len(decisions))
        return Symbols(
            c.tm * np.maximum(c.nv, c.nc) + np.maximum(c.nv, c.nc) + 1,
            c.tm * c.nv * self.depth,
            self._held(c, lanes),
            c.tasks,
            traffic * ones,
            per_task,
            self.lanes * _SIZE * ones,
            ops,
            seconds,
        )

    def _tile(
        self, c: AttentionGradientDecisions[Array], vectors: Array, rows: Array, keys: Array
    ) -> Array:
        """Cycles of a tile of ``rows`` queries in ``vectors``, which sees ``keys`` of a block."""
        target, depth, width = self.task.target, self.depth, self.width
        into_queries, into_keys, into_values = self.slots
        key_tiles, lanes = keys / c.tm, vectors * c.vl
        step = partial(self._step, c)
        scores = self._passes(
            vectors, c.nv, lambda n: (depth + width) * step(c.tm, n) + 2 * _TILE_CYCLES
        )
        words = np.where(c.pairs == 1, _WORDS * machine.WORD_CYCLES, 0.0)
        full = keys * vectors * (self._pointwise + 4.0 + words)
        down = 0.0 * keys
        for slots in (into_keys, into_values):
            down = down + self._passes(
                slots,
                c.nc,
                lambda n: rows * step(c.tm, n) + _TILE_CYCLES + 1.5 * c.tm * n,
            )
        across = np.zeros(len(c.nv))
        groups, left = np.divmod(rows, c.tr)
        for many, some in ((groups, c.tr), (np.where(left > 0, 1, 0), left)):
            across = across + many * self._passes(
                into_queries, c.nc, partial(self._across, c, some, keys)
            )
        held = self._held(c, lanes)
        near = np.where(held > target.l1_bytes, 1.1, 1.0)
        near = near * np.where(held > 0.8 * target.l2_bytes, 1.3, 1.0)
        ends = lanes * (depth + width) * 0.75 + rows * (into_keys + into_values) * _COPY_CYCLES
        result: Array = near * (key_tiles * (scores + down) + across) + full + ends
        return result

    def _across(
        self, c: AttentionGradientDecisions[Array], rows: Array, keys: Array, vectors: Array
    ) -> Array:
        """Cycles of a register tile of the gradient of queries."""
        return keys * self._step(c, rows, vectors) + _TILE_CYCLES + 1.5 * rows * vectors

    def _passes(self, vectors: Array | float, size: Array, cost: Callable[[Array], Array]) -> Array:
        """What passes of ``size`` vectors cost, and one of those left over."""
        times, left = np.divmod(vectors, size)
        result: Array = times * cost(size) + np.where(left > 0, cost(np.maximum(left, 1)), 0.0)
        return result

    def _step(self, c: AttentionGradientDecisions[Array], rows: Array, vectors: Array) -> Array:
        """Cycles of a register tile for one number of its sums."""
        target = self.task.target
        dots = machine.dot_cycles(rows * vectors, target)
        fma = np.where(c.pairs == 1, dots, rows * vectors / target.fma_per_cycle)
        fma = np.maximum(fma, machine.FMA_LATENCY + 0.5)
        issued = (rows * vectors + rows + vectors) / machine.ISSUED_PER_CYCLE
        cycles: Array = np.maximum(
            np.maximum(fma, issued), (rows + vectors) / machine.LOADS_PER_CYCLE
        )
        return (cycles + 0.5) * np.where(c.pairs == 1, 0.5, 1.0)

    def _held(self, c: AttentionGradientDecisions[Array], lanes: Array) -> Array:
        """Bytes that a tile of queries passes over for a block of keys."""
        columns = self.depth + self.width
        # With pairs what waits for its products takes half, sums what they did.
        half = np.where(c.pairs == 1, 0.5, 1.0)
        held: Array = c.kb * ((1 + half) * columns + (0.5 + 1.5 * half) * lanes)
        return _SIZE * (held + 2 * half * lanes * columns)

    @cached_property
    def _pointwise(self) -> float:
        """Cycles of one vector of weights and of the gradient of scores, masks included."""
        spec, found = self.task.spec, self.found
        full = {i for i in found.inner if spec.nodes[i].shape == found.shape}
        masks = [
            j for i in full for j in spec.nodes[i].inputs
            if j not in found.inner and j not in found.spread
            and spec.nodes[j].op == "broadcast" and spec.nodes[j].shape == found.shape
            and self._reads(j)
        ]  # fmt: skip
        return machine.pointwise_cycles(spec, full) + _GATHER_CYCLES * len(masks)

    def _reads(self, node: int) -> bool:
        spec, stack = self.task.spec, [node]
        while stack:
            i = stack.pop()
            if spec.nodes[i].op == "input":
                return True
            stack.extend(
                j for j in spec.nodes[i].inputs if spec.nodes[i].kind is not OpKind.CONTRACT
            )
        return False

    def default(self) -> Decisions:
        return self.best_predicted(8_000)
