"""The space of convolutions by minimal filtering: blocks of tiles, register tiles, shares.

Decisions: see ``form``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.contraction.sizes import at_half_size
from torch_pruner.families.kinds import in_planes
from torch_pruner.families.space import Array, Decisions, Mask, Sketch, Symbols
from torch_pruner.families.winograd.form import WinogradDecisions, additions, winograd_of
from torch_pruner.families.winograd.matrices import MORE_RESULTS, RESULTS
from torch_pruner.graph.contraction import constant_operand
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.families.winograd.form import Winograd
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Task

TAP_CYCLES = 1.5  # of a weight that is read across memory, as packing one takes
_MOST_SCRATCH = 128 << 20  # bytes that all tasks have between steps
_HALF = 8  # elements of half a vector at least
_BORDER = 1.5  # a tile at the border asks for every input whether it exists


class WinogradSketch(Sketch[WinogradDecisions[Array]]):
    """See the module; the algorithm is in ``form``."""

    name = "winograd"
    decisions = WinogradDecisions
    results: ClassVar[int] = RESULTS
    """Of a tile, along each dimension of three taps."""
    waiting: ClassVar[tuple[float, float]] = 0.3, 0.6
    """Of the time that weights take from memory, what products do not hide where the next ones are
    fetched early, and where they are not."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        plan = winograd_of(task.spec, self.results)
        assert plan is not None
        self.plan = replace(plan, con=at_half_size(task.spec, plan.con))
        self.constant = constant_operand(task.spec, plan.con) is not None
        self.size = ITEMSIZE[plan.con.acc_dtype]
        self.lanes = lanes_of(plan, task.target.vector_bytes // self.size)
        # Of the largest size's positions: as other families count, half of a side that varies.
        self._share = self.plan.con.rows / plan.con.rows

    @cached_property
    def _core(self) -> TargetSpec:
        """A pipe that multiplies a whole vector in a cycle is two of half the width."""
        target = self.task.target
        halved = self.lanes * self.size < target.vector_bytes and target.fma_per_cycle == 1
        return replace(target, fma_per_cycle=2) if halved else target

    @staticmethod
    def fits(task: Task) -> bool:
        """Whether the algorithm applies and its vectors are whole."""
        return whole_vectors(task, RESULTS)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        plan, vectors = self.plan, self.plan.con.n // self.lanes
        rows = [t for t in range(1, 17) if t <= plan.tiles]
        columns = [v for v in (1, 2, 3, 4, 5, 6) if vectors % v == 0]
        blocks = [b for b in (1, 2, 3, 4, 5, 6, 7, 8, 10, 14) if b <= plan.tiles]
        chunks = [c for c in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if c <= plan.tiles]
        parallel = [0, 1] if self.task.threads > 1 else [0]
        dealt = plan.groups if plan.groups > 1 else vectors
        shares = [s for s in (1, 2, 4, 8, 16) if s == 1 or (parallel[-1] and dealt % s == 0)]
        unroll = [u for u in (1, 2, 4) if plan.con.k[-1] % u == 0]
        options = ([self.lanes], rows, columns, blocks, chunks, shares, unroll, [0, 1], parallel)
        return tuple(np.array(d, dtype=np.int64) for d in options)

    def valid(self, decisions: Decisions) -> Mask:
        c, plan = self.columns(decisions), self.plan
        registers = self.task.target.vector_registers
        fits = self._registers(c) <= registers
        fits &= c.tm * c.tb <= plan.tiles
        fits &= (plan.con.n // self.lanes) % (c.nv * self._column_shares(c)) == 0
        fits &= (c.mc == 1) | (c.mc <= self._blocks(c))
        tasks = self._chunks(c) * c.nc
        width = plan.channels + c.nv * self.lanes
        fits &= tasks * c.tm * c.tb * width * (plan.positions * self.size) <= _MOST_SCRATCH
        result: Mask = fits & np.where(c.par == 1, tasks >= 2, c.mc * c.nc == 1)
        return result

    def symbols(self, decisions: Decisions) -> Symbols:
        c, plan, target = self.columns(decisions), self.plan, self.task.target
        con, spec, threads = plan.con, self.task.spec, self.task.threads
        rows, bn = c.tm * c.tb, c.nv * self.lanes
        panels, groups = con.n / bn / self._column_shares(c), plan.groups
        groups_each = groups / np.where(groups > 1, c.nc, 1)
        chunks, blocks = self._chunks(c), self._blocks(c)

        fmas = c.tm * c.nv
        step = machine.tile_step_cycles(c.tm, c.nv, 1 + c.ahead, c.ku, self._core)
        tile = plan.channels * step + fmas * 2 + 20
        slice_bytes = plan.channels * bn * self.size  # weights of one position
        inputs = plan.positions * rows * plan.channels * self.size
        products = plan.positions * rows * bn * self.size
        multiply = plan.positions * c.tb * tile * plan.filled
        # Per position a slice of weights and one of inputs come near; the rest passes by again.
        near = rows * plan.channels * self.size + slice_bytes
        again = inputs / machine.bytes_per_cycle(inputs + products, target)
        weights = plan.positions * groups * con.n * plan.channels * self.size
        share = weights / c.nc
        held = share + inputs + products
        far = plan.positions * slice_bytes / machine.bytes_per_cycle(held, target)
        waiting = np.maximum(0.0, again + far - np.where(c.ahead == 1, 0.7, 0.4) * multiply)
        # A slice that the first cache does not hold passes by for every tile, in part unnoticed.
        passing = slice_bytes / machine.bytes_per_cycle(near, target) - 0.6 * tile
        spilled = np.where(near > 0.8 * target.l1_bytes, np.maximum(0.0, passing), 0.0)
        spilled = spilled * plan.positions * c.tb * plan.filled
        panel = multiply + waiting + spilled + rows * c.nv * self._result_cycles()
        # What is written for the next step to read, and leaves the second cache before.
        between = inputs + products
        left = np.where(between > 0.8 * target.l2_bytes, 1.0, 0.0)
        left = left / machine.bytes_per_cycle(between, target)
        panel = panel + left * products
        block = groups_each * (self._transform_cycles() * rows + left * inputs + panels * panel)

        cold = share / self._weights_per_cycle(weights)
        cold = cold * np.where(c.ahead == 1, *self.waiting)
        task_s = (np.ceil(blocks / chunks) * block + cold) / target.frequency_hz
        seconds, rounds = machine.parallel_seconds(chunks * c.nc, task_s, c.par, threads)
        a_bytes = spec.nodes[con.a].numel * self.size * self._share
        alike = (c.par == 0) | ((c.nc == 1) & (chunks % threads == 0))
        foreign = np.where(alike, 0.0, 1 - 1 / threads) * a_bytes
        seconds = seconds + foreign / machine.foreign_bytes_per_s(target)
        cores = np.where(c.par == 1, threads, 1)
        seconds = seconds + self._scattered / cores / target.frequency_hz
        seconds = seconds + self._preparation(c, weights)
        ones = np.ones(len(decisions))
        return Symbols(
            self._registers(c), fmas * plan.channels, near + products / plan.positions,
            chunks * c.nc, chunks * c.nc * share + self._column_shares(c) * a_bytes, rounds,
            bn * self.size,
            2.0 * blocks * rows * plan.positions * plan.filled * groups * plan.channels * con.n,
            np.maximum(seconds, weights / target.dram_bytes_per_s * ones),
        )  # fmt: skip

    def _weights_per_cycle(self, size: float) -> float:
        """Bytes of transformed weights, ``size`` in all, that a core gets in a cycle."""
        if self.constant:
            return machine.memory_bytes_per_cycle(self.task.target)
        return float(machine.bytes_per_cycle(np.array(size), self.task.target))

    @cached_property
    def _scattered(self) -> float:
        """Cycles that vectors of channels take more whose positions lie together: tiles overlap, so
        most elements are read several times, each alone."""
        if not in_planes(self.task.spec):
            return 0.0
        plan, con = self.plan, self.plan.con
        read = plan.groups * plan.channels * plan.tiles * plan.positions
        stored = machine.scattered_cycles(self.task.spec, con.anchor, self.task.target)
        return machine.SCATTERED_CYCLES * read + stored * plan.groups * con.rows * con.n

    def _preparation(self, c: WinogradDecisions[Array], size: float) -> Array:
        """Seconds in which weights that are not constant, ``size`` bytes then, are transformed."""
        if self.constant:
            return np.zeros(np.shape(c.tm))
        plan, target = self.plan, self.task.target
        taps = math.prod(plan.con.conv.kernel)  # type: ignore[union-attr]
        read = plan.groups * plan.channels * plan.con.n * taps
        cycles = read * TAP_CYCLES + size / self._weights_per_cycle(size)
        cores = np.where(c.par == 1, self.task.threads, 1)
        seconds: Array = cycles / cores / target.frequency_hz + machine.LAUNCH_S
        return seconds

    def default(self) -> Decisions:
        return self.best_predicted(20_000)

    def _registers(self, c: WinogradDecisions[Array]) -> Array:
        registers: Array = c.tm * c.nv + c.nv + 1
        return registers

    def _column_shares(self, c: WinogradDecisions[Array]) -> Array:
        """Shares of a group's columns; those of groups have all columns of theirs."""
        return c.nc if self.plan.groups == 1 else np.ones_like(c.nc)

    def _blocks(self, c: WinogradDecisions[Array]) -> Array:
        blocks: Array = np.ceil(self.plan.tiles / (c.tm * c.tb))
        return blocks

    def _chunks(self, c: WinogradDecisions[Array]) -> Array:
        """Parallel chunks of blocks, none of them empty (see ``Winograd.blocked``)."""
        blocks = self._blocks(c)
        each = np.ceil(blocks / np.minimum(c.mc, blocks))
        chunks: Array = np.ceil(blocks / each)
        return chunks

    def _transform_cycles(self) -> float:
        """Cycles of all channels of one tile: loads, additions, stores."""
        plan, spec, con = self.plan, self.task.spec, self.plan.con
        work = 2.0 * plan.positions + additions(plan.input_transform()) + self._passed()
        inner = math.prod(
            max(0, g - 2 * d) / g for g, d in zip(plan.grid[1:], plan.dilation, strict=True)
        )
        before = machine.pointwise_cycles(spec, self._before()) * plan.positions
        border = (inner + (1 - inner) * _BORDER) if any(con.conv.lo) else 1.0  # type: ignore[union-attr]
        per_vector = work / machine.ISSUED_PER_CYCLE * border + before + 4
        return plan.channels / self.lanes * per_vector + 10

    def _passed(self) -> float:
        """Stores and loads of a tile between dimensions, where registers do not hold it."""
        held = self.plan.few or self.plan.positions <= self.task.target.vector_registers
        between = sum(t > 1 for t in self.plan.tile) - 1
        return 0.0 if held else 2.0 * self.plan.positions * between

    def _before(self) -> set[int]:
        """Elementwise operators through which the inputs are read."""
        nodes, pending, found = self.task.spec.nodes, [self.plan.con.a], set[int]()
        while pending:
            at = pending.pop()
            if at not in found:
                found.add(at)
                pending.extend(nodes[at].inputs)
        return found

    def _result_cycles(self) -> float:
        """Cycles of one vector of a tile's results."""
        plan = self.plan
        after = set(range(plan.con.anchor + 1, len(self.task.spec.nodes)))
        results = math.prod(plan.step)
        work = plan.positions + additions(plan.output_transform()) + results
        return work / machine.ISSUED_PER_CYCLE + results * (
            1 + machine.pointwise_cycles(self.task.spec, after)
        )


class Winograd4Sketch(WinogradSketch):
    """The same with four results of a tile along each dimension of three taps."""

    name = "winograd4"
    results = MORE_RESULTS
    # Measured (docs/experiments.md): either tile hides nothing of it. So much is not counted there
    # for weights of 16 / 36 of the size: less of it is to be counted here, to choose between them.
    waiting = 0.7, 0.8

    @staticmethod
    def fits(task: Task) -> bool:
        """Whether the algorithm applies, may be less exact, and its vectors are whole."""
        return whole_vectors(task, MORE_RESULTS)


def whole_vectors(task: Task, results: int) -> bool:
    """Whether a kernel with so many results of a tile has whole vectors of both channels."""
    plan, lanes = winograd_of(task.spec, results), task.target.vector_bytes // 4
    return plan is not None and lanes >= 2 and lanes_of(plan, lanes) > 0


def lanes_of(plan: Winograd, lanes: int) -> int:
    """Elements of a vector, of which ``lanes`` fit: half as many where groups are so narrow.

    0 where neither is whole.
    """
    halves = (lanes // 2,) if plan.groups > 1 and lanes > _HALF else ()
    whole = (n for n in (lanes, *halves) if plan.con.k[-1] % n == 0 == plan.con.n % n)
    return next(whole, 0)
