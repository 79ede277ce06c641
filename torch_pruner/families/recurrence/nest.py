"""What the parts of one emission of a recurrence share: where states, cells and weights lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.output import along
from torch_pruner.codegen.tir.builders import Buffer, Expr, Stmt, T
from torch_pruner.codegen.tir.reader import Reader, imm, linear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.recurrence.form import Recurrence, groups, panels

if TYPE_CHECKING:
    from torch_pruner.families.recurrence.form import RecurrenceDecisions
    from torch_pruner.graph.ir import Graph


@dataclass(slots=True)
class Nest:
    """What the parts of one emission share."""

    spec: Graph
    found: Recurrence
    chosen: RecurrenceDecisions[int]
    reader: Reader
    out: Buffer
    state: Buffer  # [before or after][direction][row][unit]
    cells: Buffer | None  # [direction][row][unit]
    weights: Buffer  # [direction][panel][group][k][gate][unit]
    path: tuple[int, ...]

    @property
    def dtype(self) -> str:
        return self.found.node.dtype

    @property
    def vl(self) -> int:
        return self.chosen.vl

    @property
    def width(self) -> int:
        """Units of a panel."""
        return self.chosen.vl * self.chosen.nv

    @property
    def panels(self) -> int:
        return panels(self.found, self.chosen)

    @property
    def groups(self) -> int:
        return groups(self.found, self.chosen)

    @property
    def rows(self) -> int:
        """Rows of a task."""
        return self.found.rows // self.chosen.rows

    def block(self, d: Expr, panel: Expr, group: Expr | int) -> Expr:
        """Where the weights of a group of gates of a panel begin."""
        number = (d * self.panels + panel) * self.groups + group
        return number * (self.found.units * self.chosen.gates * self.width)

    def kept(self, d: Expr, row: Expr, unit: Expr) -> Expr:
        """Where a unit lies in cells, and in each of the two states."""
        return linear((d, row, unit), (self.found.directions, self.found.rows, self.found.units))

    def before(self, t: Expr) -> Expr:
        """Where the states before a step begin: those before even steps come first."""
        return T.truncmod(t, imm(2)) * (self.found.directions * self.found.rows * self.found.units)

    def after(self, t: Expr) -> Expr:
        """Where the states after a step begin."""
        return self.before(t + 1)

    def stored(self, place: Expr, d: Expr, row: Expr, unit: Expr, value: Expr) -> Stmt:
        """The state at a place of the result."""
        index = along(self.spec, self.path, (place, row, d, unit))
        return store(self.out, linear(index, self.spec.nodes[self.spec.outputs[0]].shape), value)
