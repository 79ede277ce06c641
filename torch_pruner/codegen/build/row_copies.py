"""Emits the program that copies rows of tensors, on all threads; the lengths are known at run time.

What a cache promises that grows by a token: its rows one behind the other, as eager lays them out.
It belongs to no graph: a table says what to copy. No row may overlap another's target.

Table: how many pieces the rows of each tensor are divided into, how many tensors there are, and for
each of them ``FIELDS`` numbers: addresses of the first target and the first source, bytes from one
to the next of both, rows, bytes of a row.
"""

from __future__ import annotations

from torch_pruner.codegen.build.addresses import Reads
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    Expr,
    GlobalVar,
    PrimFunc,
    S,
    T,
    as_pointer,
    seq,
)
from torch_pruner.graph.memory import COPIES

FIELDS = 6


def copy_functions() -> dict[GlobalVar, PrimFunc]:
    """The entry ``COPIES`` as a function of the address of a table (see the module)."""
    address, reads = T.Var("table", "int64"), Reads()
    table = reads.at(address, "int64", "given")
    pieces, tensors = reads.bind(table[0], "pieces"), reads.bind(table[1], "tensors")
    count = T.Var("count32", "int32")
    reads.stmts.append(S.Bind(count, pieces.astype("int32")))
    p, t, r = T.Var("p", "int32"), T.Var("t", "int64"), T.Var("r", "int64")
    tensor, piece = Reads(), p.astype("int64")
    fields = tensor.at(address + (2 + t * FIELDS) * 8, "int64", "tensor")
    names = ("target", "source", "target_step", "source_step", "rows", "bytes")
    target, source, target_step, source_step, rows, nbytes = (
        tensor.bind(fields[k], name) for k, name in enumerate(names)
    )

    def begin(number: Expr) -> Expr:
        return T.truncdiv(rows * number, pieces)

    first = tensor.bind(begin(piece), "first")
    last = tensor.bind(begin(piece + 1), "last")
    places = (target + r * target_step, source + r * source_step)
    pointers = (as_pointer(place, "uint8") for place in places)
    copy = S.Evaluate(T.call_extern("handle", "memcpy", *pointers, nbytes))
    body = seq([*tensor.stmts, S.For(r, first, last - first, SERIAL, copy)])
    each = S.For(t, T.const(0, "int64"), tensors, SERIAL, body)
    whole = seq([*reads.stmts, S.For(p, 0, count, PARALLEL, each)])
    function = T.PrimFunc([address], whole).with_attr({"global_symbol": COPIES})
    return {GlobalVar(COPIES): function}
