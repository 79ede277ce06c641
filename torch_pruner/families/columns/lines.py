"""Emits windows that move along the axis in which the outputs lie, a line of outputs at a time.

Lanes are neighbouring windows, whose elements lie ``stride`` apart, and windows at an end reach
beyond it. So the rows of the operand that a line of windows covers are copied, with padding at
their ends, before vectors are read from the copy: whole ones, of which shuffles take every
``stride``-th element, and without conditions. Where the rows are many or long, one is copied after
the other. Where a line is no whole number of vectors, its last one begins earlier.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.parts.beyond import around_lines
from torch_pruner.codegen.parts.reductions import combine, identity, sum_dtype
from torch_pruner.codegen.parts.sweeps import blocked, store_outputs
from torch_pruner.codegen.parts.windows import first_inside, keep_largest
from torch_pruner.codegen.tir.builders import (
    VECTORIZED,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    buffer,
    imm,
    loop,
    seq,
    stack,
    vector,
    when,
)
from torch_pruner.codegen.tir.reader import Index, Reader, held, linear, unlinear
from torch_pruner.codegen.tir.values import store, value_dtype
from torch_pruner.families.columns.form import line_width, line_windows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.graph.ir import Graph

_COPIED = 4096  # elements of all rows that are copied at once: they stay in the first cache
_SHUFFLED = 4  # the largest stride of shuffles; of larger ones lanes are read one by one


class Lines:
    """Windows of one kind over lines of the last axis: ``line_windows`` says which."""

    def __init__(self, spec: Graph, reader: Reader, outputs: Sequence[Buffer], vl: int) -> None:
        self.spec, self.reader, self.outputs = spec, reader, outputs
        self.anchors = line_windows(spec)
        by_op = {spec.nodes[a].op: a for a in self.anchors}
        self.where = by_op.pop("window_argmax", None)
        self.value = next(iter(by_op.values()), None)  # None: only the position is asked for
        self.node = spec.nodes[self.anchors[0]]
        self.shape, self.source = self.node.shape, spec.nodes[self.node.inputs[0]].shape
        self.lead = len(self.source) - len(self.node.attr("kernel"))
        self.vl = _power_of_two(min(vl, self.shape[-1]))
        self.dtype = (
            value_dtype(spec.nodes[self.node.inputs[0]].dtype)
            if self.value is None
            else sum_dtype(spec.nodes[self.value])
        )
        self.width = line_width(spec, self.anchors[0])
        spare = self.node.attr("stride")[-1] * self.vl  # what shuffles leave of their last vectors
        self.first = -self.node.attr("lo")[-1] % self.vl  # so that copies begin with a vector
        self.length = -(-(self.first + self.width + spare) // self.vl) * self.vl
        rows = math.prod(self.node.attr("kernel")[:-1])
        self.whole = rows * self.length <= _COPIED
        self.copies = rows if self.whole else 1
        self.row = buffer(self.length * self.copies, self.dtype, "row", "local")
        self.tap = buffer(self.vl, self.dtype, "tap", "local")
        kept = self.vl if self.whole else -(-self.shape[-1] // self.vl) * self.vl
        self.best = buffer(kept, self.dtype, "best", "local")
        self.found: Buffer | None = None
        if self.where is not None:
            self.found = buffer(kept, spec.nodes[self.where].dtype, "found", "local")

    def sweep(self, chunk: int, parallel: int) -> Stmt:
        """All lines, shared out to parallel tasks of about ``chunk`` vectors."""
        lead, around = self.shape[:-1], around_lines(self.spec, self.reader)

        def line(p: Expr) -> Stmt:
            index = unlinear(p, lead)
            body = self._line(index)
            return body if around is None else around((*index, imm(0)), body)

        lines = max(1, chunk // -(-self.shape[-1] // self.vl))
        return blocked(math.prod(lead), lines, parallel, line, turns=around is not None)

    def _line(self, line: Index) -> Stmt:
        buffers = [b for b in (self.row, self.tap, self.best, self.found) if b is not None]

        def copy(rows: Index, at: Expr) -> Stmt:
            return self._copied((*line[: self.lead], *rows), at)

        if self.whole:

            def one(first: Expr, _: Expr) -> Stmt:
                slot = imm(0)
                taps = self._rows(line, lambda rows, at: self._taps(rows, at, first, slot))
                return seq([self._begun(line, first, slot), taps, self._stored(line, first, slot)])

            work = [self._rows(line, copy), self._vectors(one)]
        else:

            def row(rows: Index, at: Expr) -> Stmt:
                taps = self._vectors(lambda first, slot: self._taps(rows, at, first, slot))
                return seq([copy(rows, at), taps])

            work = [
                self._vectors(lambda first, slot: self._begun(line, first, slot)),
                self._rows(line, row),
                self._vectors(lambda first, slot: self._stored(line, first, slot)),
            ]
        return seq([*(stack(b) for b in buffers), self._padded(), *work])

    @property
    def least(self) -> Expr:
        """What a window begins with, and what padding is."""
        return identity(self.node, self.dtype)

    def _padded(self) -> Stmt | None:
        """Padding in the copies of rows."""
        lo, count = self.node.attr("lo")[-1], self.source[-1]
        ends = [(a, b) for a, b in ((0, lo), (lo + count, self.width)) if a < b]
        if not ends:
            return None

        def filled(first: int, last: int, row: Expr) -> Stmt:
            at = row * self.length + self.first + first
            return loop(last - first, lambda k: store(self.row, at + k, self.least), name="k")

        return loop(self.copies, lambda row: seq([filled(*e, row) for e in ends]), name="row")

    def _begun(self, line: Index, first: Expr, slot: Expr) -> Stmt:
        def lane(v: Expr) -> list[Stmt]:
            stmts = [store(self.best, slot + v, self.least)]
            if self.found is not None:
                inside = first_inside(self.node, self.source, (*line, first + v))
                stmts.append(store(self.found, slot + v, inside.astype(str(self.found.dtype))))
            return stmts

        return self._lanes(lane)

    def _stored(self, line: Index, first: Expr, slot: Expr) -> Stmt:
        def lane(v: Expr) -> list[Stmt]:
            for anchor, kept in ((self.value, self.best), (self.where, self.found)):
                if anchor is not None and kept is not None:
                    dtype = self.spec.nodes[anchor].dtype
                    self.reader.overrides[anchor] = held(kept, slot + v, dtype)
            return [store_outputs(self.spec, self.reader, self.outputs, (*line, first + v))]

        return self._lanes(lane)

    def _lanes(self, body: Callable[[Expr], Sequence[Stmt]]) -> Stmt:
        return loop(self.vl, lambda v: seq(body(v)), VECTORIZED, "v")

    def _vectors(self, body: Callable[[Expr, Expr], Stmt]) -> Stmt:
        """``body`` of each vector of a line, by its first output and where that is kept."""
        whole, rest = divmod(self.shape[-1], self.vl)
        vectors = loop(whole, lambda o: body(o * self.vl, o * self.vl), name="o")
        last = body(imm(self.shape[-1] - self.vl), imm(whole * self.vl)) if rest else None
        return seq([vectors, last])

    def _rows(self, line: Index, body: Callable[[Index, Expr], Stmt]) -> Stmt:
        """Over the rows that a line of windows covers: ``body`` of where one lies along the axes
        before the last, and where its copy begins."""
        kernel = self.node.attr("kernel")

        def visit(done: Index, taken: Index) -> Stmt:
            axis = len(done)
            if axis == len(kernel) - 1:
                copied = linear(taken, kernel[:-1]) if self.whole else imm(0)
                return body(done, copied * self.length)
            size, lo = self.source[self.lead + axis], self.node.attr("lo")[axis]
            stride, dilation = self.node.attr("stride")[axis], self.node.attr("dilation")[axis]
            last = (self.shape[self.lead + axis] - 1) * stride + (kernel[axis] - 1) * dilation - lo

            def step(r: Expr) -> Stmt:
                at = line[self.lead + axis] * stride + r * dilation - lo
                tests = [at >= 0] if lo else []
                tests += [at < size] if last >= size else []
                inner = visit((*done, at), (*taken, r))
                return when(T.all(*tests), inner) if tests else inner

            return loop(kernel[axis], step, name="r")

        return visit((), ())

    def _copied(self, index: Index, begin: Expr) -> Stmt:
        """A row of the operand, between the padding."""
        count, begin = self.source[-1], begin + self.first + self.node.attr("lo")[-1]
        lanes = _power_of_two(min(self.vl, count))

        def lane(at: Expr) -> list[Stmt]:
            value = self.reader.at(self.node.inputs[0], (*index, at))
            return [store(self.row, begin + at, value.astype(self.dtype))]

        def taken(first: Expr) -> Stmt:
            def one(v: Expr) -> Stmt:
                return self.reader.scope(lambda: lane(first + v))

            return loop(lanes, one, VECTORIZED, "v")

        last = taken(imm(count - lanes)) if count % lanes else None
        return seq([loop(count // lanes, lambda o: taken(o * lanes), name="o"), last])

    def _taps(self, rows: Index, begin: Expr, first: Expr, slot: Expr) -> Stmt:
        """What a vector of windows takes of a row, whose copy begins there."""
        dilation = self.node.attr("dilation")[-1]
        row: Expr = linear((*rows, imm(0)), self.source[self.lead :])

        def tap(t: Expr) -> Stmt:
            def lane(v: Expr) -> list[Stmt]:
                return [self._step(row, first + v, t * dilation, slot + v, v)]

            return seq([self._gathered(begin, first, t * dilation), self._lanes(lane)])

        return loop(self.node.attr("kernel")[-1], tap, name="t")

    def _gathered(self, row: Expr, first: Expr, ahead: Expr) -> Stmt:
        """The elements ``ahead`` of the beginnings of a vector of windows."""
        stride, vl = self.node.attr("stride")[-1], self.vl
        begin = row + self.first + first * stride + ahead
        if stride > _SHUFFLED or vl == 1:
            return self._lanes(lambda v: [store(self.tap, v, self.row[begin + v * stride])])
        parts = [self.row[vector(begin + k * vl, vl)] for k in range(stride)]
        value = parts[0]
        if stride > 1:
            value = T.Shuffle(parts, [T.const(k * stride, "int32") for k in range(vl)])
        return S.BufferStore(self.tap, value, [vector(imm(0), vl)])

    def _step(self, row: Expr, at: Expr, ahead: Expr, slot: Expr, v: Expr) -> Stmt:
        if self.found is None:
            assert self.value is not None
            node = self.spec.nodes[self.value]
            return store(self.best, slot, combine(node, self.best[slot], self.tap[v], self.dtype))
        assert self.where is not None
        start = at * self.node.attr("stride")[-1] - self.node.attr("lo")[-1]
        return keep_largest(
            self.reader, self.spec.nodes[self.where], (self.best, slot), (self.found, slot),
            lambda: self.tap[v], row + start + ahead,
        )  # fmt: skip


def _power_of_two(count: int) -> int:
    return 1 << (count.bit_length() - 1)
