"""Attention in one kernel on GPUs: scores stay in a block's shared memory, whatever the sequence.

A block takes ``bm`` queries of one head and goes over the keys, ``bn`` at a time: products with the
keys in tensor cores, what the graph does to them, powers, products with the values in tensor cores.
The softmax is the online one (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022,
algorithm 1): a row keeps the largest score so far and the sum of its powers, and what was summed up
before is scaled when the largest grows. A warp has 16 queries; two threads share a row of scores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.attention_tile import counted
from torch_pruner.codegen.parts.gpu import tensor_core
from torch_pruner.codegen.parts.gpu.attention_tile import (
    F32,
    PAD,
    QUERIES,
    SHARES,
    Block,
    copy_keys,
    copy_queries,
)
from torch_pruner.codegen.parts.gpu.grid import WARP, Grid, in_blocks
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.parts.reductions import combine, identity
from torch_pruner.codegen.tir.builders import UNROLLED, Expr, S, Stmt, T, loop, seq
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.graph.attention import attention_of

if TYPE_CHECKING:
    from torch_pruner.families.gpu_attention.form import GpuAttentionDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


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
    bm, bn = decisions.bm, decisions.bn
    depth, width = in_blocks(att.depth, 16) * 16, in_blocks(att.width, 8) * 8
    threads = bm // QUERIES * WARP
    grid = Grid(att.groups * in_blocks(att.queries, bm), threads, host)
    dtype = spec.nodes[spec.nodes[att.out].inputs[1]].dtype
    held = "uint16" if dtype == "bfloat16" else dtype
    block = Block(
        spec, att, Reader(spec, dict(zip(spec.inputs, inputs, strict=True))), grid, bm, bn,
        depth, width,
        grid.shared(bm * (depth + PAD), held, "query"),
        grid.shared(bn * (depth + PAD), held, "key"),
        grid.shared(bn * (width + PAD), held, "value"),
        grid.shared(bm * (bn + PAD), held, "power"),
        grid.shared(bm * (bn + SHARES), F32, "score"),
        grid.shared(2 * bm, F32, "top"),
        grid.shared(bm, F32, "total"),
        grid.shared(bm, F32, "factor"),
        grid.shared(threads, F32, "widest"),
        grid.shared(threads, F32, "added"),
        grid.registers(bm * bn // threads, F32, "products"),
        grid.registers(bm * width // threads, F32, "result"),
        grid.registers(1, F32, "own"),
        out,
    )  # fmt: skip
    return Emitted(grid.launch(lambda b: _body(block, b)), inputs, [out], scratch)


def _body(block: Block, number: Expr) -> Stmt:
    att, grid, bm, bn = block.att, block.grid, block.bm, block.bn
    group, tile = unlinear(number, (att.groups, in_blocks(att.queries, bm)))
    first = tile * bm
    turns = in_blocks(att.keys, bn)

    def begin(tid: Expr) -> Stmt:
        row = tid < bm
        clear = seq(
            [
                store(block.top, tid, identity(block.spec.nodes[att.top], F32)),
                store(block.total, tid, T.const(0, F32)),
            ]
        )
        empty = loop(
            block.result.count,
            lambda i: store(block.result.buffer, block.result.at(tid, i), T.const(0, F32)),
            UNROLLED,
            "i",
        )
        return seq([S.IfThenElse(row, clear, None), empty, copy_queries(block, group, first, tid)])

    def turn(j: Expr) -> Stmt:
        start = j * bn
        return grid.phases(
            lambda tid: copy_keys(block, group, start, tid),
            lambda tid: _score(block, group, first, start, tid),
            lambda tid: _widest(block, tid),
            lambda tid: _powers(block, group, first, start, j, tid),
            lambda tid: _add(block, tid),
            first=False,
        )

    if att.causal:
        seen = T.floordiv(first + (bm + bn - 1), bn)
        loops = counted(T.min(seen, imm(turns)), turn, "turn")
    else:
        loops = loop(turns, turn, name="turn")
    write = grid.phases(lambda tid: _write(block, group, first, tid), first=False)
    return seq([grid.phases(begin), loops, write])


def _score(block: Block, group: Expr, first: Expr, start: Expr, tid: Expr) -> Stmt:
    """A warp's products with the keys, and what the softmax is taken of, to shared memory."""
    att, spec, products = block.att, block.spec, block.products
    warp, lane = T.floordiv(tid, WARP), T.floormod(tid, WARP)
    line = block.depth + PAD
    clear = loop(
        products.count,
        lambda i: store(products.buffer, products.at(tid, i), T.const(0, F32)),
        UNROLLED,
        "i",
    )
    multiply = tensor_core.multiply(
        lambda i: products.at(tid, i),
        products.buffer,
        (block.query, warp * (QUERIES * line), line),
        (block.key, imm(0), line),
        (QUERIES, block.bn, block.depth),
        columns_first=True,
        tid=tid,
        host=block.grid.host,
    )
    lowest = identity(spec.nodes[att.top], F32)
    dtype = value_dtype(spec.nodes[att.scores].dtype)

    def one(i: Expr) -> Stmt:
        row, column = tensor_core.place(lane, i, block.bn)
        row = warp * QUERIES + row
        at = products.at(tid, i)

        def emitted() -> list[Stmt]:
            block.reader.overrides[att.scores] = lambda _: products.buffer[at].astype(dtype)
            index = block.full(group, first + row, start + column)
            value = block.reader.at(att.masked, index)
            if att.keys % block.bn:
                value = T.Select(start + column < att.keys, value, lowest)
            return [store(block.score, row * block.line + column, value)]

        stmt = block.reader.scope(emitted)
        del block.reader.overrides[att.scores]
        return stmt

    return seq([clear, multiply, loop(products.count, one, UNROLLED, "i")])


def _shared_row(tid: Expr) -> tuple[Expr, Expr]:
    """(row, share) of a thread."""
    return T.floordiv(tid, SHARES), T.floormod(tid, SHARES)


def _widest(block: Block, tid: Expr) -> Stmt:
    """The largest score of a thread's share of a row."""
    row, share = _shared_row(tid)
    node, own, at = block.spec.nodes[block.att.top], block.own, block.own.at(tid, 0)

    def each(i: Expr) -> Stmt:
        value = block.score[row * block.line + share + i * SHARES]
        return store(own.buffer, at, combine(node, own.buffer[at], value, F32))

    return seq(
        [
            store(own.buffer, at, identity(node, F32)),
            loop(block.bn // SHARES, each, name="i"),
            store(block.widest, tid, own.buffer[at]),
        ]
    )


def _powers(block: Block, group: Expr, first: Expr, start: Expr, turn: Expr, tid: Expr) -> Stmt:
    """Powers of a thread's share of a row, their sum, and how much what was before shrinks."""
    att, spec, reader, own = block.att, block.spec, block.reader, block.own
    row, share = _shared_row(tid)
    at, node = own.at(tid, 0), spec.nodes[att.top]
    side = T.floormod(turn, 2) * block.bm
    old, other = block.top[side + row], imm(block.bm) - side + row
    new: Expr = old
    for k in range(SHARES):
        new = combine(node, new, block.widest[row * SHARES + k], F32)
    lowest = identity(node, F32)
    value = T.Var("largest", F32)

    def shifted(top: Expr) -> dict[int, Expr]:
        """What powers subtract, for a largest score."""
        found = {}
        for wide in att.spread:
            reader.overrides[att.top] = lambda _: top
            index = block.full(group, first + row, imm(0))
            found[wide] = reader.at(spec.nodes[wide].inputs[0], (*index[:-1], imm(0)))
            del reader.overrides[att.top]
        return found

    def power(masked: Expr, index: Index) -> Expr:
        reader.overrides[att.masked] = lambda _: masked
        for wide, by in shifted(value).items():
            reader.overrides[wide] = lambda _, by=by: by  # type: ignore[misc]
        found = reader.at(att.powers, index)
        for wide in (att.masked, *att.spread):
            del reader.overrides[wide]
        # Where nothing was seen yet the largest is no number to subtract.
        return T.Select(T.EQ(masked, lowest), T.const(0, F32), found)

    def shrink() -> Stmt:
        index = block.full(group, first + row, start)
        before = next(iter(shifted(old).values())) if att.spread else old
        scale = T.Select(
            T.EQ(block.total[row], T.const(0, F32)), T.const(0, F32), power(before, index)
        )
        return seq([store(block.top, other, value), store(block.factor, row, scale)])

    def each(i: Expr) -> Stmt:
        column = share + i * SHARES
        index = block.full(group, first + row, start + column)

        def emitted() -> list[Stmt]:
            found = T.Var("power", F32)
            masked = block.score[row * block.line + column]
            return [
                S.Bind(found, power(masked, index)),
                store(block.power, row * (block.bn + PAD) + column, _narrow(block, found)),
                store(own.buffer, at, own.buffer[at] + found),
            ]

        return reader.scope(emitted)

    return seq(
        [
            S.Bind(value, new),
            S.IfThenElse(T.EQ(share, imm(0)), shrink(), None),
            store(own.buffer, at, T.const(0, F32)),
            loop(block.bn // SHARES, each, name="i"),
            store(block.added, tid, own.buffer[at]),
        ]
    )


def _narrow(block: Block, value: Expr) -> Expr:
    """A power as tensor cores take it (bfloat16 is rounded by the store)."""
    dtype = str(block.power.dtype)
    return value if dtype == "uint16" else value.astype(dtype)


def _add(block: Block, tid: Expr) -> Stmt:
    """Totals, and the products of a turn's powers with its values, added to what was before."""
    result = block.result
    row, share = _shared_row(tid)
    sums = block.total[row] * block.factor[row]
    for k in range(SHARES):
        sums = sums + block.added[row * SHARES + k]
    warp, lane = T.floordiv(tid, WARP), T.floormod(tid, WARP)
    line = block.bn + PAD

    def shrink(i: Expr) -> Stmt:
        here, _ = tensor_core.place(lane, i, block.width)
        at = result.at(tid, i)
        factor = block.factor[warp * QUERIES + here]
        return store(result.buffer, at, result.buffer[at] * factor)

    multiply = tensor_core.multiply(
        lambda i: result.at(tid, i),
        result.buffer,
        (block.power, warp * (QUERIES * line), line),
        (block.value, imm(0), block.width + PAD),
        (QUERIES, block.width, block.bn),
        columns_first=False,
        tid=tid,
        host=block.grid.host,
    )
    total = S.IfThenElse(T.EQ(share, imm(0)), store(block.total, row, sums), None)
    return seq([total, loop(result.count, shrink, UNROLLED, "i"), multiply])


def _write(block: Block, group: Expr, first: Expr, tid: Expr) -> Stmt:
    """The sums, divided, through the rest of the graph."""
    att, spec, reader, result = block.att, block.spec, block.reader, block.result
    path = output_path(spec, att.out)
    shape, batch = spec.nodes[path[-1]].shape, spec.nodes[att.out].shape[:-2]
    dtype = value_dtype(spec.nodes[att.out].dtype)
    warp, lane = T.floordiv(tid, WARP), T.floormod(tid, WARP)

    def one(i: Expr) -> Stmt:
        row, column = tensor_core.place(lane, i, block.width)
        row = warp * QUERIES + row
        at = result.at(tid, i)

        def emitted() -> list[Stmt]:
            reader.overrides[att.total] = lambda _: block.total[row]
            whole = block.full(group, first + row, imm(0))
            divisor = reader.at(spec.nodes[att.divisor].inputs[0], (*whole[:-1], imm(0)))
            del reader.overrides[att.total]
            reader.overrides[att.out] = lambda _: (result.buffer[at] / divisor).astype(dtype)
            index = along(spec, path, (*unlinear(group, batch), first + row, column))
            found = [store(block.out, linear(index, shape), reader.at(path[-1], index))]
            del reader.overrides[att.out]
            return found

        guards = [first + row < att.queries] if att.queries % block.bm else []
        guards += [column < att.width] if att.width % block.width else []
        body = reader.scope(emitted)
        return S.IfThenElse(T.all(*guards), body, None) if guards else body

    return loop(result.count, one, UNROLLED, "i")
