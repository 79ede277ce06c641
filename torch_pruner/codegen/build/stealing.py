"""Emits how threads share out the tasks of a round, and wait for tasks and not for each other.

Shares that are settled beforehand, and barriers, make all threads wait for the latest: on a shared
machine whichever the host or another process has interrupted, on one with cores of two kinds a slow
one. So a thread takes the tasks of its share one by one from the front, in the order in which it
would have done them (what it left in its caches lies there), and then takes others' from the back
("work stealing"; Blumofe and Leiserson, JACM 1999, where the owner works at one end and thieves at
the other). A round is over when its tasks are done. A thread that was interrupted between two tasks
holds up nobody: when it comes back it finds the rounds that others have gone through, and joins
them.

Every thread has a line of memory with one word: a round, the first task of its share that is left,
and the end of them. Shares follow from the number of tasks, so whoever is the first to take of one
in a round fills it in. A last line counts the tasks that were done since the call began.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_pruner.codegen.build.waiting import pause_of
from torch_pruner.codegen.tir.builders import Buffer, Expr, S, Stmt, T, Var, importing, seq, stack
from torch_pruner.graph.memory import STEALING_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.target import TargetSpec

_WORDS = STEALING_BYTES // 8  # from a thread's line to the next
MOST_TASKS, MOST_ROUNDS = (1 << 20) - 1, (1 << 24) - 1  # what a word has room for
_PAUSES = 1 << 12  # of a thread that waits, before it lets others have its core

# take: a task that nobody has taken, -1 if there is none: the first of one's own share, the last of
# another's. finish: says how many tasks a thread has done, and waits until as many are done as were
# to be done up to the end of the round. What tasks write is seen by who has waited for them.
_CODE = """
DECLARED
declare i32 @sched_yield()

define internal i32 @torch_pruner_take(ptr %lines, i32 %self, i32 %threads, i32 %round, i32 %tasks)
    noinline {
entry:
  %each = udiv i32 %tasks, %threads
  %more = urem i32 %tasks, %threads
  %round64 = zext i32 %round to i64
  %tag = shl i64 %round64, 40
  br label %look
look:
  %k = phi i32 [ 0, %entry ], [ %next, %on ]
  %sum = add i32 %self, %k
  %thread = urem i32 %sum, %threads
  %thread64 = zext i32 %thread to i64
  %place = mul i64 %thread64, WORDS
  %at = getelementptr i64, ptr %lines, i64 %place
  %share = mul i32 %thread, %each
  %ahead = call i32 @llvm.umin.i32(i32 %thread, i32 %more)
  %first = add i32 %share, %ahead
  %one = icmp ult i32 %thread, %more
  %extra = zext i1 %one to i32
  %until = add i32 %first, %each
  %behind = add i32 %until, %extra
  br label %again
again:
  %word = load atomic i64, ptr %at monotonic, align 8
  %known = lshr i64 %word, 40
  %late = icmp ugt i64 %known, %round64
  br i1 %late, label %none, label %open
open:
  %filled = icmp eq i64 %known, %round64
  %shifted = lshr i64 %word, 20
  %low = trunc i64 %shifted to i32
  %low_left = and i32 %low, 1048575
  %high = trunc i64 %word to i32
  %high_left = and i32 %high, 1048575
  %begin = select i1 %filled, i32 %low_left, i32 %first
  %end = select i1 %filled, i32 %high_left, i32 %behind
  %left = icmp ult i32 %begin, %end
  br i1 %left, label %claim, label %on
claim:
  %own = icmp eq i32 %k, 0
  %begin_next = add i32 %begin, 1
  %end_before = sub i32 %end, 1
  %task = select i1 %own, i32 %begin, i32 %end_before
  %new_begin = select i1 %own, i32 %begin_next, i32 %begin
  %new_end = select i1 %own, i32 %end, i32 %end_before
  %begin64 = zext i32 %new_begin to i64
  %begin_up = shl i64 %begin64, 20
  %end64 = zext i32 %new_end to i64
  %both = or i64 %begin_up, %end64
  %new = or i64 %tag, %both
  %tried = cmpxchg ptr %at, i64 %word, i64 %new monotonic monotonic, align 8
  %taken = extractvalue { i64, i1 } %tried, 1
  br i1 %taken, label %got, label %again
got:
  ret i32 %task
on:
  %next = add i32 %k, 1
  %others = icmp ult i32 %next, %threads
  br i1 %others, label %look, label %none
none:
  ret i32 -1
}

define internal i32 @torch_pruner_finish(ptr %done, i32 %number, i64 %target) noinline {
entry:
  %some = icmp ne i32 %number, 0
  br i1 %some, label %count, label %wait
count:
  %number64 = zext i32 %number to i64
  %before = atomicrmw add ptr %done, i64 %number64 acq_rel, align 8
  br label %wait
wait:
  %looks = phi i32 [ 0, %entry ], [ 0, %count ], [ %again, %short ], [ %looks, %long ]
  %seen = load atomic i64, ptr %done acquire, align 8
  %over = icmp uge i64 %seen, %target
  br i1 %over, label %return, label %late
late:
  %again = add i32 %looks, 1
  %patient = icmp ult i32 %again, PAUSES
  br i1 %patient, label %short, label %long
short:
  PAUSE
  br label %wait
long:
  %ignored = call i32 @sched_yield()
  br label %wait
return:
  ret i32 0
}
"""


@dataclass(slots=True)
class Stealing:
    """Of one entry: ``lines`` are those of its threads and the last one, ``threads`` for how many
    it is planned. Rounds are numbered, and their tasks counted, in the order of the calls."""

    lines: Buffer
    threads: int
    target: TargetSpec
    _round: int = field(default=0, init=False)
    _tasks: int = field(default=0, init=False)

    def takes(self, tasks: int, steps: int = 1) -> bool:
        """Whether a word has room for the tasks and the numbers of the rounds that come next."""
        return tasks <= MOST_TASKS and self._round + steps <= MOST_ROUNDS

    def cleared(self) -> Stmt:
        """Before the first launch of a call: nothing was taken, nothing is done."""
        line = T.Var("line", "int32")
        at = line * T.const(_WORDS, "int32")
        nothing = S.BufferStore(self.lines, T.const(0, "int64"), [at])
        return S.For(line, 0, self.threads + 1, S.ForKind.SERIAL, nothing)

    def done(
        self, thread: Expr, tasks: int, body: Callable[[Expr], Stmt], step: Expr | None = None
    ) -> Stmt:
        """A round of so many tasks, as ``thread`` sees it: ``body`` for those that it takes, until
        all are done. ``step``: which of a loop's rounds it is, from 0; ``passed`` comes after it.
        """
        task, number = (T.decl_buffer((1,), "int32", name, scope="local") for name in ("task", "n"))
        zero, one = T.const(0, "int32"), T.const(1, "int32")
        past: Expr = step if step is not None else zero
        round_ = past + T.const(self._round + 1, "int32")
        given = (T.const(self.threads, "int32"), round_, T.const(tasks, "int32"))
        lines = T.address_of(self.lines[0])
        take = S.BufferStore(
            task, T.call_extern("int32", "torch_pruner_take", lines, thread, *given), [zero]
        )
        taken: Var = T.Var("taken", "int32")
        counted = S.BufferStore(number, number[0] + one, [zero])
        each = seq([S.Bind(taken, task[0]), body(taken), counted, take])
        target = past.astype("int64") * T.const(tasks, "int64")
        target = target + T.const(self._tasks + tasks, "int64")
        last = T.address_of(self.lines[self.threads * _WORDS])
        finish = T.call_extern("int32", "torch_pruner_finish", last, number[0], target)
        begin = [stack(task), stack(number), S.BufferStore(number, zero, [zero]), take]
        return seq([*begin, S.While(task[0] >= zero, each), S.Evaluate(finish)])

    def passed(self, tasks: int, steps: int = 1) -> None:
        """What comes next is behind ``steps`` rounds of so many tasks."""
        self._round += steps
        self._tasks += tasks * steps

    def imported(self, body: Stmt) -> Stmt:
        """``body`` of an entry, with what ``done`` calls."""
        pause, declared = pause_of(self.target)
        code = _CODE.replace("DECLARED", declared).replace("WORDS", str(_WORDS))
        return importing(code.replace("PAUSES", str(_PAUSES)).replace("PAUSE", pause), body)
