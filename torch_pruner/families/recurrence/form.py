"""Recurrences: what a kernel graph says of one, decisions, panels of weights, scratch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.graph.contraction import constant_behind
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.signature import BufferSpec

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Node

N = TypeVar("N")


class RecurrenceDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many.

    A task has a direction, a chunk of the rows and a chunk of the units. If it has all units it
    does all steps; else tasks wait for each other after each.
    """

    vl: N  # lanes: units of one vector
    nv: N  # vectors of units of a panel, for every gate
    tm: N  # rows of a register tile
    gates: N  # gates whose sums a tile keeps in registers at once
    ku: N  # unrolled positions of the state
    ahead: N  # 1: weights of the next panel are fetched while tiles pass by this one
    rows: N  # chunks of the rows
    units: N  # chunks of the units, in panels
    spread: N  # 1: tasks on several threads; 0: one after another on one


@dataclass(frozen=True, slots=True)
class Recurrence:
    """A recurrence of a kernel graph: where it is, and its extents."""

    at: int
    node: Node
    steps: int
    rows: int
    directions: int
    units: int
    gates: int

    @property
    def op(self) -> str:
        return self.node.op

    @property
    def has_cells(self) -> bool:
        return self.op == "lstm"

    @property
    def keeps_cells(self) -> bool:
        """Whether the cells after the last step are part of the result."""
        return self.has_cells and bool(self.node.attr("cells"))

    @property
    def given(self) -> int:
        return self.node.inputs[0]

    @property
    def weights(self) -> int:
        return self.node.inputs[1]

    @property
    def state(self) -> int:
        return self.node.inputs[2]

    @property
    def other(self) -> int:
        """The cells before the first step, or what a GRU adds to the state's share."""
        return self.node.inputs[3]


def recurrence_of(spec: Graph) -> Recurrence:
    """The recurrence of a kernel graph that has one."""
    at = next(i for i, node in enumerate(spec.nodes) if node.kind is OpKind.RECURRENCE)
    node = spec.nodes[at]
    steps, rows, directions, gates, units = spec.nodes[node.inputs[0]].shape
    return Recurrence(at, node, steps, rows, directions, units, gates)


def panels(found: Recurrence, decisions: RecurrenceDecisions[int]) -> int:
    """Panels of a direction's weights."""
    return -(-found.units // (decisions.vl * decisions.nv))


def groups(found: Recurrence, decisions: RecurrenceDecisions[int]) -> int:
    """Groups of gates of a panel, one after another."""
    return found.gates // decisions.gates


def constant_weights(spec: Graph, found: Recurrence) -> tuple[int, Graph] | None:
    """(input index, views of it) where the weights are one static input."""
    return constant_behind(spec, found.weights)


def parameters(spec: Graph, decisions: RecurrenceDecisions[int]) -> Parameters:
    """Weights as panels, [direction][panel][group of gates][k][gate][unit]. Scratch: states before
    and after a step, [2][direction][row][unit]; cells like one of them; panels that are made at
    run time."""
    found = recurrence_of(spec)
    each = (found.directions, found.rows, found.units)
    scratch = [BufferSpec((2, *each), found.node.dtype)]
    if found.has_cells:
        scratch.append(BufferSpec(each, found.node.dtype))
    width, count = decisions.vl * decisions.nv, panels(found, decisions)
    blocks = count * groups(found, decisions)
    shape = (found.directions, blocks, found.units, decisions.gates * width)
    constant = constant_weights(spec, found)
    if constant is None:
        return Parameters(scratch=(*scratch, BufferSpec(shape, found.node.dtype)))
    index, view = constant
    layout = PackLayout(
        _side_by_side(view, found, count, width), "matmul", shape[0], shape[-1], shape
    )
    return Parameters({index: layout}, tuple(scratch))


def _side_by_side(view: Graph, found: Recurrence, count: int, width: int) -> Graph:
    """``view`` with the gates of a panel's units side by side; units that are none are zeros."""
    b = GraphBuilder()
    at = 0
    for node in view.nodes:
        at = b.again(node, node.inputs)
    d, k, gates, units = found.directions, found.units, found.gates, found.units
    x = b.reshape(at, (d, k, gates, units))
    if (more := count * width - units) > 0:
        none = (0, 0, 0, 0)
        shape = (d, k, gates, count * width)
        x = b.append("pad", (x,), shape, b.dtype(x), lo=none, hi=(0, 0, 0, more), value=0.0)
    x = b.permute(b.reshape(x, (d, k, gates, count, width)), (0, 1, 3, 2, 4))
    return b.finish([b.reshape(x, (d, k, count * gates * width))])
