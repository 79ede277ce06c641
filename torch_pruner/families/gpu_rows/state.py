"""What is known of a row kernel while it is emitted: which thread has what, and where it lies."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import WARP, Grid, in_blocks
from torch_pruner.codegen.parts.reductions import merge
from torch_pruner.codegen.tir.builders import Buffer, Expr, ForKind, T
from torch_pruner.codegen.tir.reader import Index, Reader, imm, unlinear

if TYPE_CHECKING:
    from torch_pruner.families.gpu_rows.form import GpuRowsDecisions
    from torch_pruner.families.gpu_rows.found import Found
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.rows import RowDomain


@dataclass(slots=True)
class Rows:
    """One launch; ``tid`` is a thread of the block."""

    spec: Graph
    domain: RowDomain
    decisions: GpuRowsDecisions[int]
    reader: Reader
    grid: Grid
    outputs: dict[int, Buffer]
    found: dict[int, Found]
    kept: dict[int, Buffer]  # the block's rows of each value worth keeping
    neighbours: ForKind
    scratch: dict[int, list[Buffer]]  # what each part of each row gave, by reduction
    block: Expr = field(default_factory=lambda: imm(0))  # of rows
    part: Expr = field(default_factory=lambda: imm(0))  # of each of them
    shared: dict[str, Buffer] = field(default_factory=dict)  # by what meets in it
    ready: set[int] = field(default_factory=set)
    met: int = 0  # how many times warps have met

    @property
    def apart(self) -> bool:
        """Whether threads of a row exchange nothing in registers."""
        return bool(self.grid.host or self.decisions.abreast)

    @property
    def units(self) -> int:
        """Of a row: threads, or warps, which have exchanged what they found."""
        threads = self.decisions.threads
        return threads if self.apart else threads // WARP

    def lane(self, tid: Expr) -> Expr:
        """Among the threads of a row."""
        threads, rows, abreast = self.decisions.threads, self.decisions.rows, self.decisions.abreast
        if rows == 1:
            return tid
        return T.floordiv(tid, rows) if abreast else T.floormod(tid, threads)

    def which(self, tid: Expr) -> Expr:
        """Among the rows of the block."""
        threads, rows, abreast = self.decisions.threads, self.decisions.rows, self.decisions.abreast
        if rows == 1:
            return imm(0)
        return T.floormod(tid, rows) if abreast else T.floordiv(tid, threads)

    def kept_at(self, tid: Expr, position: Expr) -> Expr:
        """Where values are kept that lie at a position of the thread's row."""
        which = self.which(tid)
        if self.decisions.abreast:
            return position * self.decisions.rows + which
        return which * self.domain.width + position

    @property
    def span(self) -> int:
        """Positions of a part of a row, which ``vl`` divides."""
        vl = self.decisions.vl
        return in_blocks(in_blocks(self.domain.width, vl), self.decisions.split) * vl

    def left_at(self, tid: Expr, part: Expr) -> Expr:
        """Where in ``scratch`` a part of the thread's row has left what it gave."""
        return part * self.domain.rows + self.row(tid)

    def row(self, tid: Expr) -> Expr:
        """Among all."""
        return self.block * self.decisions.rows + self.which(tid)

    def row_at(self, tid: Expr) -> Index:
        return unlinear(self.row(tid), tuple(self.domain.shape[a] for a in self.domain.kept))

    def index(self, tid: Expr, position: Expr) -> Index:
        """The full index of the element of the thread's row at a position along it."""
        domain = self.domain
        along = unlinear(position, tuple(domain.shape[a] for a in domain.axes))
        return merge(self.row_at(tid), along, domain.axes, len(domain.shape))

    def meeting(self, name: str, dtype: str) -> Buffer:
        """Shared memory for one value of every unit, twice."""
        key = f"{name}_{dtype}"
        if key not in self.shared:
            count = 2 * self.decisions.rows * self.units
            self.shared[key] = self.grid.shared(count, dtype, f"partial{key}")
        return self.shared[key]
