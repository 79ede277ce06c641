"""What one block of attention works on: its memory, and its copies of queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu import asynchronous
from torch_pruner.codegen.parts.gpu.grid import Grid, Registers, spread
from torch_pruner.codegen.parts.gpu.lanes import exchanged
from torch_pruner.codegen.parts.gpu.operands import Moved
from torch_pruner.codegen.parts.operands import Nest
from torch_pruner.codegen.tir.builders import Buffer, Expr, Stmt, T, seq
from torch_pruner.codegen.tir.reader import Index, Reader, imm, unlinear
from torch_pruner.graph.contraction import contraction_at
from torch_pruner.graph.strided import common_width

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.graph.attention import Attention
    from torch_pruner.graph.ir import Graph

QUERIES = 16  # of a warp
QUAD = 4  # threads of a warp that share two rows of its scores: see tensor_core
PAD = 8  # elements after a line that tensor cores read: the next begins in other banks
F32 = "float32"


@dataclass(frozen=True, slots=True)
class Parts:
    """What blocks that share the keys of the same queries leave for a second launch.

    Of each part, group and query: the columns of its ``sums``, and in ``facts`` the largest score
    and the sum of the powers.
    """

    sums: Buffer
    facts: Buffer
    split: int


@dataclass(slots=True)
class Block:
    """Everything the parts of one emission share.

    A row is a query of one of ``heads`` neighbouring heads, which share keys and values and are a
    *group*. Of the two rows of its warp's tiles that a thread has parts of, it keeps a value each
    in ``top``, ``total`` and ``widest``.
    """

    spec: Graph
    att: Attention
    reader: Reader
    grid: Grid
    bm: int
    bn: int
    stages: int
    ahead: bool  # copies are asynchronous where operands allow it
    depth: int  # in whole steps of tensor cores
    width: int
    query: Buffer
    key: Buffer
    value: Buffer
    products: Registers  # scores, and then powers
    result: Registers
    top: Registers  # the largest score so far
    total: Registers  # sum of the powers that this thread has had
    widest: Registers  # the largest score that this thread has in a turn
    out: Buffer
    heads: int = 1
    parts: Parts | None = None

    @property
    def rows(self) -> int:
        """Of a group."""
        return self.heads * self.att.queries

    def stage(self, turn: Expr, line: int) -> Expr:
        """Where keys or values of a turn begin, for lines of so many elements."""
        size = self.bn * (line + PAD)
        return T.floormod(turn, self.stages) * size if self.stages > 1 else imm(0)

    def over_quad(
        self, held: Registers, half: int, tid: Expr, join: Callable[[Expr, Expr], Expr]
    ) -> tuple[list[Stmt], Expr]:
        """What the threads that share a row hold of it, joined: what comes first, and the value.

        No thread changes what it holds in the same phase.
        """
        if self.grid.host:
            first = tid - T.floormod(tid, QUAD)
            found: Expr = held.buffer[held.at(first, half)]
            for lane in range(1, QUAD):
                found = join(found, held.buffer[held.at(first + lane, half)])
            return [], found
        found = held.buffer[held.at(tid, half)]
        stmts: list[Stmt] = []
        for distance in (1, 2):
            binds, own, other = exchanged(found, F32, distance)
            stmts += binds
            found = join(own, other)
        return stmts, found

    def place(self, group: Expr, row: Expr) -> tuple[Expr, Expr]:
        """The head and the query that a row of a group is."""
        if self.heads == 1:
            return group, row
        queries = self.att.queries
        return group * self.heads + T.floordiv(row, queries), T.floormod(row, queries)

    def full(self, group: Expr, row: Expr, key: Expr) -> Index:
        """The index of a score; those that are not there repeat the last."""
        att = self.att
        row = T.min(row, imm(self.rows - 1)) if self.rows % self.bm else row
        key = T.min(key, imm(att.keys - 1)) if att.keys % self.bn else key
        head, query = self.place(group, row)
        return (*unlinear(head, att.batch), query, key)


def _moved(block: Block, product: int, second: int) -> tuple[Moved, int]:
    """How an operand of one of the products travels, and its node."""
    con = contraction_at(block.spec, product)
    nest = Nest(
        block.spec, con, block.reader, 1, 1, 1, 1, False, False, None, None, None, block.out
    )
    node = con.b if second else con.a
    return Moved(nest, node, tensor=True), node


def _copy(
    block: Block,
    tid: Expr,
    moved: Moved,
    into: tuple[Buffer, int, int],
    extents: tuple[int, int, int],
    at: tuple[Expr, Callable[[Expr, Expr], Expr], int],
    base: Expr | int = 0,
) -> Stmt:
    """Lines of an operand; zeros for what it does not have.

    ``into``: shared memory, lines and elements of a line. ``extents``: lines and elements that
    there are, and how many lines of the operand a tile has. ``at``: the first line, the element of
    a line and a place in it, and along which axis of the operand a line lies. ``base``: where the
    first line goes.
    """
    buf, lines, length = into
    there, filled, step = extents
    first, read, axis = at
    reach = moved.reach(axis)
    width = common_width(max(reach, 1), length, filled)
    wide = block.ahead and width == moved.most == reach

    def piece(item: Expr) -> Stmt:
        line, place = T.floordiv(item, length), T.floormod(item, length)

        to = base + line * (length + PAD) + place

        def put(v: Expr, value: Expr) -> Stmt:
            return moved.put(buf, to + v, value)

        def value(v: Expr) -> Expr:
            return read(first + line, place + v)

        guards = [first + line < there] if there % step else []
        guards += [place < filled] if filled % length else []
        if wide:
            return asynchronous.copy((buf, to), value, width, guards, block.grid.host)
        return moved.lanes(width, put, value, guards)

    return spread(block.grid.threads, tid, lines * length, piece, width=width)


def copy_queries(block: Block, group: Expr, first: Expr, tid: Expr) -> Stmt:
    att = block.att
    moved, node = _moved(block, att.scores, 0)
    batch = block.spec.nodes[node].shape[:-2]

    def read(row: Expr, d: Expr) -> Expr:
        head, query = block.place(group, row)
        return moved.nest.reader.at(node, (*unlinear(head, batch), query, d))

    extents = (block.rows, att.depth, block.bm)
    return _copy(
        block, tid, moved, (block.query, block.bm, block.depth), extents, (first, read, -1)
    )


def copy_keys(block: Block, group: Expr, turn: Expr, tid: Expr) -> Stmt:
    """Keys and values of a turn."""
    att, start, head = block.att, turn * block.bn, group * block.heads
    moved, node = _moved(block, att.scores, 1)
    batch = block.spec.nodes[node].shape[:-2]

    def read_key(key: Expr, d: Expr) -> Expr:
        return moved.nest.reader.at(node, (*unlinear(head, batch), d, key))

    moved_value, value = _moved(block, att.out, 1)
    batch_value = block.spec.nodes[value].shape[:-2]

    def read_value(key: Expr, column: Expr) -> Expr:
        return moved_value.nest.reader.at(value, (*unlinear(head, batch_value), key, column))

    keys = _copy(
        block, tid, moved, (block.key, block.bn, block.depth), (att.keys, att.depth, block.bn),
        (start, read_key, -2), block.stage(turn, block.depth),
    )  # fmt: skip
    values = _copy(
        block, tid, moved_value, (block.value, block.bn, block.width),
        (att.keys, att.width, block.bn), (start, read_value, -1), block.stage(turn, block.width),
    )  # fmt: skip
    return seq([keys, values])
