"""Turns variables that hold computed values into stores to small stack buffers and loads from them.

TVM's analyzer replaces a variable by its value wherever it meets it, and LLVM code generation hands
it every ``Let`` and ``Bind``: a chain of definitions that each use an earlier one twice takes
exponential time, minutes for three activations in a row. A load is opaque to the analyzer, and LLVM
turns the buffers back into registers. Runs on plain loops before the pipeline; positions stay
variables, since analysis of indices needs them.
"""

from __future__ import annotations

from collections import ChainMap
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import tvm_ffi

from torch_pruner.codegen.tir.builders import (
    VECTORIZED,
    Buffer,
    Call,
    Expr,
    IRModule,
    S,
    Stmt,
    T,
    Var,
    buffer,
    seq,
    stack,
    tvm,
)
from torch_pruner.codegen.tir.intrinsics import RARE
from torch_pruner.codegen.tir.reader import POSITION
from torch_pruner.codegen.tir.vmath import KEEP

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


def spill(module: IRModule, *, interrupts: bool = True) -> IRModule:
    """The module with the computed variables of its functions in stack buffers.

    ``interrupts``: loops over lanes end where a branch for all lanes stands (``RARE``), and begin
    anew behind it; else what is rare is computed always, as LLVM alone knows such branches.
    """
    functions = {}
    for name, func in module.functions.items():
        frame = _Frame(interrupts=interrupts)
        _visit(func.body, frame)
        functions[name] = func.with_body(seq([*frame.buffers, *frame.stmts]))
    return IRModule(functions, attrs=module.attrs)


@dataclass(slots=True)
class _Frame:
    """Where statements go: a loop body or a branch.

    ``lane`` is the index of the vectorised loop around it, if any; its frames share ``buffers``.
    ``body`` is what that loop does. ``branches`` are where it is interrupted, None where it cannot
    be: before which statement, which lanes ask for it, and what is done for those.
    """

    stmts: list[Stmt] = field(default_factory=list)
    buffers: list[Stmt] = field(default_factory=list)
    loads: ChainMap[int, Expr] = field(default_factory=ChainMap)  # by the identity of the variable
    lane: Expr | None = None
    lanes: int = 1
    guards: tuple[Expr, ...] = ()
    body: Stmt | None = None
    branches: list[tuple[int, Buffer, list[Stmt]]] | None = None
    interrupts: bool = True

    def inside(self) -> _Frame:
        child = self.loads.new_child()
        if self.lane is None:
            return _Frame(loads=child, interrupts=self.interrupts)
        return replace(self, stmts=[], loads=child, branches=None)


class _Mutator(Protocol):
    """What goes through an expression; it hands over its nodes and itself."""

    def mutate(self, node: Expr) -> Expr: ...

    def default_mutate(self, node: Expr) -> Expr: ...


class _Visitor(Protocol):
    """What goes through a statement."""

    def default_visit(self, node: Expr) -> None: ...


def _visit(stmt: Stmt, frame: _Frame) -> None:
    """Append the statements that stand for ``stmt``."""
    match stmt:
        case S.SeqStmt():
            for each in stmt.seq:
                _visit(each, frame)
        case S.For():
            _visit_loop(stmt, frame)
        case S.IfThenElse():
            condition = _expr(stmt.condition, frame)
            otherwise = None if stmt.else_case is None else _branch(stmt.else_case, frame)
            frame.stmts.append(S.IfThenElse(condition, _branch(stmt.then_case, frame), otherwise))
        case S.AttrStmt():
            body = _branch(stmt.body, frame)
            frame.stmts.append(S.AttrStmt(stmt.node, stmt.attr_key, stmt.value, body))
        case S.BufferStore():
            value = _expr(stmt.value, frame)
            indices = [_expr(i, frame) for i in stmt.indices]
            frame.stmts.append(S.BufferStore(stmt.buffer, value, indices))
        case S.Bind():
            value = _expr(stmt.value, frame)
            position = frame.body is not None and stmt.var.name == POSITION
            apart = position and _is_of_lanes_apart(stmt.var, value, frame)
            if (kept := _define(stmt.var, value, frame, apart)) is not None:
                frame.stmts.append(S.Bind(stmt.var, kept))
        case S.Evaluate():
            frame.stmts.append(S.Evaluate(_expr(stmt.value, frame)))
        case _:
            frame.stmts.append(stmt)


def _visit_loop(stmt: S.For, frame: _Frame) -> None:
    inner = frame.inside()
    vector = stmt.kind == VECTORIZED and frame.lane is None
    if vector:
        inner.lane, inner.lanes = stmt.loop_var, int(stmt.extent)
        inner.body = stmt.body
        inner.branches = [] if frame.interrupts else None
    _visit(stmt.body, inner)
    low, extent = _expr(stmt.min, frame), _expr(stmt.extent, frame)

    def around(var: Var, body: Sequence[Stmt]) -> Stmt:
        kind, bound, notes = stmt.kind, stmt.thread_binding, stmt.annotations
        return S.For(var, low, extent, kind, seq(body), bound, notes, stmt.step)

    if not vector:
        here = [] if frame.lane is not None else inner.buffers
        frame.stmts.append(around(stmt.loop_var, [*here, *inner.stmts]))
        return
    frame.stmts.extend(inner.buffers)
    if not inner.branches:
        frame.stmts.append(around(stmt.loop_var, inner.stmts))
        return
    start, defined = 0, dict[int, S.Bind]()
    for stop, asked, rare in inner.branches:
        frame.stmts.append(_part(around, stmt.loop_var, inner.stmts[start:stop], defined))
        lanes = T.Ramp(T.const(0, "int32"), T.const(1, "int32"), inner.lanes)
        some = T.call_llvm_intrin("int8", "llvm.vector.reduce.umax", asked[lanes])
        then = _part(around, stmt.loop_var, rare, dict(defined))
        frame.stmts.append(S.IfThenElse(T.NE(some, T.const(0, "int8")), then, None))
        start = stop
    frame.stmts.append(_part(around, stmt.loop_var, inner.stmts[start:], defined))


def _part(
    around: Callable[[Var, Sequence[Stmt]], Stmt],
    lane: Var,
    stmts: Sequence[Stmt],
    defined: dict[int, S.Bind],
) -> Stmt:
    """A loop over lanes that does a part of what one did, with variables of its own.

    ``defined``: the definitions of the parts before, to which it adds its own.
    """
    fresh = {lane.id_: T.Var(lane.name, lane.ty)}

    def var(node: Var, _mutator: _Mutator) -> Expr:
        return fresh.get(node.id_, node)

    def renamed(node: Stmt) -> Stmt:
        if isinstance(node, S.Bind):
            value = tvm_ffi.structural_mutate(node.value, [(T.Var, var)])
            fresh[node.var.id_] = T.Var(node.var.name, node.var.ty)
            return S.Bind(fresh[node.var.id_], value)
        result: Stmt = tvm_ffi.structural_mutate(node, [(T.Var, var)])
        return result

    body = [renamed(each) for each in (*defined.values(), *stmts)]
    defined.update((each.var.id_, each) for each in stmts if isinstance(each, S.Bind))
    return around(fresh[lane.id_], body)


def _branch(stmt: Stmt, frame: _Frame) -> Stmt:
    inner = frame.inside()
    _visit(stmt, inner)
    return seq([*(inner.buffers if frame.lane is None else ()), *inner.stmts])


def _expr(value: Expr, frame: _Frame) -> Expr:
    """``value`` with its variables replaced; statements that define them are appended first."""

    def let(node: Expr, mutator: _Mutator) -> Expr:
        kept = []
        while isinstance(node, T.Let):
            if (bound := _define(node.var, mutator.mutate(node.value), frame)) is not None:
                kept.append((node.var, bound))
            node = node.body
        result = mutator.mutate(node)
        for variable, bound in reversed(kept):
            result = T.Let(variable, bound, result)
        return result

    def call(node: Call, mutator: _Mutator) -> Expr:
        if node.op.same_as(_RARE_OP):
            return _rare(node, frame, mutator)
        if not node.op.same_as(_IF_THEN_ELSE):
            return mutator.default_mutate(node)
        condition = mutator.mutate(node.args[0])
        outer = frame.guards
        frame.guards = (*outer, condition)
        then = mutator.mutate(node.args[1])
        frame.guards = (*outer, T.Not(condition))
        otherwise = mutator.mutate(node.args[2])
        frame.guards = outer
        return T.if_then_else(condition, then, otherwise)

    def var(node: Var, _mutator: _Mutator) -> Expr:
        return frame.loads.get(node.id_, node)

    if isinstance(value, (T.IntImm, T.FloatImm)):
        return value
    result: Expr = tvm_ffi.structural_mutate(value, [(T.Let, let), (Call, call), (T.Var, var)])
    return result


def _rare(node: Call, frame: _Frame, mutator: _Mutator) -> Expr:
    """What is seldom computed, in a branch; where none can be, it is computed always."""
    if frame.lane is not None and frame.branches is None:
        return mutator.mutate(node.args[1])
    condition, common = mutator.mutate(node.args[0]), mutator.mutate(node.args[2])
    at = T.const(0, "int32") if frame.lane is None else frame.lane
    result = buffer(frame.lanes, str(node.ty.dtype), "rare", scope="local")
    frame.buffers.append(stack(result))
    frame.stmts.append(S.BufferStore(result, common, [at]))
    inner = frame.inside()
    inner.guards = frame.guards
    value = _expr(node.args[1], inner)
    if frame.branches is None:
        inner.stmts.append(S.BufferStore(result, value, [at]))
        frame.stmts.append(S.IfThenElse(condition, seq([*inner.buffers, *inner.stmts]), None))
        return result[at]
    asked = buffer(frame.lanes, "int8", "asked", scope="local")
    frame.buffers.append(stack(asked))
    truth = T.Select(condition, T.const(1, "int8"), T.const(0, "int8"))
    frame.stmts.append(S.BufferStore(asked, truth, [at]))
    value = T.Select(T.NE(asked[at], T.const(0, "int8")), value, result[at])
    inner.stmts.append(S.BufferStore(result, value, [at]))
    frame.branches.append((len(frame.stmts), asked, inner.stmts))
    return result[at]


def _define(var: Var, value: Expr, frame: _Frame, apart: bool = False) -> Expr | None:
    """Store ``value``; or return what the variable must go on being bound to.

    ``apart``: each lane reads its own, one after another.
    """
    if var.id_ in frame.loads:
        return None
    if not isinstance(value.ty, tvm.ir.PrimType):
        return value  # a pointer
    if kept := isinstance(value, Call) and value.op.same_as(_KEEP_OP):
        value = value.args[0]
    dtype = str(value.ty.dtype)
    # Where a definition in a vectorised loop reads another one, TVM's vectoriser loses the first;
    # and any, where a condition that lanes decide takes the statement behind it apart.
    lanes = frame.lane is not None and (var.name != POSITION or apart)
    if not (kept or lanes or dtype == "bool" or "float" in dtype):
        return value
    if frame.guards and _reads(value):
        value = T.if_then_else(T.all(*frame.guards), value, T.const(0, dtype))
    truth = dtype == "bool"
    if truth:  # a vector of bool in memory is one of bytes
        value = T.Select(value, T.const(1, "int8"), T.const(0, "int8"))
    at = T.const(0, "int32") if frame.lane is None else frame.lane
    buf = buffer(frame.lanes, "int8" if truth else dtype, var.name, scope="local")
    frame.buffers.append(stack(buf))
    frame.stmts.append(S.BufferStore(buf, value, [at]))
    frame.loads[var.id_] = T.NE(buf[at], T.const(0, "int8")) if truth else buf[at]
    return None


def _reads(value: Expr) -> bool:
    found = tvm_ffi.structural_visit(
        value, [(tvm.ir.TensorLoad, lambda _n, _v: tvm_ffi.VisitInterrupt(1))]
    )
    return found is not None


def _variables(value: Expr | Stmt) -> list[Var]:
    found: list[Var] = []
    tvm_ffi.structural_visit(value, [(T.Var, lambda var, _v: found.append(var))])
    return found


def _is_of_lanes_apart(var: Var, value: Expr, frame: _Frame) -> bool:
    """Whether a variable of the vectorised loop differs between lanes, and what reads it is taken
    apart, lane by lane."""
    of_lane = any(each.same_as(frame.lane) for each in _variables(value))
    return of_lane and var.id_ in _read_apart(frame.body, frame.lane)


def _read_apart(body: Stmt | None, lane: Expr | None) -> set[int]:
    """Variables in conditions of expressions, and in statements whose conditions lanes decide or
    that call what takes no vectors."""
    found: set[int] = set()
    of_lanes: set[int] = set()  # what is defined in the loop, and the lane itself

    def bind(node: S.Bind, visitor: _Visitor) -> None:
        of_lanes.add(node.var.id_)
        statement(node, visitor)

    def let(node: T.Let, visitor: _Visitor) -> None:
        of_lanes.add(node.var.id_)
        visitor.default_visit(node)

    def statement(node: Stmt, _visitor: _Visitor) -> None:
        tvm_ffi.structural_visit(node, [(T.Let, let)])
        tested, taken = _tested(node)
        found.update(tested)
        if (tested | taken) & of_lanes:
            found.update(each.id_ for each in _variables(node))

    if isinstance(lane, Var):
        of_lanes.add(lane.id_)
    tvm_ffi.structural_visit(
        body, [(S.Bind, bind), (S.BufferStore, statement), (S.Evaluate, statement)]
    )
    return found


def _tested(statement: Stmt) -> tuple[set[int], set[int]]:
    """Variables in conditions of expressions, and of calls that take single numbers alone."""
    found: set[int] = set()
    taken: set[int] = set()

    def call(node: Call, visitor: _Visitor) -> None:
        if node.op.same_as(_IF_THEN_ELSE):
            found.update(var.id_ for var in _variables(node.args[0]))
        elif isinstance(node.op, tvm.ir.Op) and not _takes_vectors(node.op):
            taken.update(var.id_ for var in _variables(node))
        visitor.default_visit(node)

    tvm_ffi.structural_visit(statement, [(Call, call)])
    return found, taken


def _takes_vectors(op: tvm.ir.Op) -> bool:
    return op.same_as(_REINTERPRET) or bool(op.get_attr("TVectorizable"))


_IF_THEN_ELSE = T.if_then_else(T.Var("c", "bool"), T.const(0, "int32"), T.const(1, "int32")).op
_REINTERPRET = tvm.ir.Op.get("tirx.reinterpret")  # of vectors, too, whatever its attributes say
_KEEP_OP = tvm.ir.Op.get(KEEP)
_RARE_OP = tvm.ir.Op.get(RARE)
