"""Attention in one kernel on GPUs: scores stay in registers, whatever the sequence.

A block takes ``bm`` queries of one head and goes over the keys, ``bn`` at a time: products with the
keys in tensor cores, what the graph does to them, powers, products with the values in tensor cores.
The softmax is the online one (Milakov and Gimelshein, 2018; FlashAttention, Dao et al., 2022,
algorithm 1): a row keeps the largest score so far and the sum of its powers, and what was summed up
before is scaled when the largest grows. A warp has 16 queries, and a thread keeps its powers where
tensor cores take them from (FlashAttention-2, Dao, 2023): only keys and values are shared.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.attention_tile import counted
from torch_pruner.codegen.parts.gpu import asynchronous, tensor_core
from torch_pruner.codegen.parts.gpu.attention_tile import (
    F32,
    PAD,
    QUERIES,
    Block,
    copy_keys,
    copy_queries,
)
from torch_pruner.codegen.parts.gpu.grid import WARP, Grid, Registers, Unshared, in_blocks
from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.output import along, output_path
from torch_pruner.codegen.parts.reductions import combine, identity
from torch_pruner.codegen.tir.builders import UNROLLED, Expr, S, Stmt, T, loop, seq
from torch_pruner.codegen.tir.reader import Index, Reader, imm, linear, unlinear
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.graph.attention import attention_of

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
    grid = Grid(att.groups * in_blocks(att.queries, bm), threads, host)
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
        out,
    )  # fmt: skip
    return Emitted(grid.launch(lambda b: _body(block, b)), inputs, [out], scratch)


def _body(block: Block, number: Expr) -> Stmt:
    att, grid, bm, bn = block.att, block.grid, block.bm, block.bn
    group, tile = unlinear(number, (att.groups, in_blocks(att.queries, bm)))
    first, host = tile * bm, grid.host
    turns = in_blocks(att.keys, bn)
    seen = T.min(T.floordiv(first + (bm + bn - 1), bn), imm(turns)) if att.causal else imm(turns)
    group_of_copies = asynchronous.commit(host=host) if block.ahead else None
    arrived = asynchronous.wait(0, host=host) if block.ahead else None

    def begin(tid: Expr) -> Stmt:
        lowest = identity(block.spec.nodes[att.top], F32)
        clear = [store(block.top.buffer, block.top.at(tid, h), lowest) for h in HALVES]
        clear += [store(block.total.buffer, block.total.at(tid, h), _ZERO) for h in HALVES]
        keys = copy_keys(block, group, imm(0), tid) if block.stages > 1 else None
        queries = copy_queries(block, group, first, tid)
        return seq([*clear, _cleared(block.result, tid), queries, keys, group_of_copies])

    def turn(j: Expr) -> Stmt:
        start = j * bn

        def copy(tid: Expr) -> Stmt:
            if block.stages == 1:
                return seq([copy_keys(block, group, j, tid), group_of_copies])
            following = S.IfThenElse(j + 1 < seen, copy_keys(block, group, j + 1, tid), None)
            return seq([following if turns > 1 else None, group_of_copies])

        compute = (
            lambda tid: _score(block, group, first, start, tid),
            Unshared(lambda tid: _powers(block, group, first, start, tid)),
            Unshared(lambda tid: _add(block, j, tid)),
        )
        if block.stages == 1:  # the only turn waits for nobody: nothing was read before it
            copied = grid.phases(copy, first=turns == 1)
            return seq([copied, arrived, grid.phases(*compute, first=False)])
        return seq([arrived, grid.phases(copy, Unshared(compute[0]), *compute[1:], first=False)])

    loops = counted(seen, turn, "turn") if att.causal else loop(turns, turn, name="turn")
    write = grid.phases(lambda tid: _write(block, group, first, tid))
    return seq([grid.phases(begin), loops, write])


_ZERO = T.const(0, F32)


def _cleared(held: Registers, tid: Expr) -> Stmt:
    return loop(held.count, lambda i: store(held.buffer, held.at(tid, i), _ZERO), UNROLLED, "i")


def _of_row(held: Registers, half: int, each: Callable[[Expr], Stmt]) -> Stmt:
    """``each`` for the sums of a warp's tile that a thread has of one of its rows."""
    pair = held.count // 2
    return loop(
        pair, lambda k: each(T.floordiv(k, 2) * 4 + 2 * half + T.floormod(k, 2)), UNROLLED, "i"
    )


def _row(tid: Expr, half: int) -> Expr:
    """The row of a block's queries that a thread has a part of."""
    warp, lane = T.floordiv(tid, WARP), T.floormod(tid, WARP)
    return warp * QUERIES + T.floordiv(lane, 4) + 8 * half


def _score(block: Block, group: Expr, first: Expr, start: Expr, tid: Expr) -> Stmt:
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
    top, widest = spec.nodes[att.top], block.widest
    lowest = identity(top, F32)
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
            joined = combine(top, widest.buffer[largest], masked, F32)
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


def _powers(block: Block, group: Expr, first: Expr, start: Expr, tid: Expr) -> Stmt:
    """Powers in place of scores, their sums, and what was summed up before, shrunk."""
    return seq([_powers_of_row(block, group, first, start, tid, half) for half in HALVES])


def _powers_of_row(
    block: Block, group: Expr, first: Expr, start: Expr, tid: Expr, half: int
) -> Stmt:
    att, spec, reader, products = block.att, block.spec, block.reader, block.products
    node, lane, row = spec.nodes[att.top], T.floormod(tid, WARP), _row(tid, half)
    top, total, result = block.top, block.total, block.result
    before, sums = top.buffer[top.at(tid, half)], total.buffer[total.at(tid, half)]
    shuffles, widest = block.over_quad(
        block.widest, half, tid, lambda a, b: combine(node, a, b, F32)
    )
    lowest, value, factor = identity(node, F32), T.Var("largest", F32), T.Var("factor", F32)

    def shifted(largest: Expr) -> dict[int, Expr]:
        """What powers subtract, for a largest score."""
        found = {}
        for wide in att.spread:
            reader.overrides[att.top] = lambda _: largest
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
        return T.Select(T.EQ(masked, lowest), _ZERO, found)

    def shrunk() -> Expr:
        index = block.full(group, first + row, start)
        old = next(iter(shifted(before).values())) if att.spread else before
        # Of a row of which nothing was seen there is nothing to shrink.
        return T.Select(T.EQ(before, lowest), _ZERO, power(old, index))

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
                S.Bind(found, power(products.buffer[at], index)),
                store(products.buffer, at, found),
                store(total.buffer, total.at(tid, half), sums + found),
            ]

        return reader.scope(emitted)

    return seq(
        [
            *shuffles,
            S.Bind(value, combine(node, before, widest, F32)),
            S.Bind(factor, shrunk()),
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


def _write(block: Block, group: Expr, first: Expr, tid: Expr) -> Stmt:
    """The sums, divided, through the rest of the graph."""
    return seq([_write_row(block, group, first, tid, half) for half in HALVES])


def _write_row(block: Block, group: Expr, first: Expr, tid: Expr, half: int) -> Stmt:
    att, spec, reader, result = block.att, block.spec, block.reader, block.result
    path = output_path(spec, att.out)
    shape, batch = spec.nodes[path[-1]].shape, spec.nodes[att.out].shape[:-2]
    dtype = value_dtype(spec.nodes[att.out].dtype)
    lane, row = T.floormod(tid, WARP), _row(tid, half)
    shuffles, total = block.over_quad(block.total, half, tid, lambda a, b: a + b)
    whole, inverse = T.Var("whole", F32), T.Var("inverse", F32)
    reader.overrides[att.total] = lambda _: whole
    at_row = block.full(group, first + row, imm(0))
    divisor = reader.at(spec.nodes[att.divisor].inputs[0], (*at_row[:-1], imm(0)))
    del reader.overrides[att.total]

    def one(i: Expr) -> Stmt:
        _, column = tensor_core.place(lane, i, block.width)
        at = result.at(tid, i)

        def emitted() -> list[Stmt]:
            reader.overrides[att.out] = lambda _: (result.buffer[at] * inverse).astype(dtype)
            index = along(spec, path, (*unlinear(group, batch), first + row, column))
            found = [store(block.out, linear(index, shape), reader.at(path[-1], index))]
            del reader.overrides[att.out]
            return found

        guards = [first + row < att.queries] if att.queries % block.bm else []
        guards += [column < att.width] if att.width % block.width else []
        body = reader.scope(emitted)
        return S.IfThenElse(T.all(*guards), body, None) if guards else body

    # The result has half the digits that an inverse loses.
    bound = [S.Bind(whole, total), S.Bind(inverse, T.const(1, F32) / divisor)]
    return seq([*shuffles, *bound, _of_row(result, half, one)])
