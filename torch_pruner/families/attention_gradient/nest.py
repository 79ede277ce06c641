"""What the parts of one emission of attention's gradient share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from torch_pruner.codegen.parts.pair_words import in_pairs, word
from torch_pruner.codegen.tir.builders import Buffer, Expr, T
from torch_pruner.codegen.tir.reader import Index, Reader, imm, unlinear

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.attention_gradient.form import Columns, Plan
    from torch_pruner.graph.ir import Graph

Count = TypeVar("Count", int, Expr)
F32 = "float32"


@dataclass(frozen=True, slots=True)
class Part:
    """A buffer of ``size`` elements for each task."""

    buffer: Buffer
    size: int

    def of(self, task: Expr) -> Expr:
        """Where the task's elements begin."""
        return task * self.size


@dataclass(slots=True)
class Nest:
    """What the parts of one emission share; the expressions are those of the open tile."""

    spec: Graph
    plan: Plan
    reader: Reader
    vl: int
    vectors: int  # of queries in a tile
    rows: int  # queries of a tile, the others being repetitions of the last
    nv: int
    tm: int
    tr: int
    nc: int
    keys: Part  # [key][depth]
    values: Part  # [key][width]
    into_keys: Part  # [key][column of a slot], as all gradients
    into_values: Part
    powers: Part  # [panel][key][lane]
    changes: Part  # [panel][key][lane]: the gradient of the scores
    turned_queries: Part  # [panel][depth][lane]
    turned_grads: Part  # [panel][width][lane]
    queries: Part  # [slots of a register tile][lane][column of these]
    grads: Part
    into_queries: Part  # [query][column of a slot]
    lines: Part  # keys: [slots of a register tile][key][column of these]
    by_keys: Part | None  # with pairs [panel][two keys][lane]: the gradient of the scores again
    spread: dict[int, Buffer]  # numbers of each query: [lane]
    task: Expr = field(default_factory=lambda: imm(0))
    group: Expr = field(default_factory=lambda: imm(0))
    start: Expr = field(default_factory=lambda: imm(0))  # key of the block
    count: Expr = field(default_factory=lambda: imm(0))  # of the block's keys
    first: Expr = field(default_factory=lambda: imm(0))  # query of lane 0

    @property
    def lanes(self) -> int:
        return self.vl * self.vectors

    @property
    def pairs(self) -> bool:
        return self.plan.each > 1

    def steps(self, count: Count) -> Count:
        """Steps of a sum over so many."""
        return count if not self.pairs else in_pairs(count)

    def operand(self, value: Callable[[Expr], Expr], step: Expr, count: Expr | None = None) -> Expr:
        """What a step multiplies: a number, or two of them, of ``count`` or an even number."""
        if not self.pairs:
            return value(step)
        first, second = step * 2, step * 2 + 1
        if count is None or (isinstance(count, T.IntImm) and int(count.value) % 2 == 0):
            return word(value(first), value(second))
        other = T.Select(second < count, value(T.min(second, count - 1)), T.const(0, "float32"))
        return word(value(first), other)

    def query_at(self, lane: Expr) -> Expr:
        at, last = self.first + lane, self.plan.found.queries - 1
        return T.min(at, imm(last)) if self.rows < self.lanes else at

    def full(self, key: Expr, lane: Expr) -> Index:
        """The index of a full node, by key of the block and lane."""
        found = self.plan.found
        return (*unlinear(self.group, found.batch), self.query_at(lane), self.start + key)

    def read(self, source: int, place: Index) -> Expr:
        """An element of the open head of an operand of a product."""
        batch = self.spec.nodes[source].shape[:-2]
        return self.reader.at(source, (*unlinear(self.group, batch), *place)).astype(F32)

    def weight_at(self, part: Part, key: Expr, panel: Expr | int, lane: Expr) -> Expr:
        return self.turned_at(part, self.plan.kb, key, panel, lane)

    def turned_at(self, part: Part, rows: int, row: Expr, panel: Expr | int, lane: Expr) -> Expr:
        """The place of a lane of a panel in a part of so many ``rows``."""
        return part.of(self.task) + (panel * rows + row) * self.plan.panel + lane

    def slot_at(
        self, part: Part, columns: Columns, rows: int, row: Expr, slots: tuple[Expr, int], j: Expr
    ) -> Expr:
        """The place of vector ``j`` of the ``slots`` (the first, and how many) that one register
        tile reads: a panel of their own, one piece, which uses all sets of the cache."""
        first, many = slots
        return part.of(self.task) + (first * rows + row * many + j) * columns.column

    def column(self, columns: Columns, slot: Expr) -> Expr:
        """The first column of a slot."""
        first, last = slot * columns.column, columns.count - columns.column
        return T.min(first, imm(last)) if columns.count % columns.column else first
