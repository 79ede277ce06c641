"""Emits products of bfloat16 by AMX: tiles of 16 by 16 sums, 32 products each an instruction.

Tiles of the first operand are read where they lie, with its row stride, those of the second from
its panel. The sums of ``rt`` by ``nv`` tiles stay in tile registers over the whole reduction, then
pass through a small buffer of the task, which the epilogue reads by vectors. How many rows a tile
has is configured by every task for its thread and released at its end, so that switching to another
thread does not save tiles.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    intrinsic,
    loop,
    seq,
    stack,
)
from torch_pruner.codegen.tir.reader import imm
from torch_pruner.families.bf16_pairs.form import COLUMNS, pair_form
from torch_pruner.families.bf16_pairs.nest import (
    PairNest,
    fetcher,
    fetches,
    pair_nest,
    reduction,
    walk,
)
from torch_pruner.families.bf16_pairs.results import distances, write, write_turned

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.codegen.tir.reader import Index
    from torch_pruner.families.bf16_tiles.form import Bf16TilesDecisions
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature

_REGISTERS = 8
_PAIRS = 16  # of the reduction in one step
_STEP = 2 * _PAIRS
_ROW_BYTES = 64


def emit(spec: Graph, decisions: Bf16TilesDecisions[int], signature: Signature) -> Emitted:
    """TIR for a product of matrices or a convolution."""
    rt, ct = decisions.rt, decisions.nv
    rows = pair_form(spec, "bf16_tiles", decisions.way).rows
    nest, emitted = pair_nest(spec, "bf16_tiles", signature, rows, ct * COLUMNS, decisions)
    ku = min(decisions.ku, nest.form.inner // _STEP)
    numel = rt * rows * nest.block

    def block(p: Expr, g: Expr, nb: Expr, rb: Expr, turn: tuple[Expr, int]) -> Stmt:
        tiles = [_tile_number(rb, rt, i, nest.tiles) for i in range(rt)]

        def update(outer: Index, along: Expr, first: Expr) -> Stmt:
            return _step(nest, g, nb, tiles, ct, outer, along, first)

        fetch = fetcher(nest, g, nb, turn, fetches(nest, _STEP, ku))
        return seq(
            [
                *(intrinsic("llvm.x86.tilezero", _tmm(k)) for k in range(rt * ct)),
                reduction(nest, _STEP, ku, fetch, update),
                _finish(nest, g, nb, tiles, p * numel),
            ]
        )

    emitted.body = walk(nest, decisions, rt, block, lambda body: _configured(rt, ct, rows, body))
    return emitted


def _step(
    nest: PairNest, g: Expr, nb: Expr, tiles: list[Expr], ct: int, outer: Index, along: Expr,
    first: Expr,
) -> Stmt:  # fmt: skip
    """32 products of every sum of ``tiles``, those that ``nest.reduction`` says."""
    rt, body = len(tiles), []
    first_b = rt * ct + rt
    for i, tile in enumerate(tiles):
        source, at = nest.a_address(g, tile, imm(0), outer)
        body.append(_load(rt * ct + i, T.address_of(source[at + along]), nest.a_stride * 2))
    for j in range(ct):
        b = first_b + j % (_REGISTERS - first_b)
        at = nest.panel_at(g, nb, T.floordiv(first, 2)) + j * (COLUMNS * nest.width)
        body.append(_load(b, T.address_of(nest.panel[at]), nest.block * 4))
        body += [
            intrinsic("llvm.x86.tdpbf16ps", _tmm(i * ct + j), _tmm(rt * ct + i), _tmm(b))
            for i in range(rt)
        ]
    return seq(body)


def _finish(nest: PairNest, g: Expr, nb: Expr, tiles: list[Expr], base: Expr) -> Stmt:
    """Sums to memory at element ``base`` of the buffer for them, and from there the epilogue."""
    sums, rows, ct = nest.sums, nest.rows, nest.block // COLUMNS
    assert sums is not None
    stride = T.const(nest.block * 4, "int64")
    parts = [
        intrinsic(
            "llvm.x86.tilestored64",
            _tmm(i * ct + j),
            T.address_of(sums[base + i * rows * nest.block + j * COLUMNS]),
            stride,
        )
        for i in range(len(tiles))
        for j in range(ct)
    ]

    by_row, by_column = distances(nest)
    turned = rows == COLUMNS and 0 < by_row < by_column

    def epilogue(i: int, tile: Expr) -> Stmt:
        if turned:
            return write_turned(nest, g, nb, tile, sums, base + i * rows * nest.block)

        def row(r: Expr) -> Stmt:
            first = base + (imm(i * rows) + r) * nest.block
            index = nest.row_index(tile, r)
            return write(nest, g, nb, index, lambda c: (sums, first + c), UNROLLED)

        return loop(rows, row, name="i")

    return seq([*parts, *(epilogue(i, tile) for i, tile in enumerate(tiles))])


def _configured(rt: int, ct: int, rows: int, body: Stmt) -> Stmt:
    """``body`` with tile registers: sums and first operands of ``rows`` rows, the others of 16."""
    short = rt * ct + rt
    heights = [rows] * short + [_PAIRS] * (_REGISTERS - short)
    widths = [_ROW_BYTES] * _REGISTERS
    words = struct.unpack("<8q", struct.pack("<BB14x8H16x8B8x", 1, 0, *widths, *heights))
    config = buffer(8, "int64", "config", scope="local")
    stores = [S.BufferStore(config, T.const(w, "int64"), [imm(k)]) for k, w in enumerate(words)]
    load = intrinsic("llvm.x86.ldtilecfg", T.address_of(config[imm(0)]))
    return seq([stack(config), *stores, load, body, intrinsic("llvm.x86.tilerelease")])


def _tile_number(rb: Expr, rt: int, i: int, tiles: int) -> Expr:
    """The number of tile ``i`` in block ``rb``; the last block may repeat the last tile."""
    number = rb * rt + i
    return number if tiles % rt == 0 else T.min(number, imm(tiles - 1))


def _tmm(number: int) -> Expr:
    return T.const(number, "int8")


def _load(number: int, address: Expr, stride_bytes: int) -> Stmt:
    stride = T.const(stride_bytes, "int64")
    return intrinsic("llvm.x86.tileloadd64", _tmm(number), address, stride)
