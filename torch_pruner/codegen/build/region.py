"""One parallel launch for many kernels: threads meet between them instead of being called anew.

A kernel is a sequence of parts: parallel loops, and what one thread does. Each becomes a function.
The parts of consecutive kernels run within one launch, with barriers in between; what follows one
another on one thread needs none, nor do kernels of one phase (``graph/phases.py``). A launch and
its join cost 4 to 5 us, a barrier less than 0.1. How many threads there are is known when the
launch runs. Each takes its share of every loop; where a loop is a round of its own, it then takes
what others have not begun, and threads wait for tasks in place of each other (``stealing.py``). A
serial loop around one parallel loop is a part with steps: all tasks of one before the next one's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import tvm_ffi

from torch_pruner.codegen.build.kernel_object import Division
from torch_pruner.codegen.tir.builders import (
    PARALLEL,
    SERIAL,
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
    from collections.abc import Sequence

    from torch_pruner.codegen.build.stealing import Stealing
    from torch_pruner.codegen.parts.kernel import ScheduledKernel

_LAUNCH, _BARRIER = "pragma_parallel_launch_point", "pragma_parallel_barrier_when_finish"


def parts_of(kernel: ScheduledKernel) -> list[tuple[PrimFunc, Division]]:
    """The parts of a kernel in order; a kernel that cannot be divided is one part, alone.

    Each is a function of the kernel's pointers, and of a task's number and a step's, that returns a
    status.
    """
    pieces = _pieces(kernel.func.body, lambda body: body)
    if pieces is None:
        return [(_function(kernel, kernel.func.body), Division(alone=True))]
    return [
        (_function(kernel, piece, *(around.loop_var for around in loops)), _division(loops))
        for piece, loops in pieces
    ]


def _division(loops: Sequence[S.For]) -> Division:
    tasks, steps = (int(loops[k].extent) if k < len(loops) else None for k in (0, 1))
    return Division(tasks, steps=steps)


# A body, and around it the parallel loop, if there is one, and the loop over its steps.
_Piece = tuple[Stmt, tuple[S.For, ...]]


def _pieces(body: Stmt, wrap: Callable[[Stmt], Stmt]) -> list[_Piece] | None:
    """Pieces of a kernel's body; None where parallel loops lie deeper or share definitions."""
    if isinstance(body, S.AttrStmt):
        return _pieces(body.body, lambda b: wrap(_again(body, b)))
    found: list[_Piece] = []
    statements = list(body.seq) if isinstance(body, S.SeqStmt) else [body]
    for stmt in statements:
        if isinstance(stmt, S.For) and stmt.kind == PARALLEL:
            found.append((wrap(stmt.body), (stmt,)))
        elif (steps := _steps(stmt)) is not None:
            found.append((wrap(steps[0].body), steps))
        elif _parallel_inside(stmt):
            return None
        else:
            found.append((wrap(stmt), ()))
    defines = any(isinstance(s, (S.Bind, S.AllocBuffer, S.DeclBuffer)) for s in statements)
    if not defines:
        return found
    parallel = any(loops for _, loops in found)
    return None if parallel else [(wrap(body), ())]


def _steps(stmt: Stmt) -> tuple[S.For, S.For] | None:
    """A parallel loop and the loop around it, where ``stmt`` is nothing but these."""
    if not isinstance(stmt, S.For) or stmt.kind != SERIAL or str(stmt.loop_var.ty.dtype) != "int32":
        return None
    inner = stmt.body
    if not isinstance(inner, S.For) or inner.kind != PARALLEL or _parallel_inside(inner.body):
        return None
    return inner, stmt


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


def _function(kernel: ScheduledKernel, body: Stmt, *numbers: Var) -> PrimFunc:
    handles, binds = [], []
    for buf in kernel.func.params:
        var = pointer(f"{buf.name}_ptr", str(buf.dtype))
        handles.append(var)
        binds.append(S.DeclBuffer(buf, data=var))
    done = S.Return(T.const(0, "int32"))
    func = T.PrimFunc(
        [*handles, *numbers], S.SeqStmt([*binds, body, done]), ret_type=tvm.ir.PrimType("int32")
    )
    return func.with_attr({"tirx.noalias": True})


Called = Callable[..., Stmt]  # of a thread's number, a task's, and a step's


@dataclass(frozen=True, slots=True)
class Step:
    """A part in a program. ``phase``: with whose kernels it may run; None: with none.

    ``everywhere``: every thread does all of it. ``joins``: it waits for no part of its kernel that
    other threads do. ``own``: it reads or writes the copies of the thread that runs it. ``more``:
    the first thread that does a task more where they cannot be divided evenly.
    """

    part: Division
    call: Called
    phase: int | None = None
    everywhere: bool = False
    joins: bool = True
    own: bool = False
    more: int = 0

    @property
    def single(self) -> bool:
        """Whether one thread does it."""
        return self.part.tasks is None and not self.everywhere


@dataclass(slots=True)
class _Round:
    """What happens between two barriers. ``phase``: whose other kernels may join."""

    phase: int | None
    steps: list[Step]

    @property
    def single(self) -> bool:
        return all(step.single for step in self.steps)

    @property
    def tasks(self) -> int | None:
        """How many tasks it has, each of which any thread may do; None where there are others."""
        if self.single:
            return 1
        (step, *more) = self.steps
        return None if more or step.own or step.everywhere else step.part.tasks

    @property
    def times(self) -> int:
        """How often its tasks are done, all of them before any is done again."""
        steps = self.steps[0].part.steps
        return 1 if steps is None else steps

    def takes(self, step: Step) -> bool:
        """Whether nothing that the step waits for is made here by another thread."""
        if step.part.steps is not None or any(s.part.steps is not None for s in self.steps):
            return False
        if step.single and self.single:
            return True
        return step.joins and step.phase is not None and step.phase == self.phase


def region(steps: Sequence[Step], threads: int = 1, stealing: Stealing | None = None) -> Stmt:
    """Steps in order, by ``threads`` threads where turns say who repeats what.

    ``stealing``: how threads help each other; None: they do not.
    """
    stmts: list[Stmt] = []
    rounds: list[_Round] = []
    for step in steps:
        if step.part.alone:
            copies = threads if step.everywhere else 1
            calls = [step.call(T.const(k, "int32"), None) for k in range(copies)]
            stmts += [*_launched(rounds, threads, stealing), *calls]
            rounds = []
            continue
        if rounds and rounds[-1].takes(step):
            rounds[-1].steps.append(step)
            if rounds[-1].phase != step.phase:
                rounds[-1].phase = None
        else:
            rounds.append(_Round(step.phase, [step]))
    return seq([*stmts, *_launched(rounds, threads, stealing)])


def _launched(rounds: Sequence[_Round], threads: int, stealing: Stealing | None) -> list[Stmt]:
    if all(r.single for r in rounds):
        return [step.call(None, None) for r in rounds for step in r.steps]
    body = []
    for of in rounds:
        if stealing is not None and of.tasks is not None and stealing.takes(of.tasks, of.times):
            body.append(_taken(of, of.tasks, threads, stealing))
        elif of is rounds[-1] or of.steps[0].part.steps is not None:
            body.append(_round(of, threads))
        else:
            body.append(_barrier(_round(of, threads)))
    return [_attribute(_LAUNCH, seq(body))]


def _taken(of: _Round, tasks: int, threads: int, stealing: Stealing) -> Stmt:
    """A round whose tasks threads take as they come, and after which they wait for these."""
    var, at = T.Var("p", "int32"), T.Var("t", "int32")

    def each(task: Expr) -> Stmt:
        if of.single:
            return seq([step.call(None, None) for step in of.steps])
        return of.steps[0].call(None, task, *([at] if many else []))

    many = of.steps[0].part.steps is not None
    done = stealing.done(var, tasks, each, at if many else None)
    stealing.passed(tasks, of.times)
    # A loop of as many iterations as there are threads: each does one, and its number is its own.
    around = S.For(var, 0, threads, PARALLEL, done)
    return S.For(at, 0, of.times, SERIAL, around) if many else around


def _round(of: _Round, threads: int) -> Stmt:
    (step, *more), var = of.steps, T.Var("p", "int32")
    if of.single:
        # A loop of one iteration would be taken for no loop, and every thread would do its work.
        first = T.EQ(var, T.const(0, "int32"))
        return S.For(var, 0, 2, PARALLEL, when(first, seq([s.call(None, None) for s in of.steps])))
    tasks = step.part.tasks
    if tasks is not None and step.part.steps is not None:  # with a meeting after each
        at = T.Var("t", "int32")
        body = S.For(var, 0, tasks, PARALLEL, step.call(None, var, at))
        return S.For(at, 0, step.part.steps, SERIAL, _barrier(body))
    if not more and not step.own and not step.everywhere and tasks is not None:
        return S.For(var, 0, tasks, PARALLEL, step.call(None, var))
    # As many iterations as threads were planned for: however many there are, what belongs to one
    # iteration stays on one thread.
    assert threads > 1
    stmts = []
    for each in of.steps:
        tasks = each.part.tasks
        if each.single:
            stmts.append(when(T.EQ(var, T.const(0, "int32")), each.call(var, None)))
        elif tasks is None:
            stmts.append(each.call(var, None))
        elif each.everywhere:
            stmts.append(_tasks(each.call, var, T.const(0, "int32"), T.const(tasks, "int32")))
        else:
            begin, end = (_bound(var + k, tasks, threads, each.more) for k in (0, 1))
            stmts.append(_tasks(each.call, var, begin, end))
    return S.For(var, 0, threads, PARALLEL, seq(stmts))


def _bound(thread: Expr, tasks: int, threads: int, first: int) -> Expr:
    """The first task of a thread. Those with one task more begin with thread ``first``."""
    each, more = divmod(tasks, threads)
    bound: Expr = thread * T.const(each, "int32")
    if not more:
        return bound
    wrapped = max(first + more - threads, 0)  # of them are the first threads
    reached = T.min(thread - T.const(first, "int32"), T.const(more - wrapped, "int32"))
    bound = bound + T.max(reached, T.const(0, "int32"))
    return bound + T.min(thread, T.const(wrapped, "int32")) if wrapped else bound


def _tasks(call: Called, thread: Expr, begin: Expr, end: Expr) -> Stmt:
    number = T.Var("q", "int32")
    return S.For(number, begin, end - begin, SERIAL, call(thread, number))


def _barrier(body: Stmt) -> Stmt:
    return _attribute(_BARRIER, body)


def _attribute(key: str, body: Stmt) -> Stmt:
    return S.AttrStmt(T.const(0, "int32"), key, T.const(1, "int32"), body)
