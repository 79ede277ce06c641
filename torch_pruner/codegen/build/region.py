"""One parallel launch for many kernels: threads meet between them instead of being called anew.

A kernel is a sequence of parts: parallel loops, and what one thread does. Each becomes a private
function. The parts of consecutive kernels run within one launch, with a barrier after each; what
follows one another on one thread needs none. A launch and its join cost 4 to 5 us, a barrier less
than 0.1. How many threads there are is known when the launch runs: each takes its share of every
loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import tvm_ffi

from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    Expr,
    PrimFunc,
    S,
    Stmt,
    T,
    Var,
    pointer,
    seq,
    tvm,
    when,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.codegen.parts.kernel import ScheduledKernel

_LAUNCH, _BARRIER = "pragma_parallel_launch_point", "pragma_parallel_barrier_when_finish"


@dataclass(frozen=True, slots=True)
class Part:
    """A private function of a kernel's pointers that returns a status.

    It does one of ``tasks`` tasks and takes its number as well; all of the work where that is None.
    ``alone``: it launches threads by itself.
    """

    func: PrimFunc
    tasks: int | None = None
    alone: bool = False


def parts_of(kernel: ScheduledKernel) -> list[Part]:
    """The parts of a kernel in order; a kernel that cannot be divided is one part, alone."""
    pieces = _pieces(kernel.func.body, lambda body: body)
    if pieces is None:
        return [Part(_function(kernel, kernel.func.body), alone=True)]
    return [
        Part(_function(kernel, piece), None)
        if loop is None
        else Part(_function(kernel, piece, loop.loop_var), int(loop.extent))
        for piece, loop in pieces
    ]


_Piece = tuple[Stmt, S.For | None]  # a body, and the parallel loop around it or None


def _pieces(body: Stmt, wrap: Callable[[Stmt], Stmt]) -> list[_Piece] | None:
    """Pieces of a kernel's body; None where parallel loops lie deeper or share definitions."""
    if isinstance(body, S.AttrStmt):
        return _pieces(body.body, lambda b: wrap(_again(body, b)))
    found: list[_Piece] = []
    statements = list(body.seq) if isinstance(body, S.SeqStmt) else [body]
    for stmt in statements:
        if isinstance(stmt, S.For) and stmt.kind == PARALLEL:
            found.append((wrap(stmt.body), stmt))
        elif _parallel_inside(stmt):
            return None
        else:
            found.append((wrap(stmt), None))
    defines = any(isinstance(s, (S.Bind, S.AllocBuffer, S.DeclBuffer)) for s in statements)
    if not defines:
        return found
    parallel = any(loop is not None for _, loop in found)
    return None if parallel else [(wrap(body), None)]


def _again(around: S.AttrStmt, body: Stmt) -> Stmt:
    return S.AttrStmt(around.node, around.attr_key, around.value, body)


class _Visitor(Protocol):
    """What goes through a statement; it hands over its nodes and itself."""

    def default_visit(self, node: Stmt) -> object: ...


def _parallel_inside(stmt: Stmt) -> bool:
    def visit(loop: S.For, visitor: _Visitor) -> object:
        if loop.kind == PARALLEL:
            return tvm_ffi.VisitInterrupt(1)
        return visitor.default_visit(loop)

    return tvm_ffi.structural_visit(stmt, [(S.For, visit)]) is not None


def _function(kernel: ScheduledKernel, body: Stmt, number: Var | None = None) -> PrimFunc:
    handles, binds = [], []
    for buf in kernel.func.params:
        var = pointer(f"{buf.name}_ptr", str(buf.dtype))
        handles.append(var)
        binds.append(S.DeclBuffer(buf, data=var))
    done = S.Return(T.const(0, "int32"))
    params = handles if number is None else [*handles, number]
    func = T.PrimFunc(params, S.SeqStmt([*binds, body, done]), ret_type=tvm.ir.PrimType("int32"))
    return func.with_attr({"tirx.noalias": True})


@dataclass(slots=True)
class _Round:
    """What happens between two barriers: calls of one part by all threads, or of many by one."""

    tasks: int | None
    calls: list[Callable[[Expr | None], Stmt]] = field(default_factory=list)


def region(parts: Sequence[tuple[Part, Callable[[Expr | None], Stmt]]]) -> Stmt:
    """Parts in order, each with the statement that calls it with a task's number (or None)."""
    stmts: list[Stmt] = []
    rounds: list[_Round] = []
    for part, call in parts:
        if part.alone:
            stmts += [*_launched(rounds), call(None)]
            rounds = []
        elif part.tasks is None and rounds and rounds[-1].tasks is None:
            rounds[-1].calls.append(call)
        else:
            rounds.append(_Round(part.tasks, [call]))
    return seq([*stmts, *_launched(rounds)])


def _launched(rounds: Sequence[_Round]) -> list[Stmt]:
    if all(r.tasks is None for r in rounds):
        return [call(None) for r in rounds for call in r.calls]
    body = [_barrier(_round(r)) for r in rounds[:-1]]
    return [_attribute(_LAUNCH, seq([*body, _round(rounds[-1])]))]


def _round(of: _Round) -> Stmt:
    var = T.Var("p", "int32")
    if of.tasks is not None:
        return S.For(var, 0, of.tasks, PARALLEL, of.calls[0](var))
    # A loop of one iteration would be taken for no loop, and every thread would do its work.
    body = when(T.EQ(var, T.const(0, "int32")), seq([call(None) for call in of.calls]))
    return S.For(var, 0, 2, PARALLEL, body)


def _barrier(body: Stmt) -> Stmt:
    return _attribute(_BARRIER, body)


def _attribute(key: str, body: Stmt) -> Stmt:
    return S.AttrStmt(T.const(0, "int32"), key, T.const(1, "int32"), body)
