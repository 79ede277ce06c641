"""Attention in one kernel on GPUs: scores stay in registers, whatever the sequence.

A block takes ``bm`` queries of one head and goes over the keys, ``bn`` at a time: products with the
keys in tensor cores, what the graph does to them, powers, products with the values in tensor cores.
The softmax is the online one (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022,
algorithm 1): a row keeps the largest score so far and the sum of its powers, and what was summed up
before is scaled when the largest grows. A warp has 16 queries, and a thread keeps its powers where
tensor cores take them from (FlashAttention-2, Dao, 2023): only keys and values are shared. Where
there are too few queries for a card, ``split`` blocks share the keys (``parts.py``).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.attention_tile import counted
from torch_pruner.codegen.parts.gpu import asynchronous, tensor_core
from torch_pruner.codegen.parts.gpu.attention_tile import (
    F32,
    PAD,
    QUAD,
    QUERIES,
    Block,
    Parts,
    copy_keys,
    copy_queries,
)
from torch_pruner.codegen.parts.gpu.grid import WARP, Grid, Registers, Unshared, in_blocks
from torch_pruner.codegen.parts.gpu.sweeps import together
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.tir.builders import UNROLLED, VECTORIZED, Expr, S, Stmt, T, loop, seq
from torch_pruner.codegen.tir.reader import Reader, imm, unlinear
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.families.gpu_attention.parts import join, row_at, write_facts
from torch_pruner.families.gpu_attention.softmax import ZERO, Softmax, inverse_of
from torch_pruner.graph.attention import attention_of
from torch_pruner.graph.strided import common_width

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.gpu_attention.form import GpuAttentionDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

HALVES = (0, 1)  # the rows of a warp's tile that a thread has a part of: one, and eight below


def emit(
    spec: Graph,
    decisions: GpuAttentionDecisions[int],
    signature: Signature,
    *,
    host: bool = False,
) -> Emitted:
    """TIR for attention."""
    att = attention_of(spec)
    assert att is not None
    inputs, (out,), scratch = parameters(signature)
    bm, bn, stages = decisions.bm, decisions.bn, decisions.stages
    depth, width = in_blocks(att.depth, 16) * 16, in_blocks(att.width, 8) * 8
    threads = bm // QUERIES * WARP
    groups, tiles = att.groups // decisions.heads, in_blocks(decisions.heads * att.queries, bm)
    grid = Grid(groups * tiles * decisions.split, threads, host)
    dtype = spec.nodes[spec.nodes[att.out].inputs[1]].dtype
    held = "uint16" if dtype == "bfloat16" else dtype
    block = Block(
        spec, att, Reader(spec, dict(zip(spec.inputs, inputs, strict=True))), grid, bm, bn,
        stages, bool(decisions.ahead), depth, width,
        grid.shared(bm * (depth + PAD), held, "query"),
        grid.shared(stages * bn * (depth + PAD), held, "key"),
        grid.shared(stages * bn * (width + PAD), held, "value"),
        grid.registers(bm * bn // threads, F32, "products"),
        grid.registers(bm * width // threads, F32, "result"),
        grid.registers(len(HALVES), F32, "top"),
        grid.registers(len(HALVES), F32, "total"),
        grid.registers(len(HALVES), F32, "widest"),
        out, decisions.heads,
        Parts(scratch[0], scratch[1], decisions.split) if scratch else None,
    )  # fmt: skip
    softmax = Softmax(spec, att, block.reader)
    body = grid.launch(lambda b: _body(block, softmax, b))
    if block.parts is not None:
        body = seq([body, join(softmax, block.parts, out, host=host)])
    return Emitted(body, inputs, [out], scratch)


def _body(block: Block, softmax: Softmax, number: Expr) -> Stmt:
    att, grid, bm, bn = block.att, block.grid, block.bm, block.bn
    split = block.parts.split if block.parts is not None else 1
    group, tile, part = unlinear(
        number, (att.groups // block.heads, in_blocks(block.rows, bm), split)
    )
    first, host = tile * bm, grid.host
    turns = in_blocks(att.keys, bn) // split
    before = part * turns if split > 1 else imm(0)
    last = before + turns if split > 1 else imm(turns)
    if att.causal:  # keys are never shared then
        last = T.min(T.floordiv(first + (bm + bn - 1), bn), imm(turns))
    group_of_copies = asynchronous.commit(host=host) if block.ahead else None
    arrived = asynchronous.wait(0, host=host) if block.ahead else None

    def begin(tid: Expr) -> Stmt:
        clear = [store(block.top.buffer, block.top.at(tid, h), softmax.lowest) for h in HALVES]
        clear += [store(block.total.buffer, block.total.at(tid, h), ZERO) for h in HALVES]
        keys = copy_keys(block, group, before, tid) if block.stages > 1 else None
        queries = copy_queries(block, group, first, tid)
        return seq([*clear, _cleared(block.result, tid), queries, keys, group_of_copies])

    def turn(k: Expr) -> Stmt:
        j = before + k if split > 1 else k
        start = j * bn

        def copy(tid: Expr) -> Stmt:
            if block.stages == 1:
                return seq([copy_keys(block, group, j, tid), group_of_copies])
            following = S.IfThenElse(j + 1 < last, copy_keys(block, group, j + 1, tid), None)
            return seq([following if turns > 1 else None, group_of_copies])

        compute = (
            lambda tid: _score(block, softmax, group, first, start, tid),
            Unshared(lambda tid: _powers(block, softmax, group, first, start, tid)),
            Unshared(lambda tid: _add(block, j, tid)),
        )
        if block.stages == 1:  # the only turn waits for nobody: nothing was read before it
            copied = grid.phases(copy, first=turns == 1)
            return seq([copied, arrived, grid.phases(*compute, first=False)])
        return seq([arrived, grid.phases(copy, Unshared(compute[0]), *compute[1:], first=False)])

    loops = counted(last, turn, "turn") if att.causal else loop(turns, turn, name="turn")
    write = grid.phases(lambda tid: _write(block, softmax, group, first, part, tid))
    return seq([grid.phases(begin), loops, write])


def _cleared(held: Registers, tid: Expr) -> Stmt:
    return loop(held.count, lambda i: store(held.buffer, held.at(tid, i), ZERO), UNROLLED, "i")


def _of_row(held: Registers, half: int, each: Callable[[Expr], Stmt], step: int = 1) -> Stmt:
    """``each`` for the sums of a warp's tile that a thread has of one of its rows; for the first
    of every ``step`` neighbours."""
    near = tensor_core.NEIGHBOURS // step
    pair = held.count // 2 // step

    def one(k: Expr) -> Stmt:
        return each(T.floordiv(k, near) * 4 + 2 * half + T.floormod(k, near) * step)

    return loop(pair, one, UNROLLED, "i")


def _row(tid: Expr, half: int) -> Expr:
    """The row of a block's queries that a thread has a part of."""
    warp, lane = T.floordiv(tid, WARP), T.floormod(tid, WARP)
    return warp * QUERIES + T.floordiv(lane, 4) + 8 * half


def _score(
    block: Block, softmax: Softmax, group: Expr, first: Expr, start: Expr, tid: Expr
) -> Stmt:
    """A warp's products with the keys, what the softmax is taken of, and the largest."""
    att, spec, products = block.att, block.spec, block.products
    warp, lane = T.floordiv(tid, WARP), T.floormod(tid, WARP)
    line, turn = block.depth + PAD, T.floordiv(start, block.bn)
    multiply = tensor_core.multiply(
        lambda i: products.at(tid, i),
        products.buffer,
        (block.query, warp * (QUERIES * line), line),
        (block.key, block.stage(turn, block.depth), line),
        (QUERIES, block.bn, block.depth),
        columns_first=True,
        tid=tid,
        host=block.grid.host,
    )
    widest, lowest = block.widest, softmax.lowest
    dtype = value_dtype(spec.nodes[att.scores].dtype)

    def one(half: int, i: Expr) -> Stmt:
        row, at = _row(tid, half), products.at(tid, i)
        _, column = tensor_core.place(lane, i, block.bn)

        def emitted() -> list[Stmt]:
            block.reader.overrides[att.scores] = lambda _: products.buffer[at].astype(dtype)
            index = block.full(group, first + row, start + column)
            value = block.reader.at(att.masked, index)
            if att.keys % block.bn:
                value = T.Select(start + column < att.keys, value, lowest)
            masked, largest = T.Var("masked", F32), widest.at(tid, half)
            joined = softmax.larger(widest.buffer[largest], masked)
            return [
                S.Bind(masked, value.astype(F32)),
                store(products.buffer, at, masked),
                store(widest.buffer, largest, joined),
            ]

        stmt = block.reader.scope(emitted)
        del block.reader.overrides[att.scores]
        return stmt

    begin = [store(widest.buffer, widest.at(tid, h), lowest) for h in HALVES]
    rows = [_of_row(products, half, partial(one, half)) for half in HALVES]
    return seq([_cleared(products, tid), multiply, *begin, *rows])


def _powers(
    block: Block, softmax: Softmax, group: Expr, first: Expr, start: Expr, tid: Expr
) -> Stmt:
    """Powers in place of scores, their sums, and what was summed up before, shrunk."""
    return seq([_powers_of_row(block, softmax, group, first, start, tid, half) for half in HALVES])


def _powers_of_row(
    block: Block, softmax: Softmax, group: Expr, first: Expr, start: Expr, tid: Expr, half: int
) -> Stmt:
    products, lane, row = block.products, T.floormod(tid, WARP), _row(tid, half)
    top, total, result = block.top, block.total, block.result
    before, sums = top.buffer[top.at(tid, half)], total.buffer[total.at(tid, half)]
    shuffles, widest = block.over_quad(block.widest, half, tid, softmax.larger)
    value, factor = T.Var("largest", F32), T.Var("factor", F32)

    def scale(i: Expr) -> Stmt:
        at = result.at(tid, i)
        return store(result.buffer, at, result.buffer[at] * factor)

    def each(i: Expr) -> Stmt:
        at = products.at(tid, i)
        _, column = tensor_core.place(lane, i, block.bn)
        index = block.full(group, first + row, start + column)

        def emitted() -> list[Stmt]:
            found = T.Var("power", F32)
            return [
                S.Bind(found, softmax.power(products.buffer[at], value, index)),
                store(products.buffer, at, found),
                store(total.buffer, total.at(tid, half), sums + found),
            ]

        return block.reader.scope(emitted)

    shrunk = softmax.shrunk(before, value, block.full(group, first + row, start))
    return seq(
        [
            *shuffles,
            S.Bind(value, softmax.larger(before, widest)),
            S.Bind(factor, shrunk),
            store(top.buffer, top.at(tid, half), value),
            store(total.buffer, total.at(tid, half), sums * factor),
            _of_row(result, half, scale),
            _of_row(products, half, each),
        ]
    )


def _add(block: Block, turn: Expr, tid: Expr) -> Stmt:
    """The products of a turn's powers with its values, added to what was before."""
    result = block.result
    return tensor_core.multiply_sums(
        lambda i: result.at(tid, i),
        result.buffer,
        block.products,
        (block.value, block.stage(turn, block.width), block.width + PAD),
        block.width,
        block.bn,
        tid=tid,
        host=block.grid.host,
    )


def _write(block: Block, softmax: Softmax, group: Expr, first: Expr, part: Expr, tid: Expr) -> Stmt:
    """The sums, divided, through the rest of the graph; or as they are, for ``join``."""
    each = _write_row if block.parts is None else _leave_row
    return seq([each(block, softmax, group, first, part, tid, half) for half in HALVES])


def _write_row(
    block: Block, softmax: Softmax, group: Expr, first: Expr, part: Expr, tid: Expr, half: int
) -> Stmt:
    row, result, width = first + _row(tid, half), block.result, block.att.width
    shuffles, total = block.over_quad(block.total, half, tid, lambda a, b: a + b)
    whole = T.Var("whole", F32)
    bound, inverse = inverse_of(softmax.divisor(whole, block.full(group, row, imm(0))))

    near = common_width(tensor_core.NEIGHBOURS, width)
    near = near if softmax.columns_follow(near) else 1

    def one(i: Expr) -> Stmt:
        _, column = tensor_core.place(T.floormod(tid, WARP), i, block.width)

        def write(v: Expr) -> Stmt:
            value = result.buffer[result.at(tid, i + v)] * inverse
            place = (*block.place(group, row), column + v)
            return softmax.written(block.out, place, value)

        body = loop(near, write, together(block.spec), "v")
        guards = [row < block.rows] if block.rows % block.bm else []
        guards += [column < width] if width % block.width else []
        return S.IfThenElse(T.all(*guards), body, None) if guards else body

    return seq([*shuffles, S.Bind(whole, total), bound, _of_row(result, half, one, near)])


def _leave_row(
    block: Block, softmax: Softmax, group: Expr, first: Expr, part: Expr, tid: Expr, half: int
) -> Stmt:
    row, result, width, parts = first + _row(tid, half), block.result, block.att.width, block.parts
    assert parts is not None
    lane, at = T.floormod(tid, WARP), row_at(softmax.att, part, *block.place(group, row))
    shuffles, total = block.over_quad(block.total, half, tid, lambda a, b: a + b)
    facts = write_facts(parts, at, block.top.buffer[block.top.at(tid, half)], total)

    near = common_width(tensor_core.NEIGHBOURS, width)

    def one(i: Expr) -> Stmt:
        _, column = tensor_core.place(lane, i, block.width)

        def leave(v: Expr) -> Stmt:
            value = result.buffer[result.at(tid, i + v)]
            return store(parts.sums, at * width + column + v, value)

        body = loop(near, leave, VECTORIZED, "v")
        return S.IfThenElse(column < width, body, None) if width % block.width else body

    lead = S.IfThenElse(T.EQ(T.floormod(lane, QUAD), 0), seq(facts), None)
    body = seq([lead, _of_row(result, half, one, near)])
    if block.rows % block.bm:
        body = S.IfThenElse(row < block.rows, body, None)
    return seq([*shuffles, body])
