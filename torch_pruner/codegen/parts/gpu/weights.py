"""How a thread takes weights of a product by itself: as numbers, or as words of several of them.

A piece is ``vl`` neighbours of a column along the reduction, which a thread reads at once and keeps
in registers as they lie, by slots, until it makes floats of some of them, for all rows. The bits of
a word's number are set into the mantissa of a float between one and two, from which one
multiplication and addition makes the weight (``codegen.parts.nibbles`` does alike on CPUs).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.gpu import early
from torch_pruner.codegen.parts.gpu.operands import Moved
from torch_pruner.codegen.parts.operands import second_operand
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    loop,
    seq,
)
from torch_pruner.codegen.tir.values import load, store
from torch_pruner.graph.nibbles import per_word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.codegen.parts.gpu.grid import Grid
    from torch_pruner.codegen.parts.operands import Nest
    from torch_pruner.graph.contraction import Contraction

CHUNK = 8  # numbers of a column of which floats are made at once, at most
MANTISSA, BIAS = 23, 127  # bits of a float32, and of its exponent


class Weights(ABC):
    """Pieces of weights in registers. ``tid``: a thread of the block."""

    def __init__(self, con: Contraction, grid: Grid, vl: int, columns: int) -> None:
        self._con, self._vl = con, vl
        self.chunk = min(vl, CHUNK)
        self.floats = grid.registers(columns * self.chunk, con.acc_dtype, "weights")

    @abstractmethod
    def ask(self, tid: Expr, slot: Expr, g: Expr, column: Expr, k: Expr) -> Stmt:
        """Read the piece of a column from ``k`` on."""

    @abstractmethod
    def ask_early(self, g: Expr, column: Expr, k: Expr) -> Stmt:
        """Have the piece come to the second cache: see ``codegen.parts.gpu.early``."""

    @abstractmethod
    def unpack(self, tid: Expr, slot: Expr, first: Expr, c: Expr) -> Stmt:
        """Make floats of a chunk, from number ``first`` of a piece on: those of column ``c``."""


class Numbers(Weights):
    """Weights of a dtype of their own, where they lie or packed along the reduction."""

    def __init__(self, nest: Nest, grid: Grid, vl: int, columns: int, ahead: int) -> None:
        super().__init__(nest.con, grid, vl, columns)
        self._moved = Moved(nest, nest.con.b, tensor=True, packed=nest.panel is not None)
        self._words = grid.registers(ahead * columns * vl, self._moved.dtype, "words")

    def ask(self, tid: Expr, slot: Expr, g: Expr, column: Expr, k: Expr) -> Stmt:
        words = self._words

        def one(v: Expr) -> Stmt:
            at = words.at(tid, slot * self._vl + v)
            return S.BufferStore(words.buffer, self._lying(g, column, k + v), [at])

        return loop(self._vl, one, VECTORIZED, "v")

    def ask_early(self, g: Expr, column: Expr, k: Expr) -> Stmt:
        return early.ask(self._lying(g, column, k))

    def _lying(self, g: Expr, column: Expr, k: Expr) -> Expr:
        """A weight as it lies in memory."""
        con, nest = self._con, self._moved.nest
        if nest.panel is None:
            return second_operand(nest, g, (k,), column)
        return nest.panel[(g * con.n + column) * con.depth + k]

    def unpack(self, tid: Expr, slot: Expr, first: Expr, c: Expr) -> Stmt:
        words, floats = self._words, self.floats

        def one(v: Expr) -> Stmt:
            number = load(words.buffer, words.at(tid, slot * self._vl + first + v))
            into = floats.at(tid, c * self.chunk + v)
            return store(floats.buffer, into, number.astype(self._con.acc_dtype))

        return loop(self.chunk, one, UNROLLED, "v")


class Words(Weights):
    """Numbers of few bits, several in each word, with a scale for each group of them.

    A piece is within a group.
    """

    def __init__(
        self,
        con: Contraction,
        kind: tuple[int, int],
        operands: Sequence[Buffer],
        grid: Grid,
        vl: int,
        columns: int,
        ahead: int,
    ) -> None:
        """``kind``: bits of a number, and how many a group has. ``operands``: words, scales and
        perhaps offsets, packed along the reduction."""
        super().__init__(con, grid, vl, columns)
        (self._bits, self._group), self._operands = kind, operands
        self._per_word = per_word(self._bits)
        self._each = vl // self._per_word
        self._words = grid.registers(ahead * columns * self._each, "int32", "words")
        # A weight is the float between one and two, times the first, plus the second.
        self._factors = grid.registers(2 * ahead * columns, con.acc_dtype, "factors")

    def ask(self, tid: Expr, slot: Expr, g: Expr, column: Expr, k: Expr) -> Stmt:
        words, factors, depth = self._words, self._factors, self._con.depth
        given, scales, *offsets = self._operands
        first = self._first(column, k)
        of_group = column * -(-depth // self._group) + T.floordiv(k, self._group)

        def one(v: Expr) -> Stmt:
            at = words.at(tid, slot * self._each + v)
            return S.BufferStore(words.buffer, given[first + v], [at])

        step, zero = (factors.at(tid, slot * 2 + n) for n in range(2))
        whole = load(scales, of_group).astype(self._con.acc_dtype) * float(1 << self._bits)
        least = factors.buffer[step] * -1.5  # of the float that stands for 0
        for offset in offsets:
            least = load(offset, of_group).astype(self._con.acc_dtype) + least
        stores = (store(factors.buffer, step, whole), store(factors.buffer, zero, least))
        return seq([loop(self._each, one, VECTORIZED, "v"), *stores])

    def ask_early(self, g: Expr, column: Expr, k: Expr) -> Stmt:
        return early.ask(self._operands[0][self._first(column, k)])

    def _first(self, column: Expr, k: Expr) -> Expr:
        """The word that has weight ``k`` of a column, which is the first in it."""
        return column * (self._con.depth // self._per_word) + T.floordiv(k, self._per_word)

    def unpack(self, tid: Expr, slot: Expr, first: Expr, c: Expr) -> Stmt:
        factors, floats, each = self._factors, self.floats, self._per_word
        step, zero = (factors.buffer[factors.at(tid, slot * 2 + n)] for n in range(2))
        stmts = []
        for v in range(self.chunk):
            at = slot * self._each + T.floordiv(first, each) + v // each
            word = self._words.buffer[self._words.at(tid, at)]
            number = self._between_one_and_two(word, v % each)
            into = floats.at(tid, c * self.chunk + v)
            stmts.append(store(floats.buffer, into, number * step + zero))
        return seq(stmts)

    def _between_one_and_two(self, word: Expr, i: int) -> Expr:
        """One, and number ``i`` of a word above its least as the highest bits of a mantissa."""
        bits = self._bits
        lowest = MANTISSA - bits
        up = lowest - bits * i
        moved = T.shift_left(word, _bits(up)) if up >= 0 else T.shift_right(word, _bits(-up))
        own = T.bitwise_and(moved, _bits(((1 << bits) - 1) << lowest))
        # The sign's bit, turned, is what the least number lacks.
        turned = T.bitwise_xor(own, _bits(BIAS << MANTISSA | 1 << (MANTISSA - 1)))
        return T.reinterpret("float32", turned)


def _bits(value: int) -> Expr:
    return T.const(value, "int32")
