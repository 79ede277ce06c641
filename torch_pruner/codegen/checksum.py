"""Emits the program that reads a sample of parameters' memory: see ``graph.checksum``.

It belongs to no graph: a table says where to read and where results go. One entry reads on the
thread that calls, the other divides the rows of the plan among threads.
"""

from __future__ import annotations

from typing import Any

from torch_pruner.codegen._tvm import (
    PARALLEL,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    loop,
    prefetch,
    seq,
    stack,
    tvm,
)
from torch_pruner.codegen.values import store
from torch_pruner.graph.checksum import BLOCKS, FIELDS, LANE_KEYS, LINE_KEY, WORDS
from torch_pruner.graph.memory import CHECKSUMS

AHEAD = 16  # lines of a turn: each lies in another page, where no processor looks ahead
_MOST = 1 << 30  # elements that a buffer of unknown length is declared with


def checksum_functions() -> dict[Any, Any]:
    """The entries ``CHECKSUMS`` as functions of the address of a table of four numbers.

    These are the address of the plan, its rows, the turn, and the address of the results.
    """
    kinds = zip(CHECKSUMS, (SERIAL, PARALLEL), strict=True)
    return {tvm.ir.GlobalVar(name): _function(name, kind) for name, kind in kinds}


def _function(name: str, kind: Any) -> Any:
    address = T.Var("table", "int64")
    begin: list[Stmt] = []

    def pointed(value: Expr, dtype: str, name: str) -> Any:
        pointer = tvm.ir.PointerType(tvm.ir.PrimType(dtype), "global")
        var = T.Var(f"{name}_ptr", pointer)
        cast = tvm.ir.Call(tvm.ir.Op.get("tirx.reinterpret"), [value], ret_ty=pointer)
        declared = T.decl_buffer((_MOST,), dtype, name, data=var)
        begin.extend([S.Bind(var, cast), S.DeclBuffer(declared, data=var)])
        return declared

    table = pointed(address, "int64", "given")
    plan = pointed(table[0], "int64", "plan")
    results = pointed(table[3], "uint64", "results")
    rows, phase = T.Var("rows", "int32"), T.Var("phase", "int64")
    begin += [S.Bind(rows, table[1].astype("int32")), S.Bind(phase, table[2])]
    p = T.Var("p", "int32")
    body = seq([*begin, S.For(p, 0, rows, kind, _row(plan, results, p, phase))])
    return T.PrimFunc([address], body).with_attr({"global_symbol": name})


def _row(plan: Any, results: Any, p: Expr, phase: Expr) -> Stmt:
    pointer = tvm.ir.PointerType(tvm.ir.PrimType("uint64"), "global")
    memory_ptr = T.Var("memory_ptr", pointer)
    memory = T.decl_buffer((_MOST,), "uint64", "memory", data=memory_ptr)
    words, distance, line, end = (T.Var(n, "int64") for n in ("words", "gap", "line", "lines"))
    acc = buffer(WORDS, "uint64", "acc", scope="local")
    keys = buffer(WORDS, "uint64", "keys", scope="local")
    field = p * FIELDS
    cast = tvm.ir.Call(tvm.ir.Op.get("tirx.reinterpret"), [plan[field]], ret_ty=pointer)
    first = plan[field + 3]

    def wide(value: int) -> Expr:
        return T.const(value, "uint64")

    def each(body: Any) -> Stmt:
        return loop(WORDS, body, VECTORIZED, "v")

    i = T.Var("i", "int64")
    at = T.Var("at", "int64")

    def word(v: Expr) -> Stmt:
        key = line.astype("uint64") * wide(LINE_KEY) + keys[v]
        mixed = T.bitwise_xor(memory[at + v.astype("int64")], key)
        product = T.bitwise_and(mixed, wide(0xFFFFFFFF)) * T.shift_right(mixed, wide(32))
        return store(acc, v, acc[v] + product + mixed)

    body = seq(
        [
            S.Bind(line, (first + i) * distance + T.floormod(phase, distance)),
            S.Bind(at, T.min(line * WORDS, words - WORDS)),
            prefetch(memory, (line + distance * AHEAD) * WORDS),
            each(word),
        ]
    )
    count = T.floordiv(end - T.floormod(phase, distance) + distance - 1, distance) - first
    lines = S.For(i, T.const(0, "int64"), T.min(count, T.const(BLOCKS, "int64")), SERIAL, body)
    total: Expr = wide(0)
    for v, key in enumerate(LANE_KEYS):
        total = total + acc[v] * wide(key)
    return seq(
        [
            S.Bind(memory_ptr, cast),
            S.DeclBuffer(memory, data=memory_ptr),
            S.Bind(words, plan[field + 1]),
            S.Bind(distance, plan[field + 2]),
            S.Bind(end, T.floordiv(words + (WORDS - 1), T.const(WORDS, "int64"))),
            stack(acc),
            stack(keys),
            loop(WORDS, lambda v: store(acc, v, wide(0)), UNROLLED, "v"),
            seq([store(keys, T.const(v, "int32"), wide(k)) for v, k in enumerate(LANE_KEYS)]),
            lines,
            store(results, p, total),
        ]
    )
