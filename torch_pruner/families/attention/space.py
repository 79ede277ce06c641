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
from torch_pruner.graph.attention_masks import shared_masks
from torch_pruner.graph.contraction import accumulator
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.task import Task

_EXP_CYCLES, _GATHER_CYCLES = 14.0, 20.0  # for one vector of scores


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
        self.masked = bool(shared_masks(task.spec, att))

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
            [self.lanes], queries, keys, rows, columns, blocks, order, [0, 1, 2], turned, tasks
        )  # fmt: skip
        return tuple(np.array(o, dtype=np.int64) for o in options)

    def valid(self, decisions: Decisions) -> Mask:
        c, registers = self.columns(decisions), self.task.target.vector_registers
        scores = c.tm * c.nv + c.nv + 1 <= registers
        products = (c.tr * c.nc + c.nc + 1 <= registers) & (c.nc <= self.slots)
        products &= (c.nv * self.lanes) % c.tr == 0
        columns = (c.nv * c.nc + 2 * c.nv + 1 <= registers) | (c.nv * c.nc == 1)
        # What does not matter to a turned product has one option.
        columns &= (c.tr == self.domains[3][0]) & (c.kb == self.att.keys)
        units = self.att.groups * np.ceil(self.att.queries / (c.nv * self.lanes))
        second = np.where(c.turned == 1, columns, products)
        result: Mask = scores & second & ((c.tasks == 1) | (units > 1))
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, att, target, size = self.columns(decisions), self.att, self.task.target, self.itemsize
        lanes = c.nv * self.lanes
        tiles = np.ceil(att.queries / lanes)
        units = att.groups * tiles
        keys = np.minimum(att.keys, (att.queries + lanes) / 2) if att.causal else float(att.keys)
        per_task = np.ceil(units / c.tasks)

        def step(rows: np.ndarray, vectors: np.ndarray) -> np.ndarray:
            """Cycles of one step of a register tile."""
            fma = np.maximum(rows * vectors / target.fma_per_cycle, machine.FMA_LATENCY)
            cycles: np.ndarray = np.maximum(fma, (rows + vectors) / machine.LOADS_PER_CYCLE) + 0.5
            return cycles

        halves = self.task.spec.nodes[att.out].dtype in ("bfloat16", "float16")
        convert = np.where(c.pack < 2, c.tm * 1.0, 0.0) if halves else 0.0
        score = np.ceil(keys / c.tm) * (att.depth * (step(c.tm, c.nv) + convert) + 10)
        vectors = keys * c.nv
        masks = _GATHER_CYCLES if self.masked else 0.0
        shared = np.where(c.order == 1, max(1, att.batch[-1] if att.batch else 1), 1)
        softmax = vectors * (_EXP_CYCLES + self._between() + 2 + masks / shared)
        blocks = np.ceil(keys / c.kb)
        rounds = np.ceil(self.slots / c.nc) * np.ceil(lanes / c.tr)
        tile = c.tr * c.nc
        product = rounds * (keys * step(c.tr, c.nc) + blocks * (2 * tile + 10))
        # The first columns are multiplied while powers are made, which hides what they wait for.
        passes = np.ceil(att.width / c.nc)
        later = (passes - 1) * (step(c.nc, c.nv) + c.nv / machine.LOADS_PER_CYCLE)
        turned = keys * (
            c.nc * c.nv / target.fma_per_cycle + c.nc / machine.LOADS_PER_CYCLE + later
        )
        product = np.where(c.turned == 1, turned, product)
        tile = np.where(c.turned == 1, c.nc * c.nv, tile)
        scattered = np.where((c.pack == 0) & (att.width * size < 1024), 1.15, 1.0)
        vectors_of = np.select([c.pack == 0, c.pack == 1], [0, self.slots], 2 * self.slots)
        copies = keys * vectors_of * 1.5 / np.where(c.order == 0, tiles, 1)
        pack = copies + 1.2 * lanes * att.depth + 2.0 * lanes * self.slots

        held = (att.depth + c.tm) * lanes * size  # S3
        block = c.kb * (np.minimum(c.nc * self.lanes, att.width) + lanes) * size
        slow = np.where(block > 0.8 * target.l1_bytes, 1.25, 1.0)
        score = score * np.where(held > 0.8 * target.l1_bytes, 1.25, 1.0)
        resident = att.keys * lanes * size
        spilled = np.where(resident > 0.7 * target.l2_bytes, 3 * keys * lanes * size / 10.0, 0.0)
        pair = att.keys * (att.depth + att.width) * size
        far = (c.order == 1) | (pair + resident > 0.8 * target.l2_bytes)
        stream = np.where(far, 0.3 * pair / 10.0, 0.0)
        cycles = score + softmax + product * slow * scattered + pack + spilled + stream
        parallel = c.tasks > 1
        seconds = per_task * cycles / target.frequency_hz
        seconds = seconds + np.where(parallel, machine.LAUNCH_S + machine.TASK_S, 0.0)
        traffic = units * pair + 2.0 * att.groups * att.queries * att.width * size
        ops = units * 2.0 * lanes * keys * (att.depth + att.width)
        ones = np.ones(len(decisions))
        return Symbols(
            np.maximum(c.tm * c.nv, tile) + 5,
            tile * keys,
            held + block,
            c.tasks,
            traffic,
            per_task,
            self.lanes * size * ones,
            ops * ones,
            seconds * ones,
        )

    def default(self) -> Decisions:
        return self.best_predicted(20_000)

    def _between(self) -> float:
        """Cycles of one vector from the product to the powers, but for the exponential."""
        spec, att = self.task.spec, self.att
        nodes = {i for i in att.inner if spec.nodes[i].shape == att.shape}
        return machine.pointwise_cycles(spec, nodes - {att.powers})
