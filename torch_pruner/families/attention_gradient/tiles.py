"""Register tiles of attention's gradient: weights and their gradient, and the sums they lead to."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.attention_tile import counted, in_blocks
from torch_pruner.codegen.parts.pair_words import WORD, added, both
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    Stmt,
    T,
    buffer,
    loop,
    seq,
    stack,
    vector,
    when,
)
from torch_pruner.codegen.tir.reader import Index, imm
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.attention_gradient.nest import F32, Nest, Part
from torch_pruner.families.attention_gradient.pairs import rounded, words_of_keys

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.attention_gradient.form import Columns

    Put = Callable[[Expr, Expr, Expr, Expr], Stmt]  # by key, vector, lane and value
    Steps = Callable[[Callable[[Index], Stmt]], Stmt]  # loops around one step of sums


def weights(nest: Nest) -> Stmt:
    """Weights of the tile and the gradient of its scores, for all keys of the block it sees."""

    def of_keys(key: Expr, some: int) -> Stmt:
        def of_panel(panel: Expr, many: int) -> Stmt:
            return _weights_and_changes(nest, (key, some), (panel, many))

        return _over_panels(nest.vectors, nest.nv, of_panel)

    made = _over_keys(nest, of_keys)
    return seq([made, words_of_keys(nest, _made(nest))]) if nest.pairs else made


def _over_panels(extent: int, each: int, body: Callable[[Expr, int], Stmt]) -> Stmt:
    """``body(panel, many)`` for panels that have ``each`` of ``extent`` vectors or queries, the
    last what is left."""
    whole, rest = divmod(extent, each)
    parts = [loop(whole, lambda p: body(p, each), name="panel")] if whole else []
    return seq([*parts, body(imm(whole), rest) if rest else None])


def gradients(nest: Nest) -> Stmt:
    """What the tile adds to the gradients of keys and values, and of its queries."""
    plan = nest.plan
    pairs = (
        (nest.into_values, plan.grads, nest.powers, nest.grads),
        (nest.into_keys, plan.queries, nest.changes, nest.queries),
    )

    def of_keys(key: Expr, some: int) -> Stmt:
        def tile(slot: Expr, many: int, pair: tuple[Part, Columns, Part, Part]) -> Stmt:
            return _into_keys(nest, (key, some), (slot, many), *pair)

        return seq([in_blocks(pair[1].slots, nest.nc, partial(tile, pair=pair)) for pair in pairs])

    def of_slots(slot: Expr, many: int) -> Stmt:
        def of_panel(panel: Expr, rows: int) -> Stmt:
            def tile(row: Expr, some: int) -> Stmt:
                return _into_queries(nest, panel, (row, some), (slot, many))

            return in_blocks(rows, nest.tr, tile)

        return _over_panels(nest.rows, plan.panel, of_panel)

    return seq([_over_keys(nest, of_keys), in_blocks(plan.keys.slots, nest.nc, of_slots)])


def _seen(nest: Nest) -> Expr | None:
    """Keys of the block that some query of the tile sees, None for all; at least one."""
    if not nest.plan.found.causal:
        return None
    return T.min(nest.first + nest.rows - nest.start, nest.count)


def _whole(nest: Nest) -> Expr:
    """Register tiles of ``tm`` keys."""
    whole = T.floordiv(nest.count, imm(nest.tm))
    seen = _seen(nest)
    if seen is None:
        return whole
    return T.min(T.floordiv(seen + (nest.tm - 1), imm(nest.tm)), whole)


def _rest(nest: Nest) -> tuple[int, Expr | None]:
    """Keys behind the last whole register tile, and whether the tile sees them (None: it does)."""
    found, plan = nest.plan.found, nest.plan
    rest = found.keys % nest.tm if plan.blocks > 1 else plan.kb % nest.tm
    conditions = [] if plan.blocks == 1 else [nest.start + plan.kb >= found.keys]
    if found.causal:
        conditions.append(nest.first + nest.rows > found.keys - rest)
    return rest, T.all(*conditions) if conditions else None


def _over_keys(nest: Nest, body: Callable[[Expr, int], Stmt]) -> Stmt:
    """``body(key, some)`` for register tiles of the block's keys."""
    parts = [counted(_whole(nest), lambda t: body(t * nest.tm, nest.tm), "key")]
    rest, condition = _rest(nest)
    if rest:
        first = T.floordiv(nest.count, imm(nest.tm)) * nest.tm
        last = body(first, rest)
        parts.append(last if condition is None else when(condition, last))
    return seq(parts)


def _made(nest: Nest) -> Expr:
    """Keys whose weights ``weights`` made."""
    rest, condition = _rest(nest)
    whole = _whole(nest) * nest.tm
    if not rest:
        return whole
    return whole + (rest if condition is None else T.Select(condition, imm(rest), imm(0)))


def _sums(
    tile: tuple[int, int, int],
    steps: Steps,
    left: Callable[[Expr, Index], Expr],
    right: Callable[[Index, Expr], tuple[Buffer, Expr]],
    finish: Callable[[Expr, Expr, Expr, Expr], Stmt],
) -> Stmt:
    """A register tile of ``(rows, vectors, lanes)``: sums over ``steps`` of ``left(i, k)`` times
    the vector at ``right(k, j)``, numbers or words of them. ``finish`` gets row, vector, lane and
    the sum."""
    some, many, lanes = tile
    acc = buffer(some * many * lanes, "float32", "acc", scope="local")
    zero = T.const(0, "float32")

    def each(body: Callable[[Expr, Expr, Expr, Expr], Stmt]) -> Stmt:
        def vector(i: Expr, j: Expr) -> Stmt:
            at = (i * many + j) * lanes
            return loop(lanes, lambda v: body(i, j, v, at + v), VECTORIZED, "v")

        def row(i: Expr) -> Stmt:
            return loop(many, lambda j: vector(i, j), UNROLLED, "j")

        return loop(some, row, UNROLLED, "i")

    def step(k: Index) -> Stmt:
        def words_of(i: Expr, j: Expr) -> Stmt:
            source, at = right(k, j)
            return added(acc, (i * many + j) * lanes, left(i, k), source[vector(at, lanes)])

        def number(i: Expr, j: Expr, v: Expr, at: Expr) -> Stmt:
            source, first = right(k, j)
            return store(acc, at, acc[at] + left(i, k) * source[first + v])

        if str(right(k, imm(0))[0].dtype) == WORD:
            return loop(
                some, lambda i: loop(many, lambda j: words_of(i, j), UNROLLED, "j"), UNROLLED, "i"
            )
        return each(number)

    return seq(
        [
            stack(acc),
            each(lambda i, j, v, at: store(acc, at, zero)),
            steps(step),
            each(lambda i, j, v, at: finish(i, j, v, acc[at])),
        ]
    )


def _weights_and_changes(nest: Nest, keys: tuple[Expr, int], panels: tuple[Expr, int]) -> Stmt:
    """Weights of some keys and vectors of queries, and the gradient of scores, which they are a
    factor of."""
    found, vl = nest.plan.found, nest.vl
    products = (
        (nest.keys, nest.turned_queries, nest.plan.depth),
        (nest.values, nest.turned_grads, nest.plan.width),
    )
    (key, some), (panel, many) = keys, panels

    def place(part: Part, i: Expr, j: Expr, v: Expr) -> Expr:
        return nest.weight_at(part, key + i, panel, j * vl + v)

    def into(part: Part) -> Put:
        return lambda i, j, v, made: store(part.buffer, place(part, i, j, v), made)

    def weight(i: Expr, j: Expr, v: Expr) -> Expr:
        return nest.powers.buffer[place(nest.powers, i, j, v)]

    if not nest.pairs:
        return seq(
            [
                _full_tile(
                    nest, keys, panels, products[0], (found.scores, found.weights), {},
                    into(nest.powers),
                ),
                _full_tile(
                    nest, keys, panels, products[1], (found.along, found.into),
                    {found.weights: weight}, into(nest.changes),
                ),
            ]
        )  # fmt: skip
    # What is multiplied is rounded; the gradient of scores is made of weights as they were.
    held, other = (buffer(some * many * vl, F32, n, scope="local") for n in ("held", "other"))

    def kept(of: Buffer) -> Put:
        return lambda i, j, v, made: store(of, (i * many + j) * vl + v, made)

    return seq(
        [
            stack(held),
            stack(other),
            _full_tile(
                nest, keys, panels, products[0], (found.scores, found.weights), {}, kept(held)
            ),
            _full_tile(
                nest, keys, panels, products[1], (found.along, found.into),
                {found.weights: lambda i, j, v: held[(i * many + j) * vl + v]}, kept(other),
            ),
            rounded(nest, keys, panels, held, nest.powers),
            rounded(nest, keys, panels, other, nest.changes),
        ]
    )  # fmt: skip


def _full_tile(
    nest: Nest,
    keys: tuple[Expr, int],
    panels: tuple[Expr, int],
    operands: tuple[Part, Part, int],
    nodes: tuple[int, int],
    known: dict[int, Callable[[Expr, Expr, Expr], Expr]],
    put: Put,
) -> Stmt:
    """A full node of some keys and the vectors of a panel.

    ``nodes``: its product and itself; ``operands`` are those of the product, and the steps of its
    sums; ``known`` full nodes by key, vector and lane; ``put`` keeps what is made of these.
    """
    reader, task, vl = nest.reader, nest.task, nest.vl
    (key, some), (panel, many) = keys, panels
    (rows, turned, depth), (product, value) = operands, nodes

    def left(i: Expr, k: Index) -> Expr:
        return rows.buffer[rows.of(task) + (key + i) * depth + k[0]]

    def right(k: Index, j: Expr) -> tuple[Buffer, Expr]:
        return turned.buffer, nest.turned_at(turned, depth, k[0], panel, j * vl)

    def finish(i: Expr, j: Expr, v: Expr, total: Expr) -> Stmt:
        lane = panel * nest.plan.panel + j * vl + v

        def emitted() -> list[Stmt]:
            reader.overrides[product] = lambda _: total
            for node, of in known.items():
                reader.overrides[node] = lambda _, of=of: of(i, j, v)  # type: ignore[misc]
            for node, row in nest.spread.items():
                reader.overrides[node] = lambda _, b=row: b[lane]  # type: ignore[misc]
            return [put(i, j, v, reader.at(value, nest.full(key + i, lane)))]

        stmt = reader.scope(emitted)
        for node in known:
            del reader.overrides[node]
        return stmt

    def steps(step: Callable[[Index], Stmt]) -> Stmt:
        return loop(depth, lambda d: step((d,)), name="d")

    return _sums((some, many, vl), steps, left, right, finish)


def _into_keys(
    nest: Nest,
    keys: tuple[Expr, int],
    slots: tuple[Expr, int],
    sums: Part,
    columns: Columns,
    factors: Part,
    rows: Part,
) -> Stmt:
    """Rows of some keys: ``factors`` of the tile's queries times their ``rows``."""
    key, panel = keys[0], nest.plan.panel

    each, lanes = nest.plan.each, nest.plan.lanes // nest.plan.each

    def left(i: Expr, k: Index) -> Expr:
        of, q = k
        at = nest.weight_at(factors, key + i, of, q * each)
        return both(factors.buffer, at) if nest.pairs else factors.buffer[at]

    def right(k: Index, j: Expr) -> tuple[Buffer, Expr]:
        of, q = k
        return rows.buffer, nest.slot_at(rows, columns, lanes, of * (panel // each) + q, slots, j)

    def steps(step: Callable[[Index], Stmt]) -> Stmt:
        def of_panel(of: Expr, count: int) -> Stmt:
            return loop(nest.steps(count), lambda q: step((of, q)), name="q")

        return _over_panels(nest.rows, panel, of_panel)

    return _added(nest, sums, columns, keys, slots, steps, left, right)


def _into_queries(nest: Nest, panel: Expr, rows: tuple[Expr, int], slots: tuple[Expr, int]) -> Stmt:
    """Rows of some queries of a panel: the gradient of scores of the block's keys times these."""
    row, some = rows
    columns, lines, count = nest.plan.keys, nest.lines, nest.steps(_made(nest))
    changes, most = nest.by_keys or nest.changes, nest.steps(nest.plan.kb)

    def left(i: Expr, k: Index) -> Expr:
        return changes.buffer[nest.turned_at(changes, most, k[0], panel, row + i)]

    def right(k: Index, j: Expr) -> tuple[Buffer, Expr]:
        return lines.buffer, nest.slot_at(lines, columns, most, k[0], slots, j)

    def steps(step: Callable[[Index], Stmt]) -> Stmt:
        return counted(count, lambda key: step((key,)), "k")

    first = nest.first + panel * nest.plan.panel + row
    return _added(nest, nest.into_queries, columns, (first, some), slots, steps, left, right)


def _added(
    nest: Nest,
    sums: Part,
    columns: Columns,
    rows: tuple[Expr, int],
    slots: tuple[Expr, int],
    steps: Steps,
    left: Callable[[Expr, Index], Expr],
    right: Callable[[Index, Expr], tuple[Buffer, Expr]],
) -> Stmt:
    """A register tile that is added to ``sums``: begun anew, long sums lose fewer digits."""
    (row, some), (slot, many) = rows, slots

    def place(i: Expr, j: Expr, v: Expr) -> Expr:
        at = (row + i) * columns.wide + (slot + j) * columns.column + v
        return sums.of(nest.task) + at

    return _sums(
        (some, many, columns.column),
        steps,
        left,
        right,
        lambda i, j, v, total: store(
            sums.buffer, place(i, j, v), sums.buffer[place(i, j, v)] + total
        ),
    )
