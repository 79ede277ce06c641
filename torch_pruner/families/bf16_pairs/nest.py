"""What the two emitters for bfloat16 pairs share: operands, the walk over tiles, the epilogue.

The nest is: parallel over tasks; column panels and row chunks of a task; row tiles; reduction; the
tile's epilogue. A tile that would reach past the last row starts earlier and computes some rows
again: they are stored twice with the same values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import element
from torch_pruner.codegen.parts.output import along, anchor_index, output_path
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    VECTORIZED,
    Buffer,
    Expr,
    ForKind,
    S,
    Stmt,
    T,
    loop,
    prefetch,
    seq,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import bits, held_bits, store, value_dtype
from torch_pruner.families.bf16_pairs.form import COLUMNS, PairForm, is_half, pair_form
from torch_pruner.families.bf16_pairs.rounding import rounded_vector
from torch_pruner.graph.strided import Strided, strided

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.bf16_pairs.form import PairDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

LINE = 64  # bytes


@dataclass(slots=True)
class PairNest:
    """Everything the parts of one emission share."""

    spec: Graph
    form: PairForm
    reader: Reader
    rows: int  # of one tile
    tiles: int  # over all rows
    block: int  # columns of a panel
    ahead: bool
    panel: Buffer
    copy: Buffer | None
    out: Buffer
    sums: Buffer | None  # where tile registers are stored

    @property
    def blocks(self) -> int:
        return -(-self.form.con.n // self.block)

    def first_row(self, tile: Expr) -> Expr:
        """First row of a tile; past the last tile, that of the last one."""
        if self.form.con.rows % self.rows == 0 and self.tiles * self.rows == self.form.con.rows:
            return tile * self.rows
        return T.min(tile * self.rows, imm(self.form.con.rows - self.rows))

    def a_address(self, g: Expr, row: Expr) -> tuple[Buffer, Expr]:
        """Buffer and element at which row ``row`` of the first operand starts."""
        con, place = self.form.con, self.form.place
        if place is None:
            assert self.copy is not None
            return self.copy, (g * con.rows + row) * self.form.depth
        index = (*unlinear(g, con.batch), row, imm(0))
        return self.reader.buffers[place.source], element(place, index)

    @property
    def a_stride(self) -> int:
        """Elements from one row of the first operand to the next."""
        return self.form.depth if self.form.place is None else self.form.place.strides[-2]

    def panel_at(self, g: Expr, nb: Expr, pair: Expr) -> Expr:
        """Element of the panel buffer where pair ``pair`` of column block ``nb`` starts."""
        return ((g * self.blocks + nb) * (self.form.depth // 2) + pair) * (self.block * self.width)

    @property
    def width(self) -> int:
        """Elements of the panel buffer in one pair: packed at run time they are whole words."""
        return 1 if str(self.panel.dtype) == "int32" else 2


def pair_nest(
    spec: Graph,
    family: str,
    signature: Signature,
    rows: int,
    block: int,
    ahead: bool,
) -> tuple[PairNest, Emitted]:
    """The nest of a kernel and the buffers of its emission, whose body is still empty."""
    form = pair_form(spec, family)
    inputs, (out,), scratch = parameters(signature)
    rest = list(scratch)
    sums = rest.pop() if family == "bf16_tiles" else None
    copy = rest.pop() if form.place is None else None
    constant = next((k for k, p in enumerate(signature.packs) if p is not None), None)
    panel = inputs[constant] if constant is not None else rest.pop()
    reader = Reader(spec, dict(zip(spec.inputs, inputs, strict=True)))
    tiles = -(-form.con.rows // rows)
    ahead = ahead and constant is not None
    nest = PairNest(spec, form, reader, rows, tiles, block, ahead, panel, copy, out, sums)
    return nest, Emitted(S.Evaluate(imm(0)), inputs, [out], scratch)


def walk(
    nest: PairNest,
    decisions: PairDecisions[int],
    group: int,
    tile: Callable[[Expr, Expr, Expr, Expr, tuple[Expr, int]], Stmt],
    around: Callable[[Stmt], Stmt] = lambda body: body,
) -> Stmt:
    """The kernel: copies, then ``tile(task, g, nb, block of row tiles, turn)`` for all.

    ``group`` row tiles are computed together; ``turn`` is which of how many blocks of a panel it
    is; ``around`` wraps what one task does.
    """
    con = nest.form.con
    row_blocks = -(-nest.tiles // group)
    per_chunk = -(-row_blocks // min(decisions.mc, row_blocks))
    chunks = -(-row_blocks // per_chunk)
    units = con.groups * nest.blocks * chunks
    tasks = min(decisions.tasks, units)
    per_task = -(-units // tasks)
    tasks = -(-units // per_task)
    kind = PARALLEL if tasks > 1 else SERIAL

    def unit(p: Expr, at: Expr) -> Stmt:
        if decisions.order == 0:
            g, nb, chunk = unlinear(at, (con.groups, nest.blocks, chunks))
        else:
            g, chunk, nb = unlinear(at, (con.groups, chunks, nest.blocks))

        def row_block(t: Expr) -> Stmt:
            rb = chunk * per_chunk + t
            turn = (rb, row_blocks) if decisions.order == 0 else (t, per_chunk)
            body = tile(p, g, nb, rb, turn)
            return body if row_blocks % per_chunk == 0 else when(rb < row_blocks, body)

        packed = None if nest.form.constant is not None else _pack(nest, g, nb)
        return seq([packed, loop(per_chunk, row_block, name="t")])

    def task(p: Expr) -> Stmt:
        def step(u: Expr) -> Stmt:
            at = p * per_task + u
            return unit(p, at) if units % per_task == 0 else when(at < units, unit(p, at))

        return around(loop(per_task, step, name="u"))

    copied = None if nest.copy is None else _copy_rows(nest, kind)
    return seq([copied, loop(tasks, task, kind, name="p")])


def _bits_at(nest: PairNest, node: int, place: Strided | None, index: Index) -> Expr:
    """Bits of element ``index`` of a node, as uint32."""
    if place is not None:
        return held_bits(nest.reader.buffers[place.source], element(place, index))
    return bits(nest.reader.at(node, index))


def _copy_rows(nest: PairNest, kind: ForKind) -> Stmt:
    """The first operand with k contiguous and padded with zeros."""
    con, copy, scope = nest.form.con, nest.copy, nest.reader.scope
    assert copy is not None
    (depth,) = con.k

    def row(p: Expr) -> Stmt:
        g, r = unlinear(p, (con.groups, con.rows))
        base = p * nest.form.depth

        def value(k: Expr) -> Expr:
            return nest.reader.at(con.a, (*unlinear(g, con.batch), r, k))

        def one(k: Expr) -> Stmt:
            return store(copy, base + k, value(k))

        whole = depth // COLUMNS
        parts = []
        if whole:

            def vector(o: Expr) -> Stmt:
                first = o * COLUMNS
                if not is_half(nest.spec, con.a):
                    return rounded_vector(copy, base + first, lambda v: value(first + v), scope)
                return scope(lambda: [loop(COLUMNS, lambda v: one(first + v), VECTORIZED, "v")])

            parts.append(loop(whole, vector, name="k"))
        if depth % COLUMNS:
            rest = depth % COLUMNS
            parts.append(loop(rest, lambda k: one(whole * COLUMNS + k), name="k"))
        if nest.form.depth > depth:
            zero = T.const(0, value_dtype("bfloat16"))
            pad = nest.form.depth - depth
            parts.append(loop(pad, lambda k: store(copy, base + depth + k, zero), name="k"))
        return seq(parts)

    return loop(con.groups * con.rows, row, kind, name="p")


def _pack(nest: PairNest, g: Expr, nb: Expr) -> Stmt:
    """Copy one panel of a second operand that is not constant, as words of two elements."""
    con, panel, block = nest.form.con, nest.panel, nest.block
    (depth,) = con.k
    place = strided(nest.spec, con.b) if is_half(nest.spec, con.b) else None
    batch = unlinear(g, con.batch)

    def word(pair: Expr, column: Expr) -> Expr:
        low = _bits_at(nest, con.b, place, (*batch, pair * 2, column))
        high = _bits_at(nest, con.b, place, (*batch, pair * 2 + 1, column))
        return T.bitwise_or(low, T.shift_left(high, T.const(16, "uint32")))

    def half(column: Expr) -> Expr:  # the last element of an odd reduction
        return _bits_at(nest, con.b, place, (*batch, imm(depth - 1), column))

    def put(pair: Expr, column: Expr, value: Expr | None) -> Stmt:
        at = nest.panel_at(g, nb, pair) + column
        bit = T.const(0, "uint32") if value is None else value
        return store(panel, at, bit.astype("int32"))

    def line(pair: Expr, value: Callable[[Expr], Expr | None]) -> Stmt:
        """All columns of a pair, by vectors; columns past the last one are zero."""

        def vector(j: Expr) -> Stmt:
            first = nb * block + j * COLUMNS

            def lane(v: Expr) -> Stmt:
                return put(pair, j * COLUMNS + v, value(first + v))

            whole = loop(COLUMNS, lane, VECTORIZED, "v")
            if con.n % block == 0:
                return whole

            def tail(v: Expr) -> Stmt:
                nothing = put(pair, j * COLUMNS + v, None)
                return when(first + v < con.n, lane(v), nothing)

            return when(first + COLUMNS <= con.n, whole, loop(COLUMNS, tail, name="v"))

        return loop(block // COLUMNS, vector, name="j")

    pairs = depth // 2
    parts = [loop(pairs, lambda p: line(p, lambda c: word(p, c)), name="k") if pairs else None]
    if depth % 2:
        parts.append(line(imm(pairs), half))
    padding = nest.form.depth // 2 - pairs - depth % 2
    if padding:
        first = imm(pairs + depth % 2)
        parts.append(loop(padding, lambda p: line(first + p, lambda _: None), name="k"))
    return seq(parts)


def write(nest: PairNest, g: Expr, nb: Expr, row: Expr, acc: Callable[[Expr], tuple[Buffer, Expr]],
          kind: ForKind) -> Stmt:  # fmt: skip
    """The epilogue of one row of a tile: every element through the rest of the graph, stored once.

    ``acc(column)`` is where the sums are; ``kind`` of the loop over vectors.
    """
    con, reader = nest.form.con, nest.reader
    path = output_path(nest.spec, con.anchor)
    shape = nest.spec.nodes[path[-1]].shape

    def vector(j: Expr) -> Stmt:
        first = nb * nest.block + j * COLUMNS

        def element(v: Expr) -> Stmt:
            index = along(nest.spec, path, anchor_index(con, g, (row,), first + v))
            buf, at = acc(j * COLUMNS + v)
            reader.overrides[con.anchor] = lambda _: buf[at]
            return reader.scope(
                lambda: [store(nest.out, linear(index, shape), reader.at(path[-1], index))]
            )

        whole = loop(COLUMNS, element, VECTORIZED, "v")
        if con.n % nest.block == 0:
            return whole
        single = loop(COLUMNS, lambda v: when(first + v < con.n, element(v)), name="v")
        return when(first + COLUMNS <= con.n, whole, single)

    return loop(nest.block // COLUMNS, vector, kind, name="j")


def fetcher(
    nest: PairNest, g: Expr, nb: Expr, turn: tuple[Expr, int], steps: int
) -> Callable[[Expr], Stmt] | None:
    """Fetches a part of the next panel in each of ``steps`` steps of a turn, all in all turns."""
    if not nest.ahead:
        return None
    panel, per_line = nest.panel, LINE // 2
    lines = nest.form.depth * nest.block // per_line
    t, turns = turn
    each = -(-lines // (steps * turns))
    base = T.min(t * (steps * each), imm(max(0, lines - steps * each)))
    following = nest.panel_at(g, nb + 1, imm(0))

    def fetch(step: Expr) -> Stmt:
        first = base + step * each
        return seq([prefetch(panel, following + (first + j) * per_line) for j in range(each)])

    return fetch
