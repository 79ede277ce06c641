"""Reads any node of a kernel graph at any index.

Views become index arithmetic, pointwise operators expressions.

In: a kernel graph and the buffers that hold its inputs. Out: TIR expressions, with shared
subexpressions bound to variables in the scope that asks. Nothing is materialised here; the emitters
decide what gets a buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import Buffer, Expr, S, Stmt, T, Var, imm, index_var, tvm
from torch_pruner.codegen.tir.indices import (
    Index,
    linear,
    reshape_index,
    safe_position,
    unlinear,
    view_index,
)
from torch_pruner.codegen.tir.scalar import EXP_AT_MOST_ONE, EXP_BESIDE_ONE, apply, approximated
from torch_pruner.codegen.tir.values import load, round_bfloat16, value_dtype
from torch_pruner.codegen.tir.vmath import unseen
from torch_pruner.graph.ir import Graph, const_value
from torch_pruner.graph.ops import OpKind
from torch_pruner.graph.powers import is_at_most_one, is_beside_one
from torch_pruner.graph.precision import is_fast

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = [
    "POSITION",
    "Index",
    "Reader",
    "held",
    "imm",
    "linear",
    "reshape_index",
    "safe_position",
    "unlinear",
    "view_index",
]

_Key = tuple[int, tuple[int, ...]]
_Memo = dict[_Key, tuple[Index, Expr]]

POSITION = "pos"  # the name of variables that hold positions, which analysis of indices has to see


def held(buf: Buffer, at: Expr | int, dtype: str) -> Callable[[Index], Expr]:
    """An override for a node that an emitter keeps at ``buf[at]``, whatever the index."""
    return lambda _: buf[at].astype(value_dtype(dtype))


def _element(buf: Buffer, index: Expr) -> Expr:
    return buf[index]


def _opaque(value: Expr) -> Expr:
    """A value for a variable. Whole numbers that were computed are hidden from TVM's analyzer: of
    numbers computed from each other it would write out each one wherever it is read."""
    whole = str(value.ty.dtype).removeprefix("u").startswith("int")
    return unseen(value) if whole and not isinstance(value, (T.Var, T.IntImm)) else value


def _variables(exprs: Sequence[Expr]) -> set[int]:
    return {v.id_ for e in exprs for v in tvm.tirx.analysis.undefined_vars(e)}


class _Line:
    """What does not change along a line: variables, those bound before it among them."""

    def __init__(self, variables: set[int]) -> None:
        self._known = variables
        self.binds: list[Stmt] = []
        self.memo: _Memo = {}

    def knows(self, *exprs: Expr) -> bool:
        return _variables(exprs) <= self._known

    def bind(self, var: Var, value: Expr) -> Var:
        self.binds.append(S.Bind(var, value))
        self._known.add(var.id_)
        return var


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
        self._memo: _Memo = {}
        self._line: _Line | None = None

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

    def line(self, index: Index, emit: Callable[[], Stmt]) -> Stmt:
        """What ``emit`` returns, a loop along a line whose first axes are at ``index``.

        What is the same all along, as the positions that rows are taken from, is computed before
        the loop: behind the analyzer's back (``vmath.KEEP``) it cannot be moved there later.
        """
        self._line = line = _Line(_variables(index))
        try:
            body = emit()
        finally:
            self._line = None
        return S.SeqStmt([*line.binds, body]) if line.binds else body

    def held(self, value: Expr) -> Expr:
        """``value`` as a variable of the open scope."""
        assert self._binds is not None
        var = T.Var("held", str(value.ty.dtype))
        self._binds.append(S.Bind(var, _opaque(value)))
        return var

    def at(self, node: int, index: Index) -> Expr:
        """The value of ``node`` at ``index`` (of the node's own rank)."""
        if self._binds is None:
            return self._compute(node, index)
        key = (node, tuple(id(e) for e in index))
        if (known := self._memo.get(key)) is not None:
            return known[1]
        if (value := self._along(node, index, key)) is not None:
            return value
        value = self._compute(node, index)
        shared = self._n_users[node] > 1 and self.graph.nodes[node].kind is OpKind.POINTWISE
        if shared:
            var = T.Var(f"t{node}", value_dtype(self.graph.nodes[node].dtype))
            self._binds.append(S.Bind(var, _opaque(value)))
            value = var
        self._memo[key] = (index, value)  # the index is kept alive: its identity is the key
        return value

    def _along(self, node: int, index: Index, key: _Key) -> Expr | None:
        """A variable for a value that is the same all along the line, or None: it is not."""
        n, line = self.graph.nodes[node], self._line
        computed = n.op == "input" or (n.kind is OpKind.POINTWISE and n.op != "const")
        if line is None or not computed or node in self.overrides or not line.knows(*index):
            return None
        if (known := line.memo.get(key)) is not None:
            return known[1]
        inner, self._binds, self._memo = (self._binds, self._memo), line.binds, line.memo
        try:
            value = self._compute(node, index)
        finally:
            self._binds, self._memo = inner
        var = line.bind(T.Var(f"t{node}", value_dtype(n.dtype)), _opaque(value))
        line.memo[key] = (index, var)
        return var

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
        n = self.graph.nodes[node]
        op = EXP_BESIDE_ONE if is_beside_one(self.graph, node) else n.op
        op = EXP_AT_MOST_ONE if is_at_most_one(self.graph, node) else op
        return approximated(op) if is_fast(n) else op

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
        if self._line is not None and self._line.knows(position):
            return self._line.bind(var, safe)
        self._binds.append(S.Bind(var, safe))
        return var
