"""Blocks of threads, the memory they share, and the barriers between what they do.

A kernel is a sequence of phases: in a phase every thread of a block does its part, and no thread
begins the next one before all have ended this one. On a GPU a phase is code between barriers. On
the host it is a loop over the threads, registers are arrays with a row for each thread, and blocks
run one after another: one schedule, two ways to run it, and the second needs no GPU.

A phase must not depend on the order of its threads: what one writes, another may read only in a
later phase. The loop would hide such a mistake, so a phase ends wherever data changes hands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    SERIAL,
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    Var,
    buffer,
    loop,
    seq,
    tvm,
    widened,
)

if TYPE_CHECKING:
    from collections.abc import Callable

WARP = 32


@dataclass(frozen=True, slots=True)
class Registers:
    """``count`` values of every thread; ``at(tid, i)`` is where thread ``tid`` keeps value i."""

    buffer: Buffer
    count: int
    rows: bool  # one row for each thread, on the host

    def at(self, tid: Expr, i: Expr | int) -> Expr | int:
        return tid * self.count + i if self.rows else i


@dataclass(frozen=True, slots=True)
class Unshared:
    """A phase without a barrier before it.

    It writes nothing that another thread reads in the phase before, and reads nothing that another
    thread writes there.
    """

    do: Callable[[Expr], Stmt]

    def __call__(self, tid: Expr) -> Stmt:
        return self.do(tid)


@dataclass(slots=True)
class Grid:
    """``blocks`` blocks of ``threads`` threads; ``host``: as loops."""

    blocks: int
    threads: int
    host: bool = False
    _held: list[Buffer] = field(default_factory=list)
    _block: Var = field(default_factory=lambda: T.Var("block", "int32"))
    _thread: Var = field(default_factory=lambda: T.Var("thread", "int32"))

    def shared(self, numel: int, dtype: str, name: str) -> Buffer:
        """Memory of a block, for all of its threads."""
        return self._keep(buffer(numel, dtype, name, scope="local" if self.host else "shared"))

    def registers(self, count: int, dtype: str, name: str) -> Registers:
        """``count`` values for each thread, which outlast a phase."""
        rows = self.threads if self.host else 1
        held = self._keep(buffer(count * rows, dtype, name, scope="local"))
        return Registers(held, count, self.host)

    def _keep(self, buf: Buffer) -> Buffer:
        self._held.append(buf)
        return buf

    def phases(self, *each: Callable[[Expr], Stmt], first: bool = True) -> Stmt:
        """Phases one after another, with a barrier before each but the first and ``Unshared`` ones.

        ``first`` False: also before the first one, as in the body of a loop.
        """
        stmts: list[Stmt] = []
        for n, do in enumerate(each):
            apart = n > 0 and not isinstance(do, Unshared)
            if not self.host and (apart or (n == 0 and not first)):
                stmts.append(_barrier())
            stmts.append(self._threads(do))
        return seq(stmts)

    def _threads(self, each: Callable[[Expr], Stmt]) -> Stmt:
        if self.host:
            return loop(self.threads, each, SERIAL, "tid")
        return each(widened(self._thread))

    def launch(self, body: Callable[[Expr], Stmt]) -> Stmt:
        """One launch; a kernel has one or more. ``body`` gets the number of the block and returns
        its phases."""
        inner = body(widened(self._block))
        if self.host:
            return S.For(self._block, 0, self.blocks, SERIAL, seq([*self._allocated(), inner]))
        whole = seq([*self._allocated(), inner])
        threads = _extent("threadIdx.x", self._thread, self.threads, whole)
        return _extent("blockIdx.x", self._block, self.blocks, threads)

    def _allocated(self) -> list[Stmt]:
        return [S.AllocBuffer(buf, annotations=_ANNOTATIONS) for buf in self._held]


_ANNOTATIONS = {"disable_lower_builtin": T.const(1, "bool")}


def _barrier() -> Stmt:
    return S.Evaluate(T.call_intrin("void", "tirx.tvm_storage_sync", "shared"))


def _extent(tag: str, var: Var, extent: int, body: Stmt) -> Stmt:
    """``body`` with ``var`` bound to a coordinate of the launch."""
    axis = T.IterVar(tvm.ir.Range(0, extent), var, 1, tag)  # 1: a thread index
    return S.AttrStmt(axis, "thread_extent", T.const(extent, "int32"), body)


def in_blocks(total: int, per_block: int) -> int:
    """Blocks of ``per_block`` that cover ``total``."""
    return max(1, -(-total // per_block))


def spread(
    threads: int, tid: Expr, total: int, body: Callable[[Expr], Stmt], *, width: int = 1
) -> Stmt:
    """``total`` items among ``threads``, ``width`` neighbours at a time, neighbours to neighbours.

    ``body`` gets the first of ``width`` items; ``width`` divides ``total``.
    """
    groups = total // width
    rounds = in_blocks(groups, threads)

    def one(r: Expr) -> Stmt:
        item = r * threads + tid
        if groups % threads == 0:
            return body(item * width)
        return S.IfThenElse(item < groups, body(item * width), None)

    return loop(rounds, one, SERIAL, "round")
