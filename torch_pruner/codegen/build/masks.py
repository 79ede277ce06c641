"""Emits the program that draws masks of dropout: torch's own random numbers, in vectors.

Eager draws one number after another, which takes one thread 7 ns for each element of a mask. The
numbers come from MT19937 (M. Matsumoto and T. Nishimura, "Mersenne Twister: A 623-dimensionally
equidistributed uniform pseudo-random number generator", 1998): 624 words of state, all renewed at
once, which vectors do as well. Two words make an integer, the lower 21 bits of the first in front
of the second; an element is whether that lies below a limit. It belongs to no graph: a table says
what to draw.

Table: the addresses of the state (64 bits for each word, of which the lower 32 count) and of the
mask, then the fields of ``graph.masks.Draw``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.build.addresses import Reads
from torch_pruner.codegen.tir.builders import (
    SERIAL,
    VECTORIZED,
    Buffer,
    Expr,
    GlobalVar,
    PrimFunc,
    S,
    Stmt,
    T,
    buffer,
    imm,
    loop,
    seq,
    stack,
    when,
)
from torch_pruner.codegen.tir.values import store
from torch_pruner.graph.masks import AHEAD, WORDS
from torch_pruner.graph.memory import MASKS

if TYPE_CHECKING:
    from collections.abc import Callable

_LANES = 8
_PAIRS = WORDS // 2
_UPPER, _LOWER, _TWIST = 0x80000000, 0x7FFFFFFF, 0x9908B0DF
_HIGH_BITS = (1 << 21) - 1  # of the first word of a pair


def mask_functions() -> dict[GlobalVar, PrimFunc]:
    """The entry ``MASKS`` as a function of the address of a table (see the module)."""
    address, reads = T.Var("table", "int64"), Reads()
    table = reads.at(address, "int64", "given")
    names = ("state", "mask", "next", "unread", "begun", "renewals", "rest", "high", "low")
    given = {n: reads.bind(table[k], n) for k, n in enumerate(names)}
    kept = reads.at(given["state"], "uint64", "kept")
    mask = reads.at(given["mask"], "uint8", "drawn")
    limits = given["high"].astype("uint32"), given["low"].astype("uint32")
    state = buffer(WORDS, "uint32", "state", scope="local")
    words = buffer(WORDS + 2, "uint32", "words", scope="local")  # one may be left from before
    left = T.truncmod(given["unread"], _int(2))
    i, b = T.Var("i", "int64"), T.Var("b", "int64")

    def renewal(number: Expr) -> Stmt:
        first = given["begun"] + number * _PAIRS
        last = T.EQ(number + 1, given["renewals"])
        count = T.if_then_else(last, given["rest"], _int(_PAIRS))
        return seq(
            [
                _renewed(state),
                _tempered(state, words, left),
                _elements(words, mask, first, count, limits),
                store(words, imm(0), words[imm(WORDS)]),
            ]
        )

    own = store(words, i, _temper(state[given["next"] + i]))
    carried = store(words, imm(0), words[given["unread"] - 1])
    body = seq(
        [
            *reads.stmts,
            stack(state),
            stack(words),
            loop(WORDS, lambda k: store(state, k, kept[k].astype("uint32")), name="k"),
            S.For(i, _int(0), given["unread"], SERIAL, own),
            _elements(words, mask, _int(0), given["begun"], limits),
            when(left > 0, carried),
            S.For(b, _int(0), given["renewals"], SERIAL, renewal(b)),
            loop(WORDS, lambda k: store(kept, k, state[k].astype("uint64")), name="k"),
        ]
    )
    function = T.PrimFunc([address], body).with_attr({"global_symbol": MASKS})
    return {GlobalVar(MASKS): function}


def _int(value: int) -> Expr:
    return T.const(value, "int64")


def _word(value: int) -> Expr:
    return T.const(value, "uint32")


def _vectors(first: int, last: int, body: Callable[[Expr], Stmt]) -> Stmt:
    """``body`` for each number from ``first`` up to ``last``, in vectors and then one by one."""
    whole, rest = divmod(last - first, _LANES)

    def vector(j: Expr) -> Stmt:
        return loop(_LANES, lambda v: body(j * _LANES + first + v), VECTORIZED, "v")

    done = first + whole * _LANES
    return seq(
        [
            loop(whole, vector, name="j"),
            loop(rest, lambda k: body(k + done), name="k") if rest else None,
        ]
    )


def _renewed(state: Buffer) -> Stmt:
    """The next words of the state, in its place: what a vector reads ahead was not yet written."""

    def word(k: Expr, ahead: Expr, behind: Expr) -> Stmt:
        mixed = T.bitwise_or(
            T.bitwise_and(state[k], _word(_UPPER)), T.bitwise_and(state[ahead], _word(_LOWER))
        )
        odd = T.EQ(T.bitwise_and(state[ahead], _word(1)), _word(1))
        more = T.Select(odd, _word(_TWIST), _word(0))
        twisted = T.bitwise_xor(T.shift_right(mixed, _word(1)), more)
        return store(state, k, T.bitwise_xor(state[behind], twisted))

    before = WORDS - AHEAD
    return seq(
        [
            _vectors(0, before, lambda k: word(k, k + 1, k + AHEAD)),
            _vectors(before, WORDS - 1, lambda k: word(k, k + 1, k - before)),
            word(imm(WORDS - 1), imm(0), imm(AHEAD - 1)),
        ]
    )


def _temper(word: Expr) -> Expr:
    y = T.bitwise_xor(word, T.shift_right(word, _word(11)))
    y = T.bitwise_xor(y, T.bitwise_and(T.shift_left(y, _word(7)), _word(0x9D2C5680)))
    y = T.bitwise_xor(y, T.bitwise_and(T.shift_left(y, _word(15)), _word(0xEFC60000)))
    return T.bitwise_xor(y, T.shift_right(y, _word(18)))


def _tempered(state: Buffer, words: Buffer, left: Expr) -> Stmt:
    """The words that the state makes, behind what is ``left`` from before."""
    shift = left.astype("int32")
    return _vectors(0, WORDS, lambda k: store(words, k + shift, _temper(state[k])))


def _elements(
    words: Buffer, mask: Buffer, first: Expr, count: Expr, limits: tuple[Expr, Expr]
) -> Stmt:
    """``count`` elements of pairs of words, from element ``first`` on."""
    k = T.Var("k", "int64")
    upper, lower = T.bitwise_and(words[k * 2], _word(_HIGH_BITS)), words[k * 2 + 1]
    below = T.bitwise_or(
        (upper < limits[0]).astype("uint8"),
        T.bitwise_and(T.EQ(upper, limits[0]).astype("uint8"), (lower < limits[1]).astype("uint8")),
    )
    return S.For(k, _int(0), count, SERIAL, store(mask, first + k, below))
