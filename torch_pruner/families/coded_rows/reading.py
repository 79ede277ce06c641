"""Vectors of a coded operand along the reduction, as floats, and the code that makes them.

A step reads a block: both vectors of lower bytes, one of codes and the number of its patch. The
upper bytes of as many numbers as a vector has bytes are one shuffle of the table. Each of the eight
vectors of floats is written as if it were the only one; the compiler makes what they share once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    importing,
    prefetch,
    seq,
    vector,
)
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.families.coded_rows.form import places
from torch_pruner.families.in_place.reading import Reading
from torch_pruner.graph.coded import TABLE, VECTORS

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.operands import Nest
    from torch_pruner.graph.coded import Places

_LINE = 64  # bytes
_NAME = "torch_pruner_coded"
_SHUFFLE = {64: "avx512.pshuf.b.512", 32: "avx2.pshuf.b"}
"""What looks up as many bytes as a vector has, by sixteen bytes each."""


@dataclass(frozen=True, slots=True)
class CodedReading(Reading):
    """A packed operand of ``graph.coded``."""

    coded: Buffer
    at_places: Places

    def at(self, g: Expr, column: Expr, k: Expr) -> Expr:
        raise NotImplementedError("a coded number is never read alone")

    def widen(self, g: Expr, column: Expr, k: Expr, to: Buffer, first: Expr) -> Stmt:
        lanes, at = self.nest.vl, self.at_places
        block = self._block(column, k)
        part = T.floormod(T.floordiv(k, lanes), VECTORS)
        upper = T.floordiv(part, VECTORS // 2)
        start = block * at.block
        patch = self.coded[at.patch + block].astype("int32")
        unit = 2 * lanes  # words of a vector
        low = self.coded[vector(start + upper * unit, unit)]
        codes = self.coded[vector(start + 2 * unit, unit)]
        wrong = self.coded[vector(at.patches + patch * (2 * unit) + upper * unit, unit)]
        table = self.coded[vector(imm(at.table), TABLE // 2)]
        floats = T.call_extern(
            f"float32x{lanes}", f"{_NAME}{lanes}", low, codes, wrong, table, part.astype("int32")
        )
        return S.BufferStore(to, floats, [vector(first, lanes)])

    @property
    def columns_are_neighbours(self) -> bool:
        return True

    def fetch(self, g: Expr, column: Expr, k: Expr, vectors: int, ahead: int) -> Stmt | None:
        at = self.at_places
        first = self._block(column, k) * at.block + ahead // 2
        lines = -(-vectors * at.block * 2 // (VECTORS * _LINE))
        each = [first + j * (_LINE // 2) for j in range(lines)]
        return seq([prefetch(self.coded, place, once=True) for place in each])

    def _block(self, column: Expr, k: Expr) -> Expr:
        return column * self.at_places.each + T.floordiv(k, VECTORS * self.nest.vl)


def coded_reading(nest: Nest, buffers: list[Buffer]) -> CodedReading:
    """How the second operand of a product is read whose ``buffers`` are its inputs."""
    index, at = places(nest.spec, nest.vl)
    return CodedReading(nest, buffers[index], at)


def within(body: Stmt, lanes: int) -> Stmt:
    """``body`` with what it calls."""
    return importing(_source(lanes), body)


def _source(lanes: int) -> str:
    """``float vector = f(lower bytes, codes, patch, table, number of the vector)``."""
    size = 4 * lanes
    words, count = f"<{2 * lanes} x i16>", f"<{size} x i8>"
    look_up = f"llvm.x86.{_SHUFFLE[size]}"
    spread = _mask([i % TABLE for i in range(size)])

    def interleaved(begin: int) -> str:
        pairs = (
            (16 * part + begin + i, size + 16 * part + begin + i)
            for part in range(size // 16)
            for i in range(8)
        )
        return _mask([n for pair in pairs for n in pair])

    return f"""
declare {count} @{look_up}({count}, {count})
define <{lanes} x float> @{_NAME}{lanes}({words} %low, {words} %codes, {words} %wrong,
    <{TABLE // 2} x i16> %given, i32 %part) alwaysinline {{
  %upper = icmp uge i32 %part, {VECTORS // 2}
  %bits = select i1 %upper, i16 4, i16 0
  %one = insertelement {words} poison, i16 %bits, i32 0
  %by = shufflevector {words} %one, {words} poison, <{2 * lanes} x i32> zeroinitializer
  %moved = lshr {words} %codes, %by
  %bytes = bitcast {words} %moved to {count}
  %code = and {count} %bytes, splat (i8 15)
  %names = bitcast <{TABLE // 2} x i16> %given to <{TABLE} x i8>
  %table = shufflevector <{TABLE} x i8> %names, <{TABLE} x i8> poison, {spread}
  %known = call {count} @{look_up}({count} %table, {count} %code)
  %patch = bitcast {words} %wrong to {count}
  %high = xor {count} %known, %patch
  %lower = bitcast {words} %low to {count}
  %begins = shufflevector {count} %lower, {count} %high, {interleaved(0)}
  %ends = shufflevector {count} %lower, {count} %high, {interleaved(8)}
  %second = and i32 %part, 2
  %begin = icmp eq i32 %second, 0
  %half = select i1 %begin, <{2 * size // 2} x i8> %begins, <{2 * size // 2} x i8> %ends
  %pairs = bitcast {count} %half to <{lanes} x i32>
  %evens = shl <{lanes} x i32> %pairs, splat (i32 16)
  %odds = and <{lanes} x i32> %pairs, splat (i32 -65536)
  %last = and i32 %part, 1
  %even = icmp eq i32 %last, 0
  %result = select i1 %even, <{lanes} x i32> %evens, <{lanes} x i32> %odds
  %floats = bitcast <{lanes} x i32> %result to <{lanes} x float>
  ret <{lanes} x float> %floats
}}
"""


def _mask(numbers: list[int]) -> str:
    return f"<{len(numbers)} x i32> <{', '.join(f'i32 {n}' for n in numbers)}>"
