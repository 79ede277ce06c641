"""Emits products of bytes by constant bytes: a register tile of 32-bit sums, a word of each a step.

A word of the first operand is broadcast, a vector of the panel has one for each of its columns, and
an instruction adds the products of their two or four numbers to the sums. All of it is exact, and
what does not fit 32 bits wraps as the sum itself would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.kernel import Emitted, parameters
from torch_pruner.codegen.parts.operands import Nest
from torch_pruner.codegen.parts.row_tiles import Rows, TilePosition, first_rows, write_tile
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    importing,
    loop,
    seq,
    stack,
    vector,
    when,
)
from torch_pruner.codegen.tir.reader import Reader, imm, unlinear
from torch_pruner.codegen.tir.values import store
from torch_pruner.families.int8_products.form import QUADS, SIGNED_LANES, Int8Product, int8_product

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.families.int8_products.form import Int8ProductsDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

_NAME = "torch_pruner_byte_dot"
_OFFSET = 128  # makes bytes with a sign bytes without, and those without such that have one
_OFFSETS = -(2**31) + 0x808080  # four of them, as a number with a sign
_COPIED = 16  # elements that are copied together
_FOUR = f"""
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)
define <16 x i32> @{_NAME}(<16 x i32> %c, <16 x i32> %a, <64 x i8> %b) alwaysinline {{
  %x = bitcast <16 x i32> %a to <64 x i8>
  %r = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %c, <64 x i8> %x, <64 x i8> %b)
  ret <16 x i32> %r
}}
"""
_NEON = f"""
declare <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32>, <16 x i8>, <16 x i8>)
define <4 x i32> @{_NAME}(<4 x i32> %c, <4 x i32> %a, <16 x i8> %b) alwaysinline {{
  %x = bitcast <4 x i32> %a to <16 x i8>
  %r = call <4 x i32> @llvm.aarch64.neon.sdot.v4i32.v16i8(<4 x i32> %c, <16 x i8> %x, <16 x i8> %b)
  ret <4 x i32> %r
}}
"""
_TWO = """
declare <{n} x i32> @llvm.x86.{name}(<{m} x i16>, <{m} x i16>)
define <{n} x i32> @{function}(<{n} x i32> %c, <{n} x i32> %a, <{m} x i8> %b) alwaysinline {{
  %x = bitcast <{n} x i32> %a to <{m} x i16>
  %y = sext <{m} x i8> %b to <{m} x i16>
  %p = call <{n} x i32> @llvm.x86.{name}(<{m} x i16> %x, <{m} x i16> %y)
  %r = add <{n} x i32> %c, %p
  ret <{n} x i32> %r
}}
"""
_PAIRS = {4: "sse2.pmadd.wd", 8: "avx2.pmadd.wd", 16: "avx512.pmaddw.d.512"}


def emit(spec: Graph, decisions: Int8ProductsDecisions[int], signature: Signature) -> Emitted:
    """TIR for a product of bytes."""
    found = int8_product(spec)
    assert found is not None
    inputs, (out,), (copy,) = parameters(signature)
    nest = Nest(
        spec,
        found.con,
        Reader(spec, dict(zip(spec.inputs, inputs, strict=True))),
        decisions.vl,
        decisions.tm,
        decisions.nv,
        ku=1,
        parallel=bool(decisions.par),
        ahead=False,
        panel=inputs[found.index],
        copied=copy,
        sums=None,
        out=out,
    )
    tiles = _Tiles(nest, found, decisions.word, inputs[found.index], copy)
    body = seq([tiles.copy_rows(), tiles.all(decisions.mc)])
    return Emitted(importing(_function(decisions), body), inputs, [out], [copy])


def _function(decisions: Int8ProductsDecisions[int]) -> str:
    """The instruction, in LLVM's language."""
    if decisions.word == QUADS:
        return _NEON if decisions.vl == SIGNED_LANES else _FOUR
    n = decisions.vl
    return _TWO.format(n=n, m=2 * n, name=_PAIRS[n], function=_NAME)


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The parts of one kernel."""

    nest: Nest
    found: Int8Product
    word: int
    panel: Buffer
    copy: Buffer

    @property
    def depth(self) -> int:
        """Words of the reduction."""
        return self.found.depth(self.word)

    @property
    def shifted(self) -> bool:
        """Whether the copy of the first operand is off by 128."""
        return self.found.shifted(self.word, self.nest.vl)

    def copy_rows(self) -> Stmt:
        """The first operand in words, filled up with zeros."""
        con, depth = self.nest.con, self.nest.con.depth
        kept = "uint8" if self.word == QUADS else "int16"

        def row(p: Expr) -> Stmt:
            def one(k: Expr) -> Stmt:
                value = self.nest.reader.at(con.a, (p, k)).astype(kept)
                if self.shifted:
                    value = T.bitwise_xor(value, T.const(_OFFSET, kept))
                return store(self.copy, p * (self.depth * self.word) + k, value)

            def many(o: Expr) -> Stmt:
                def lanes() -> list[Stmt]:
                    return [loop(_COPIED, lambda v: one(o * _COPIED + v), VECTORIZED, "v")]

                return self.nest.reader.scope(lanes)

            whole, rest = divmod(depth, _COPIED)
            first = p * (self.depth * self.word) + depth
            padding = self.depth * self.word - depth
            zero = T.const(0, kept)
            return seq(
                [
                    loop(whole, many, name="k") if whole else None,
                    loop(rest, lambda k: one(imm(whole * _COPIED) + k), name="k") if rest else None,
                    loop(padding, lambda k: store(self.copy, first + k, zero)) if padding else None,
                ]
            )

        return loop(con.rows, row, self.nest.kind, name="row")

    def all(self, chunks: int) -> Stmt:
        """Every tile of every panel."""
        nest = self.nest
        chunks, each = nest.con.chunked(nest.tm, chunks)

        def task(p: Expr) -> Stmt:
            nb, chunk = unlinear(p, (nest.blocks, chunks))

            def panel(vectors: int) -> Stmt:
                def tile(t: Expr) -> Stmt:
                    at = chunk * each + t
                    body = self._tile(nb, at, vectors)
                    return body if nest.tiles % each == 0 else when(at < nest.tiles, body)

                return loop(each, tile, name="t")

            whole = panel(nest.nv)
            if nest.last_vectors == nest.nv:
                return whole
            return when(nb < nest.blocks - 1, whole, panel(nest.last_vectors))

        return loop(nest.blocks * chunks, task, nest.kind, name="p")

    def _tile(self, nb: Expr, tile: Expr, vectors: int) -> Stmt:
        nest, vl, bn = self.nest, self.nest.vl, self.nest.bn
        own, bind, start = first_rows(tile, nest.tm, nest.con.rows)
        rows = Rows(lambda i: unlinear(start + i, nest.con.m), own, bind)
        acc = buffer((nest.tm + 1) * bn, "int32", "acc", scope="local")  # the last: of columns
        place = TilePosition(imm(0), nb, vectors, imm(0), tile, (imm(0), 1), imm(0))
        count = nest.tm + self.shifted

        def each(body: Callable[[Expr, Expr], Stmt], count: int = count) -> Stmt:
            def row(i: Expr) -> Stmt:
                return loop(vectors, lambda j: body(i, j), UNROLLED, "j")

            return loop(count, row, UNROLLED, "i")

        def at(i: Expr | int, j: Expr) -> Expr:
            return vector(imm(0) + i * bn + j * vl, vl)

        zero = T.Broadcast(T.const(0, "int32"), vl)

        def step(k: Expr) -> Stmt:
            def columns(j: Expr) -> Expr:
                first = ((nb * self.depth + k) * bn + j * vl) * self.word
                return self.panel[vector(first, vl * self.word)]

            def add(i: Expr, j: Expr, first: Expr) -> Stmt:
                args = acc[at(i, j)], T.Broadcast(first, vl), columns(j)
                return S.BufferStore(acc, T.call_extern(f"int32x{vl}", _NAME, *args), [at(i, j)])

            def row(i: Expr, j: Expr) -> Stmt:
                given = ((start + i) * self.depth + k) * self.word
                return add(i, j, T.reinterpret("int32", self.copy[vector(given, self.word)]))

            offsets = T.const(_OFFSETS, "int32")
            summed = loop(vectors, lambda j: add(imm(nest.tm), j, offsets), UNROLLED, "j")
            return seq([each(row, nest.tm), summed if self.shifted else None])

        def unshift(i: Expr, j: Expr) -> Stmt:
            return S.BufferStore(acc, acc[at(i, j)] - acc[at(nest.tm, j)], [at(i, j)])

        return seq(
            [
                bind,
                stack(acc),
                each(lambda i, j: S.BufferStore(acc, zero, [at(i, j)])),
                loop(self.depth, step, name="k"),
                each(unshift, nest.tm) if self.shifted else None,
                write_tile(nest, place, rows, acc),
            ]
        )
