"""What one block of attention works on: its memory, and its copies of queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu.grid import Grid, Registers, spread
from torch_pruner.codegen.parts.gpu.operands import Moved, common_width
from torch_pruner.codegen.parts.operands import Nest
from torch_pruner.codegen.tir.builders import Buffer, Expr, Stmt, T, seq
from torch_pruner.codegen.tir.reader import Index, Reader, imm, unlinear
from torch_pruner.graph.contraction import contraction_at

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.graph.attention import Attention
    from torch_pruner.graph.ir import Graph

QUERIES = 16  # of a warp
SHARES = 2  # threads for a row of scores
PAD = 8  # elements after a line that tensor cores read: the next begins in other banks
F32 = "float32"


@dataclass(slots=True)
class Block:
    """Everything the parts of one emission share."""

    spec: Graph
    att: Attention
    reader: Reader
    grid: Grid
    bm: int
    bn: int
    depth: int  # in whole steps of tensor cores
    width: int
    query: Buffer
    key: Buffer
    value: Buffer
    power: Buffer
    score: Buffer
    top: Buffer  # of each row, before and after a turn
    total: Buffer
    factor: Buffer  # by which a row's sums shrink in a turn
    widest: Buffer  # of each thread's share of a row: the largest score
    added: Buffer  # and the sum of powers
    products: Registers
    result: Registers
    own: Registers
    out: Buffer

    @property
    def line(self) -> int:
        """Distance of rows of scores: the threads of a warp then read from different banks."""
        return self.bn + SHARES

    def full(self, group: Expr, query: Expr, key: Expr) -> Index:
        """The index of a score; those that are not there repeat the last."""
        att = self.att
        query = T.min(query, imm(att.queries - 1)) if att.queries % self.bm else query
        key = T.min(key, imm(att.keys - 1)) if att.keys % self.bn else key
        return (*unlinear(group, att.batch), query, key)


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
) -> Stmt:
    """Lines of an operand; zeros for what it does not have.

    ``into``: shared memory, lines and elements of a line. ``extents``: lines and elements that
    there are, and how many lines of the operand a tile has. ``at``: the first line, the element of
    a line and a place in it, and along which axis of the operand a line lies.
    """
    buf, lines, length = into
    there, filled, step = extents
    first, read, axis = at
    width = common_width(max(moved.reach(axis), 1), length, filled)

    def piece(item: Expr) -> Stmt:
        line, place = T.floordiv(item, length), T.floormod(item, length)

        def put(v: Expr, value: Expr) -> Stmt:
            return moved.put(buf, line * (length + PAD) + place + v, value)

        guards = [first + line < there] if there % step else []
        guards += [place < filled] if filled % length else []
        return moved.lanes(width, put, lambda v: read(first + line, place + v), guards)

    return spread(block.grid, tid, lines * length, piece, width=width)


def copy_queries(block: Block, group: Expr, first: Expr, tid: Expr) -> Stmt:
    att = block.att
    moved, node = _moved(block, att.scores, 0)
    batch = block.spec.nodes[node].shape[:-2]

    def read(query: Expr, d: Expr) -> Expr:
        return moved.nest.reader.at(node, (*unlinear(group, batch), query, d))

    extents = (att.queries, att.depth, block.bm)
    return _copy(
        block, tid, moved, (block.query, block.bm, block.depth), extents, (first, read, -1)
    )


def copy_keys(block: Block, group: Expr, start: Expr, tid: Expr) -> Stmt:
    """Keys and values of a turn."""
    att = block.att
    moved, node = _moved(block, att.scores, 1)
    batch = block.spec.nodes[node].shape[:-2]

    def read_key(key: Expr, d: Expr) -> Expr:
        return moved.nest.reader.at(node, (*unlinear(group, batch), d, key))

    moved_value, value = _moved(block, att.out, 1)
    batch_value = block.spec.nodes[value].shape[:-2]

    def read_value(key: Expr, column: Expr) -> Expr:
        return moved_value.nest.reader.at(value, (*unlinear(group, batch_value), key, column))

    keys = _copy(
        block, tid, moved, (block.key, block.bn, block.depth), (att.keys, att.depth, block.bn),
        (start, read_key, -2),
    )  # fmt: skip
    values = _copy(
        block, tid, moved_value, (block.value, block.bn, block.width),
        (att.keys, att.width, block.bn), (start, read_value, -1),
    )  # fmt: skip
    return seq([keys, values])
