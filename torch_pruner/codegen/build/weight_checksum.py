"""Emits the program that looks at parameters: a sample of their memory, and what torch knows of it.

See ``graph.checksum``. It belongs to no graph: a table says where to read and where results go. One
entry reads on the thread that calls, the other divides blocks of the plan among threads.

Table, seven numbers: the addresses of the plan's rows, of the blocks, of the facts and of the
results, the number of blocks, the turn, and the address of the words of
``dynamo.implementation.Implementation``.
Blocks are pairs of the first row and the first fact, with one more pair at the end. A fact is
(address of a tensor's implementation, its data pointer, its offset in elements, its version or -1).
Results are a checksum for each block, then for each block 0 if all facts are true.
"""

from __future__ import annotations

from torch_pruner.codegen.build.addresses import Reads
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    ForKind,
    GlobalVar,
    PrimFunc,
    S,
    Stmt,
    T,
    buffer,
    loop,
    prefetch,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.values import store
from torch_pruner.graph.memory import CHECKSUMS
from torch_pruner.graph.weight_checksum import (
    BLOCK_ROWS,
    FACTS,
    FIELDS,
    LANE_KEYS,
    LINE,
    LINE_KEY,
    WORDS,
)

AHEAD = 16  # lines of a turn: each lies in another page, where no processor looks ahead


def checksum_functions() -> dict[GlobalVar, PrimFunc]:
    """The entries ``CHECKSUMS`` as functions of the address of a table (see the module)."""
    kinds = zip(CHECKSUMS, (SERIAL, PARALLEL), strict=True)
    return {GlobalVar(name): _function(name, kind) for name, kind in kinds}


def _int(value: int) -> Expr:
    return T.const(value, "int64")


def _wide(value: int) -> Expr:
    return T.const(value, "uint64")


def _function(name: str, kind: ForKind) -> PrimFunc:
    address = T.Var("table", "int64")
    reads = Reads()
    table = reads.at(address, "int64", "given")
    names = ("rows", "blocks", "facts", "results", "count", "turn", "tensors")
    given = {n: reads.bind(table[k], n) for k, n in enumerate(names)}
    count = T.Var("count32", "int32")
    reads.stmts.append(S.Bind(count, given["count"].astype("int32")))
    p = T.Var("p", "int32")
    body = seq([*reads.stmts, S.For(p, 0, count, kind, _block(given, p.astype("int64")))])
    return T.PrimFunc([address], body).with_attr({"global_symbol": name})


def _block(given: dict[str, Expr], p: Expr) -> Stmt:
    """The checksum of all rows of a block, and whether all its facts are true."""
    reads = Reads()
    blocks = reads.at(given["blocks"], "int64", "blocks_")
    results = reads.at(given["results"], "uint64", "results_")
    bounds = [[reads.bind(blocks[(p + k) * 2 + j], f"b{k}{j}") for k in (0, 1)] for j in (0, 1)]
    acc = buffer(WORDS, "uint64", "acc", scope="local")
    keys = buffer(WORDS, "uint64", "keys", scope="local")
    wrong = buffer(1, "int64", "wrong", scope="local")
    firsts = buffer(BLOCK_ROWS, "int64", "firsts", scope="local")
    q, r, f, h, s = (T.Var(name, "int64") for name in "qrfhs")
    begin, rows = bounds[0][0], bounds[0][1] - bounds[0][0]
    known, tensors = bounds[1][0], bounds[1][1] - bounds[1][0]
    total: Expr = _wide(0)
    for v, key in enumerate(LANE_KEYS):
        total = total + acc[v] * _wide(key)
    one = T.const(0, "int32")
    return seq(
        [
            *reads.stmts,
            stack(acc),
            stack(keys),
            stack(wrong),
            loop(WORDS, lambda v: store(acc, v, _wide(0)), UNROLLED, "v"),
            seq([store(keys, T.const(v, "int32"), _wide(k)) for v, k in enumerate(LANE_KEYS)]),
            store(wrong, one, _int(0)),
            stack(firsts),
            S.For(q, begin, rows, SERIAL, _first(given, q, begin, firsts)),
            S.For(h, known, tensors, SERIAL, _tensor(given, h)),
            S.For(s, known, tensors, SERIAL, _behind(given, s)),
            S.For(r, begin, rows, SERIAL, _row(given, r, begin, firsts, acc, keys)),
            S.For(f, known, tensors, SERIAL, _fact(given, f, wrong)),
            store(results, p, total),
            store(results, p + given["count"], wrong[one].astype("uint64")),
        ]
    )


def _first(given: dict[str, Expr], r: Expr, begin: Expr, firsts: Buffer) -> Stmt:
    """Keeps the address of the first line of row ``r`` in this turn, and fetches it."""
    reads = Reads()
    fields = reads.at(given["rows"] + r * (FIELDS * 8), "int64", "row")
    distance, turn = reads.bind(fields[5], "distance"), given["turn"]
    # A division takes longer than reading the one line that a small span has.
    own = reads.bind(T.if_then_else(turn < distance, turn, T.truncmod(turn, distance)), "own")
    first = reads.bind(fields[0] + own * LINE, "first")
    memory = reads.at(first, "uint64", "memory")
    return seq([*reads.stmts, store(firsts, r - begin, first), prefetch(memory, _int(0))])


def _row(
    given: dict[str, Expr], r: Expr, begin: Expr, firsts: Buffer, acc: Buffer, keys: Buffer
) -> Stmt:
    """Adds the lines of a row that are read in this turn to the lanes."""
    reads = Reads()
    fields = reads.at(given["rows"] + r * (FIELDS * 8), "int64", "row")
    step, last, each, more = (
        reads.bind(fields[1 + k], name) for k, name in enumerate(("step", "last", "each", "more"))
    )
    first = reads.bind(firsts[r - begin], "first")
    own = T.shift_right(first - fields[0], _int(LINE.bit_length() - 1))
    lines = reads.bind(each + T.Select(own < more, _int(1), _int(0)), "lines")
    i = T.Var("i", "int64")
    line = Reads()
    at = line.bind(T.min(first + i * step, last), "at")
    memory = line.at(at, "uint64", "memory")
    later = line.at(at + step * AHEAD, "uint64", "later")
    key = T.Var("key", "uint64")
    line.stmts.append(S.Bind(key, at.astype("uint64") * _wide(LINE_KEY)))

    def word(v: Expr) -> Stmt:
        mixed = T.bitwise_xor(memory[v], key + keys[v])
        product = T.bitwise_and(mixed, _wide(0xFFFFFFFF)) * T.shift_right(mixed, _wide(32))
        return store(acc, v, acc[v] + product + mixed)

    fetch = when(i + AHEAD < lines, prefetch(later, _int(0)))
    body = seq([*line.stmts, fetch, loop(WORDS, word, VECTORIZED, "v")])
    return seq([*reads.stmts, S.For(i, _int(0), lines, SERIAL, body)])


def _tensor(given: dict[str, Expr], h: Expr) -> Stmt:
    """Fetches what torch knows of a tensor."""
    reads = Reads()
    known = reads.at(given["facts"] + h * (FACTS * 8), "int64", "fact")
    impl = reads.at(reads.bind(known[0], "impl"), "int64", "implementation")
    return seq([*reads.stmts, *(prefetch(impl, _int(8 * k)) for k in range(3))])


def _behind(given: dict[str, Expr], s: Expr) -> Stmt:
    """Fetches a tensor's storage and its version counter."""
    reads = Reads()
    known = reads.at(given["facts"] + s * (FACTS * 8), "int64", "fact")
    layout = reads.at(given["tensors"], "int64", "layout")
    impl = reads.bind(known[0], "impl")
    places = [reads.word(impl + layout[k], f"place{k}") for k in (0, 3)]
    fetched = [reads.at(place, "int64", f"behind{k}") for k, place in enumerate(places)]
    return seq([*reads.stmts, *(prefetch(at, _int(2)) for at in fetched)])


def _fact(given: dict[str, Expr], f: Expr, wrong: Buffer) -> Stmt:
    """Notes in ``wrong`` if what is known of a tensor is no longer so."""
    reads = Reads()
    known = reads.at(given["facts"] + f * (FACTS * 8), "int64", "fact")
    layout = reads.at(given["tensors"], "int64", "layout")
    impl = reads.bind(known[0], "impl")
    memory = reads.word(impl + layout[0], "storage")
    data = reads.word(memory + layout[1], "data")
    offset = reads.word(impl + layout[2], "offset")
    asked = reads.bind(known[3], "version_known")
    one = T.const(0, "int32")
    differs = T.bitwise_or(T.bitwise_xor(data, known[1]), T.bitwise_xor(offset, known[2]))
    plain = store(wrong, one, T.bitwise_or(wrong[one], differs))
    counter = Reads()
    place = counter.word(impl + layout[3], "counter")
    version = counter.at(place + layout[4], "uint32", "version")
    moved = T.bitwise_xor(version[0].astype("int64"), asked)
    exact = seq([*counter.stmts, store(wrong, one, T.bitwise_or(wrong[one], moved))])
    # A tensor of inference mode has no counter.
    return seq([*reads.stmts, plain, S.IfThenElse(asked >= 0, exact, None)])
