"""Reads any node of a kernel graph at any index.

Views become index arithmetic, pointwise operators expressions.

In: a kernel graph and the buffers that hold its inputs. Out: TIR expressions, with shared
subexpressions bound to variables in the scope that asks. Nothing is materialised here; the emitters
decide what gets a buffer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import Buffer, Expr, S, Stmt, T, imm, index_dtype, index_var
from torch_pruner.codegen.tir.scalar import EXP_AT_MOST_ONE, EXP_BESIDE_ONE, apply
from torch_pruner.codegen.tir.values import load, round_bfloat16, value_dtype
from torch_pruner.graph.ir import Graph, Shape, const_value
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.powers import is_at_most_one, is_beside_one

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

Index = tuple[Expr, ...]

__all__ = [
    "POSITION",
    "Index",
    "Reader",
    "held",
    "imm",
    "linear",
    "reshape_index",
    "unlinear",
    "view_index",
]

POSITION = "pos"  # the name of variables that hold positions, which analysis of indices has to see


def linear(index: Sequence[Expr], shape: Shape) -> Expr:
    """Row-major offset of ``index`` in ``shape``."""
    offset: Expr = imm(0)
    for i, extent in zip(index, shape, strict=True):
        offset = offset * extent + i if extent != 1 else offset
    return offset


def unlinear(offset: Expr, shape: Shape) -> Index:
    """Inverse of ``linear``."""
    result: list[Expr] = [imm(0)] * len(shape)
    _split(offset, shape, result, 0)
    return tuple(result)


def reshape_index(index: Sequence[Expr], target: Shape, source: Shape) -> Index:
    """Map an index of ``target`` to ``source``, which has as many elements.

    Divides only where dimensions really mix.
    """
    result: list[Expr] = [imm(0)] * len(source)
    i = j = 0
    while i < len(target) or j < len(source):
        i0, j0, a, b = i, j, 1, 1
        while True:
            if a == b and (i > i0 or j > j0):
                break
            if (a <= b and i < len(target)) or j >= len(source):
                a, i = a * target[i], i + 1
            else:
                b, j = b * source[j], j + 1
        _split(linear(index[i0:i], target[i0:i]), source[j0:j], result, j0)
    return tuple(result)


def safe_position(position: Expr, extent: int) -> Expr:
    """A position that data gave: negative counts from the end, none is outside."""
    wide = position.astype("int64")
    wrapped = T.Select(wide < T.const(0, "int64"), wide + T.const(extent, "int64"), wide)
    low = T.max(wrapped, T.const(0, "int64"))
    return T.min(low, T.const(extent - 1, "int64")).astype(index_dtype())


def held(buf: Buffer, at: Expr | int, dtype: str) -> Callable[[Index], Expr]:
    """An override for a node that an emitter keeps at ``buf[at]``, whatever the index."""
    return lambda _: buf[at].astype(value_dtype(dtype))


def _element(buf: Buffer, index: Expr) -> Expr:
    return buf[index]


def _split(offset: Expr, source: Shape, result: list[Expr], at: int) -> None:
    """Write the row-major digits of ``offset`` in ``source`` to ``result[at:]``."""
    real = [k for k, d in enumerate(source) if d != 1]
    for pos, k in enumerate(real):
        inner = math.prod(source[m] for m in real[pos + 1 :])
        digit = T.floordiv(offset, inner) if inner != 1 else offset
        result[at + k] = T.floormod(digit, source[k]) if pos else digit


class Reader:
    """Expressions for nodes of ``graph``.

    ``overrides`` answer for nodes that an emitter keeps in buffers of its own. ``raw``: inputs are
    read as they lie in memory, for what is only moved; such nodes must be views of an input.
    """

    def __init__(
        self,
        graph: Graph,
        buffers: Mapping[int, Buffer],
        overrides: Mapping[int, Callable[[Index], Expr]] | None = None,
        *,
        raw: bool = False,
    ) -> None:
        self._load = _element if raw else load
        self.graph = graph
        self.buffers = dict(buffers)
        self.overrides = dict(overrides or {})
        self._n_users = [0] * len(graph.nodes)
        for node in graph.nodes:
            for i in node.inputs:
                self._n_users[i] += 1
        self._binds: list[Stmt] | None = None  # no scope is open: nothing can be bound
        self._memo: dict[tuple[int, tuple[int, ...]], tuple[Index, Expr]] = {}

    def scope(self, emit: Callable[[], Sequence[Stmt]]) -> Stmt:
        """Run ``emit`` and put the variables it needed before the statements it returns."""
        outer_binds, outer_memo = self._binds, self._memo
        self._binds, self._memo = [], {}
        try:
            stmts = [s for s in emit() if s is not None]
            everything = [*(self._binds or ()), *stmts]
        finally:
            self._binds, self._memo = outer_binds, outer_memo
        return everything[0] if len(everything) == 1 else S.SeqStmt(everything)

    def at(self, node: int, index: Index) -> Expr:
        """The value of ``node`` at ``index`` (of the node's own rank)."""
        if self._binds is None:
            return self._compute(node, index)
        key = (node, tuple(id(e) for e in index))
        if (known := self._memo.get(key)) is not None:
            return known[1]
        value = self._compute(node, index)
        shared = self._n_users[node] > 1 and self.graph.nodes[node].kind is OpKind.POINTWISE
        if shared:
            var = T.Var(f"t{node}", value_dtype(self.graph.nodes[node].dtype))
            self._binds.append(S.Bind(var, value))
            value = var
        self._memo[key] = (index, value)  # the index is kept alive: its identity is the key
        return value

    def places(self, node: int, index: Index) -> list[tuple[Buffer, Expr]]:
        """Where in which buffers ``at`` would read inputs, of nodes that read no positions."""
        found: list[tuple[Buffer, Expr]] = []

        def note(buf: Buffer, index: Expr) -> Expr:
            found.append((buf, index))
            return load(buf, imm(0))

        kept, self._load = self._load, note
        try:
            self.scope(lambda: [S.Evaluate(self.at(node, index))])
        finally:
            self._load = kept
        return found

    def _compute(self, node: int, index: Index) -> Expr:
        if (override := self.overrides.get(node)) is not None:
            return override(index)
        n = self.graph.nodes[node]
        if n.op == "input":
            return self._load(self.buffers[node], linear(index, n.shape))
        if n.op == "const":
            return T.const(const_value(n), value_dtype(n.dtype))
        if n.op == "iota":
            dim: int = n.attr("dim")
            return index[dim].astype(n.dtype)
        if n.op == "within":
            return self.at(n.inputs[0], index)
        if n.kind is OpKind.POINTWISE:
            args = [self.at(i, index if self.graph.nodes[i].shape else ()) for i in n.inputs]
            value = apply(self._operator(node), args, value_dtype(n.dtype))
            return round_bfloat16(value) if n.op == "cast" and n.dtype == "bfloat16" else value
        if n.kind is OpKind.VIEW:
            return self._view(node, index)
        if n.kind is OpKind.INJECTIVE:
            injective: Callable[[int, Index], Expr] = getattr(self, f"_{n.op}")
            return injective(node, index)
        raise AssertionError(f"{n.op} must be given a buffer by the emitter")

    def _operator(self, node: int) -> str:
        """What is computed of a pointwise node's operands: less where less is asked."""
        if is_at_most_one(self.graph, node):
            return EXP_AT_MOST_ONE
        return EXP_BESIDE_ONE if is_beside_one(self.graph, node) else self.graph.nodes[node].op

    def _view(self, node: int, index: Index) -> Expr:
        n = self.graph.nodes[node]
        src = n.inputs[0]
        source = self.graph.nodes[src]
        if n.op == "reshape":
            if source.op == "input" and src not in self.overrides:
                return self._load(self.buffers[src], linear(index, n.shape))
            return self.at(src, reshape_index(index, n.shape, source.shape))
        return self.at(src, view_index(n.op, dict(n.attrs), index, source.shape))

    def _pad(self, node: int, index: Index) -> Expr:
        n = self.graph.nodes[node]
        source = self.graph.nodes[n.inputs[0]]
        inside, shifted = [], []
        for i, lo, hi, extent in zip(index, n.attr("lo"), n.attr("hi"), source.shape, strict=True):
            shifted.append(i - lo if lo else i)
            if lo:
                inside.append(i >= lo)
            if hi:
                inside.append(i < lo + extent)
        value = n.attr("value")
        fill = T.const(float(value) if isinstance(value, str) else value, value_dtype(n.dtype))
        body = self._guarded(n.inputs[0], tuple(shifted))
        return T.if_then_else(T.all(*inside), body, fill) if inside else body

    def _guarded(self, node: int, index: Index) -> Expr:
        """Like ``at``, but binding nothing outside: the caller wraps the value in a condition."""
        binds, memo = self._binds, self._memo
        self._binds, self._memo = None, {}
        try:
            return self.at(node, index)
        finally:
            self._binds, self._memo = binds, memo

    def _cat(self, node: int, index: Index) -> Expr:
        n = self.graph.nodes[node]
        dim, start = n.attr("dim"), 0
        parts: list[tuple[int, Expr]] = []
        for i in n.inputs:
            shifted = tuple(e - start if k == dim and start else e for k, e in enumerate(index))
            parts.append((start, self._guarded(i, shifted)))
            start += self.graph.nodes[i].shape[dim]
        value = parts[0][1]
        for begin, part in parts[1:]:
            value = T.if_then_else(index[dim] < begin, value, part)
        return value

    def _take(self, node: int, index: Index) -> Expr:
        n = self.graph.nodes[node]
        x, where = n.inputs
        dim, rank = n.attr("dim"), len(self.graph.nodes[where].shape)
        at = self.at(where, index[dim : dim + rank])
        return self.at(
            x, (*index[:dim], self._wrap(at, self.graph.nodes[x].shape[dim]), *index[dim + rank :])
        )

    def _gather(self, node: int, index: Index) -> Expr:
        n = self.graph.nodes[node]
        x, where = n.inputs
        dim = n.attr("dim")
        at = self._wrap(self.at(where, index), self.graph.nodes[x].shape[dim])
        return self.at(x, tuple(at if k == dim else e for k, e in enumerate(index)))

    def position(self, node: int, index: Index, extent: int) -> Expr:
        """The element of integer ``node`` at ``index`` as a position along an axis of ``extent``:
        negative ones count from the end, none is outside."""
        return self._wrap(self.at(node, index), extent)

    def _wrap(self, position: Expr, extent: int) -> Expr:
        """A data-dependent position made safe: negative counts from the end, none is outside."""
        safe = safe_position(position, extent)
        if self._binds is None:
            return safe
        var = index_var(POSITION)
        self._binds.append(S.Bind(var, safe))
        return var


def view_index(op: str, attrs: Mapping[str, object], index: Index, source: Shape) -> Index:
    """Index of a view's operand for an index of the view (all views but reshape)."""
    if op == "permute":
        perm: Sequence[int] = attrs["perm"]  # type: ignore[assignment]
        out: list[Expr] = [imm(0)] * len(perm)
        for k, p in enumerate(perm):
            out[p] = index[k]
        return tuple(out)
    if op == "broadcast":
        tail = index[len(index) - len(source) :]
        return tuple(imm(0) if extent == 1 else e for e, extent in zip(tail, source, strict=True))
    if op == "slice":
        starts: Sequence[int] = attrs["starts"]  # type: ignore[assignment]
        steps: Sequence[int] = attrs["steps"]  # type: ignore[assignment]
        return tuple(
            e * h + s if h != 1 or s else e for e, s, h in zip(index, starts, steps, strict=True)
        )
    if op == "flip":
        dims: Sequence[int] = attrs["dims"]  # type: ignore[assignment]
        return tuple(source[k] - 1 - e if k in dims else e for k, e in enumerate(index))
    raise AssertionError(op)
