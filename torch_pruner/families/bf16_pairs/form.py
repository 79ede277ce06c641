"""Contractions of bfloat16 as instructions with pairs along the reduction take them.

Two instructions: a dot product of pairs (``bf16_pairs``), which steps through the reduction by 2,
and a product of tiles (``bf16_tiles``), which steps by 32. Both want the second operand in panels
``[group][column block][k pair][column][2]`` and the first with its k contiguous and whole steps of
it. There are five ways to that:

* rows: they lie so, or the kernel copies them and pads each; a convolution's are its windows.
* windows: a convolution's input, channels last, is read where it lies, or a padded copy is. At each
  offset of the kernel the channels are whole steps.
* lines: the same for few channels, all offsets along the last dimension at once, which lie together
  in the copy; weights are padded with zeros to whole steps.
* planes: the gradient of a convolution's weights sums over positions. The input is copied channel
  by channel; the columns have zeros between lines, so that positions are one line from the first
  to the last, and a tap reads it from another place on.
* taps: the same, copied for each tap.

Float32 that may be rounded (``fast_math``) is rounded by these copies and by the packing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

from torch_pruner.families.base import Parameters
from torch_pruner.families.bf16_pairs.planes import Planes, planes_of
from torch_pruner.graph.adjacency import rows_adjacent
from torch_pruner.graph.contraction import (
    Contraction,
    constant_operand,
    contraction_of,
    copied_shape,
)
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.packing import PackLayout
from torch_pruner.graph.phases import Division
from torch_pruner.graph.precision import is_fast
from torch_pruner.graph.signature import BufferSpec
from torch_pruner.graph.strided import Strided, strided

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph, Shape

STEPS = {"bf16_pairs": 2, "bf16_tiles": 32}
ROWS, WINDOWS, LINES, PLANES, TAPS = range(5)
_FORMS = ("matmul", "conv", "conv_transpose", "conv_phases")
COLUMNS = 16  # of one vector or tile: pairs are 32 bits wide, vectors 512

N = TypeVar("N")
N_co = TypeVar("N_co", covariant=True)


class Bf16PairsDecisions(NamedTuple, Generic[N]):
    """Decisions of a schedule: integers of one point, or columns of many."""

    tm: N  # rows of a register tile
    nv: N  # vectors of 16 columns of a register tile
    mc: N  # chunks of rows
    order: N  # order of units: 0 panels outside, 1 chunks outside
    ku: N  # unrolled steps of the reduction, of two elements each
    tasks: N  # parallel tasks at most, among which units are shared out
    ahead: N  # 1: the next panel of constants is fetched early
    way: N  # to the first operand: see ``form``'s constants


class PairDecisions(Protocol[N_co]):
    """The decisions that schedules of pairs and of tiles share. See ``Bf16PairsDecisions``."""

    @property
    def nv(self) -> N_co: ...

    @property
    def mc(self) -> N_co: ...

    @property
    def order(self) -> N_co: ...

    @property
    def tasks(self) -> N_co: ...

    @property
    def ahead(self) -> N_co: ...

    @property
    def way(self) -> N_co: ...


@dataclass(frozen=True, slots=True)
class PairForm:
    """What the operands of one kernel look like."""

    con: Contraction
    way: int  # to the first operand
    depth: int  # of the reduction, padded to whole steps
    place: Strided | None  # of the first operand, where it is read in place
    constant: tuple[int, Graph] | None  # the second operand's input and views
    planes: Planes | None
    input_shape: Shape  # of the windows that are read: (image, *place, channel)

    def panel(self, block: int) -> Shape:
        """Shape of the packed second operand, in elements."""
        blocks = -(-self.con.n // block)
        return (self.con.groups, blocks, self.depth // 2, block * 2)

    @property
    def copy(self) -> Shape:
        """Shape of the first operand's copy."""
        if self.planes is not None:
            return (self.con.m[0], self.planes.row)
        return self.input_shape or (self.con.groups, self.con.rows, self.depth)

    @property
    def runs(self) -> int:
        """How many runs of ``extent`` rows there are, each a constant apart, of which tiles are."""
        return self.con.rows // self.extent

    @property
    def extent(self) -> int:
        con = self.con
        return (con.rows, con.m[-1], con.m[-1], con.m[0], con.m[0])[self.way]

    @property
    def rows(self) -> int:
        """Rows of each tile: as many tiles as rows need, filled evenly."""
        return -(-self.extent // -(-self.extent // 16))

    def tiles(self, rows: Any) -> Any:
        """Tiles of ``rows`` rows (a number or an array)."""
        return self.runs * -(-self.extent // rows)

    @property
    def outer(self) -> Shape:
        """Axes of the reduction before the one along which steps lie in the first operand."""
        if self.way == LINES:
            return self.con.k[:-2]
        return self.con.k[:-1] if self.way == WINDOWS else ()

    @property
    def inner(self) -> int:
        """Elements of the reduction along its last axis, which lie together."""
        return self.depth // math.prod(self.outer)

    @property
    def packs_first(self) -> bool:
        """Whether all of the second operand is packed before the first tile."""
        return self.constant is None and self.con.conv is not None


def takes_pairs(graph: Graph) -> bool:
    """Whether the one contraction of ``graph`` has operands that are bfloat16 or, where
    ``fast_math`` allows it, rounded to that.

    Its sums may stay float32: they are rounded after the bias, as eager does.
    """
    con = contraction_of(graph)
    halves = all(is_half(graph, operand) for operand in (con.a, con.b))
    fits = con.form in _FORMS and (halves or is_fast(graph.nodes[con.anchor]))
    return fits and con.acc_dtype == "float32" and con.flops > 0


def ways(graph: Graph, family: str) -> list[int]:
    """The ways to the first operand that the family of that name has; none: it does not do it."""
    con = contraction_of(graph)
    if con.form == "matmul":
        return [ROWS]
    changes = constant_operand(graph, con) is None
    plain = con.form == "conv" and con.groups == 1
    gradient = math.prod(con.k[:-1]) >= math.prod(con.m[1:])  # sums over the more positions
    whole = con.k[-1] % STEPS[family] == 0
    assert con.conv is not None
    lines = plain and not whole and con.k[-2] > 1 and con.conv.dilation[-1] == 1
    found = [ROWS] * plain + [WINDOWS] * whole + [LINES] * lines
    if plain and changes and gradient:
        found += [PLANES, TAPS] if math.prod(con.m[1:]) > 1 else [PLANES]
    return found


def is_half(graph: Graph, operand: int) -> bool:
    """Whether an operand need not be rounded."""
    return graph.nodes[operand].dtype == "bfloat16"


def turned(graph: Graph, con: Contraction) -> bool:
    """Whether rows of a product's first operand are copied by turning squares of them."""
    enough = con.rows >= COLUMNS and con.depth >= COLUMNS
    return enough and con.conv is None and rows_adjacent(graph, con)


def pairs_together(graph: Graph, con: Contraction) -> Strided | None:
    """Where the second operand of a product lies, if pairs along the reduction are words there.

    So do those of a layer's weights, whose columns are rows in memory.
    """
    place = strided(graph, con.b) if con.conv is None and is_half(graph, con.b) else None
    if place is None or place.strides[-2] != 1 or con.depth < 2 * COLUMNS or con.depth % 2:
        return None
    even = place.offset % 2 == 0 and all(
        s % 2 == 0 for s in (*place.strides[:-2], place.strides[-1])
    )
    return place if even and con.n >= COLUMNS else None


def pair_form(graph: Graph, family: str, way: int) -> PairForm:
    """The operands of ``graph`` (see ``takes_pairs``) for the family of that name."""
    con, step = contraction_of(graph), STEPS[family]
    constant = constant_operand(graph, con)
    place = strided(graph, con.a) if is_half(graph, con.a) else None
    if way in (PLANES, TAPS):
        planes = planes_of(con, step, alone=way == TAPS)
        return PairForm(con, way, planes.depth, None, constant, planes, ())
    if way == WINDOWS:
        assert con.conv is not None
        if con.conv.copies_input or (place is not None and place.strides[1] != 1):
            place = None
        return PairForm(con, way, con.depth, place, constant, None, copied_shape(graph, con))
    depth = con.depth
    if way == LINES:
        inner = -(-con.k[-2] * con.k[-1] // step) * step
        depth = math.prod(con.k[:-2]) * inner
        return PairForm(con, way, depth, None, constant, None, copied_shape(graph, con))
    if con.conv or (place and (depth % step or (depth > 1 and place.strides[-1] != 1))):
        place = None
    return PairForm(con, way, -(-depth // step) * step, place, constant, None, ())


def parameters(spec: Graph, family: str, block: int, way: int) -> Parameters:
    """Parameters of panels of ``block`` columns, for the family of that name.

    Scratch in order: an operand packed at run time, as words; rows copied.
    """
    packs: dict[int, PackLayout] = {}
    form = pair_form(spec, family, way)
    shape, scratch = form.panel(block), []
    if form.constant is not None:
        index, view = form.constant
        if way == LINES:
            view, kind = _lined(view, form), "matmul"
        else:  # the view of phases has split them
            kind = "matmul" if form.con.form == "conv_phases" else form.con.form
        packs[index] = PackLayout(_rounded(view), kind, form.con.groups, block, shape, 2)
    else:
        scratch.append(BufferSpec((*shape[:-1], block), "int32"))
    if form.place is None:
        # The last step along a line may reach past what it needs.
        behind = form.inner if way == LINES else 0
        copy = (math.prod(form.copy) + behind,) if behind else form.copy
        scratch.append(BufferSpec(copy, "bfloat16"))
    return Parameters(packs, tuple(scratch))


def _lined(view: Graph, form: PairForm) -> Graph:
    """Weights (o, c, *r) as (k, o), offsets along the last dimension padded to whole steps."""
    builder = GraphBuilder(list(view.nodes))
    (x,) = view.outputs
    columns, channels, *kernel = builder.shape(x)
    x = builder.permute(x, (*range(2, 2 + len(kernel)), 1, 0))
    outer, line = math.prod(kernel[:-1]), kernel[-1] * channels
    x = builder.reshape(x, (outer, line, columns))
    more = form.inner - line
    shape, none = (outer, form.inner, columns), (0, 0, 0)
    if more:
        dtype = builder.dtype(x)
        x = builder.append("pad", (x,), shape, dtype, lo=none, hi=(0, more, 0), value=0.0)
    return builder.finish([builder.reshape(x, (outer * form.inner, columns))])


def _rounded(view: Graph) -> Graph:
    """The same views of bfloat16s, rounded where they are not that."""
    (out,) = view.outputs
    if is_half(view, out):
        return view
    builder = GraphBuilder(list(view.nodes))
    return builder.finish([builder.cast(out, "bfloat16")])


def division(spec: Graph, decisions: Bf16PairsDecisions[int]) -> Division | None:
    """The columns of each task, where they are panels of all rows; None if not."""
    con, block = contraction_of(spec), decisions.nv * COLUMNS
    tiles = -(-con.rows // decisions.tm)
    if con.groups != 1 or con.conv is not None or min(decisions.mc, tiles) > 1:
        return None
    panels = -(-con.n // block)
    each = -(-panels // min(decisions.tasks, panels))
    tasks = -(-panels // each)
    return Division(tasks, each * block) if tasks > 1 else None
