"""What products on GPUs read and write: operands where they lie, results through the epilogue."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.operands import phase
from torch_pruner.codegen.parts.output import along, anchor_index
from torch_pruner.codegen.tir.builders import (
    UNROLLED,
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    index_var,
    is_const,
    loop,
    simplified,
)
from torch_pruner.codegen.tir.reader import Index, Reader, held, imm, linear, unlinear
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.graph.ops import ITEMSIZE
from torch_pruner.graph.strided import only_viewed, reach

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.parts.operands import Nest
    from torch_pruner.graph.ir import Graph

WIDEST = 16  # bytes that one instruction copies


def first_operand(
    nest: Nest, g: Expr, row: Index, column: Expr
) -> tuple[Callable[[Index], list[Expr]], Callable[[Index], Expr]]:
    """For a row: what must hold for a position of the reduction to be read, and its value.

    Nothing is copied or padded first: outside of a convolution's input there are zeros, for the
    caller to supply. Only a depthwise convolution reads another channel for another ``column``.
    """
    con, reader, conv = nest.con, nest.reader, nest.con.conv
    if conv is None:
        batch = unlinear(g, con.batch)
        return (lambda _: []), (lambda k: reader.at(con.a, (*batch, *row, *k)))
    image, *place = row
    if con.form == "conv_phases":
        place = [q + late for q, (late, _) in zip(place, phase(con, g), strict=True)]
    extent = nest.spec.nodes[con.a].shape[2:]
    depthwise = con.form == "depthwise"

    def positions(k: Index) -> list[Expr]:
        """In the input with zeros between its elements, which begin at 0."""
        taps = k if depthwise else k[:-1]
        return [
            o * s + r * d - lo
            for o, s, r, d, lo in zip(place, conv.stride, taps, conv.dilation, conv.lo, strict=True)
        ]

    def inside(k: Index) -> list[Expr]:
        found = []
        for at, size, gap in zip(positions(k), extent, conv.dilate_input, strict=True):
            found += [at >= 0, at < (size - 1) * gap + 1] if conv.copies_input else []
            found += [T.EQ(T.floormod(at, gap), imm(0))] if gap > 1 else []
        return found

    def value(k: Index) -> Expr:
        places = [
            T.floordiv(at, gap) if gap > 1 else at
            for at, gap in zip(positions(k), conv.dilate_input, strict=True)
        ]
        if depthwise:
            channel = column
        else:
            channel = k[-1] if con.form == "conv_phases" else g * con.k[-1] + k[-1]
        return reader.at(con.a, (image, channel, *places))

    return inside, value


def write_out(
    nest: Nest, path: tuple[int, ...], place: Index, sums: Buffer, at: Expr | int
) -> Stmt:
    """The sum at ``sums[at]`` of (group, row, column) through the rest of the graph, stored."""
    con, spec, reader = nest.con, nest.spec, nest.reader
    g, m, n = place
    shape, dtype = spec.nodes[path[-1]].shape, spec.nodes[con.anchor].dtype
    index = along(spec, path, anchor_index(con, g, unlinear(m, con.m), n))
    reader.overrides[con.anchor] = held(sums, at, dtype)
    return reader.scope(lambda: [store(nest.out, linear(index, shape), reader.at(path[-1], index))])


def columns_follow(nest: Nest, path: tuple[int, ...], count: int) -> bool:
    """Whether the output has ``count`` neighbouring columns of a product next to each other, the
    first of which is a multiple of ``count``."""
    con = nest.con
    g, m = (index_var(name) for name in ("g", "m"))
    return lie_together(
        nest.spec, path, lambda n: anchor_index(con, g, unlinear(m, con.m), n), count
    )


def lie_together(
    spec: Graph, path: tuple[int, ...], index: Callable[[Expr], Index], count: int
) -> bool:
    """The same for columns whose ``index`` in the result of ``path[0]`` that function gives."""
    shape, group = spec.nodes[path[-1]].shape, index_var("group")

    def at(v: int) -> Expr:
        return linear(along(spec, path, index(group * count + v)), shape)

    return all(is_const(simplified(at(v) - at(0)), v) for v in range(1, count))


class Moved:
    """How elements of an operand travel to shared memory.

    For tensor cores they stay as they are; what is only moved is not even looked at, which matters
    for bfloat16. Otherwise they become what sums are kept in.
    """

    def __init__(self, nest: Nest, operand: int, *, tensor: bool, packed: bool = False) -> None:
        dtype = nest.spec.nodes[operand].dtype
        self.raw = tensor and (packed or only_viewed(nest.spec, operand))
        reader = Reader(nest.spec, nest.reader.buffers, raw=True) if self.raw else nest.reader
        self.nest = replace(nest, reader=reader)
        if self.raw:
            self.dtype = "uint16" if dtype == "bfloat16" else dtype
        else:
            self.dtype = value_dtype(dtype) if tensor else nest.con.acc_dtype
        self.most = WIDEST // ITEMSIZE[dtype]
        self.packed, self._operand = packed, operand

    def reach(self, axis: int) -> int:
        """How many neighbours along an axis of the operand one instruction may move.

        They lie together, in groups that are aligned; 0 where neighbours are apart or computed.
        """
        if self.packed:
            return self.most
        return reach(self.nest.spec, self._operand, axis, self.most) if self.raw else 0

    def put(self, buf: Buffer, at: Expr, value: Expr) -> Stmt:
        """Store an element."""
        if self.raw:
            return S.BufferStore(buf, value, [at])
        return store(buf, at, value.astype(self.dtype))

    def lanes(
        self,
        width: int,
        put: Callable[[Expr, Expr], Stmt],
        value: Callable[[Expr], Expr],
        guards: list[Expr],
    ) -> Stmt:
        """``width`` neighbours copied, or zeros where one of ``guards`` does not hold.

        Of what is only moved there are no more than ``reach`` says: TVM prints a vector from
        eight places with too many arguments, and the card refuses one that is not aligned.
        """
        kind = VECTORIZED if self.raw else UNROLLED
        copied = loop(width, lambda v: put(v, value(v)), kind, "v")
        if not guards:
            return copied
        zero = T.const(0, self.dtype)
        if self.dtype == "uint16":  # TVM prints a vector of eight of them with too many arguments
            kind = UNROLLED
        return S.IfThenElse(T.all(*guards), copied, loop(width, lambda v: put(v, zero), kind, "v"))
