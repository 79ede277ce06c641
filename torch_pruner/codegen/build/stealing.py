"""Emits how threads share out the tasks of a round: each has its own, and takes another's at last.

Shares that are settled beforehand make all threads wait for the latest, which on a shared machine
is whichever the host or another process has interrupted, and on one with cores of two kinds a slow
one. So a thread takes the tasks of its share one by one from the front, in the order in which it
would have done them (what it left in its caches lies there), and then takes others' from the back
("work stealing"; Blumofe and Leiserson, JACM 1999, where the owner works at one end and thieves at
the other).

Every thread has a line of memory with two words, for rounds in turn: the first task that is left
in the low half, the end of them in the high half. Threads fill in the words of the next round
before they meet, so that a thread which sleeps at the meeting is helped, too. A word that nobody
has filled in says that nothing is left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.codegen.tir.builders import (
    Buffer,
    Expr,
    S,
    Stmt,
    T,
    Var,
    importing,
    seq,
    stack,
)
from torch_pruner.graph.memory import STEALING_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

_WORDS = STEALING_BYTES // 8  # from a thread's line to the next

# A task that nobody has taken, -1 if there is none: the first of one's own, the last of another's.
# Nothing is read or written by means of these words: who has done what is settled at meetings.
_TAKE = """
define internal i32 @torch_pruner_take(ptr %words, i32 %thread, i32 %threads) alwaysinline {
entry:
  %first = sext i32 %thread to i64
  %place = mul i64 %first, WORDS
  %own_at = getelementptr i64, ptr %words, i64 %place
  br label %own
own:
  %word = load atomic i64, ptr %own_at monotonic, align 8
  %low = trunc i64 %word to i32
  %high = lshr i64 %word, 32
  %end = trunc i64 %high to i32
  %left = icmp slt i32 %low, %end
  br i1 %left, label %take, label %others
take:
  %less = add i64 %word, 1
  %tried = cmpxchg ptr %own_at, i64 %word, i64 %less monotonic monotonic, align 8
  %taken = extractvalue { i64, i1 } %tried, 1
  br i1 %taken, label %mine, label %own
mine:
  ret i32 %low
others:
  %k = phi i32 [ 1, %own ], [ %next, %on ]
  %more = icmp slt i32 %k, %threads
  br i1 %more, label %look, label %none
look:
  %sum = add i32 %thread, %k
  %other = urem i32 %sum, %threads
  %other64 = sext i32 %other to i64
  %there = mul i64 %other64, WORDS
  %their_at = getelementptr i64, ptr %words, i64 %there
  br label %again
again:
  %theirs = load atomic i64, ptr %their_at monotonic, align 8
  %their_low = trunc i64 %theirs to i32
  %their_high = lshr i64 %theirs, 32
  %their_end = trunc i64 %their_high to i32
  %some = icmp slt i32 %their_low, %their_end
  br i1 %some, label %steal, label %on
steal:
  %without = sub i64 %theirs, 4294967296
  %swapped = cmpxchg ptr %their_at, i64 %theirs, i64 %without monotonic monotonic, align 8
  %stolen = extractvalue { i64, i1 } %swapped, 1
  br i1 %stolen, label %got, label %again
got:
  %last = sub i32 %their_end, 1
  ret i32 %last
on:
  %next = add i32 %k, 1
  br label %others
none:
  ret i32 -1
}
""".replace("WORDS", str(_WORDS))


@dataclass(frozen=True, slots=True)
class Stealing:
    """Of one entry: ``words`` are those of its threads, ``threads`` for how many it is planned."""

    words: Buffer
    threads: int

    def cleared(self) -> Stmt:
        """Before the first launch of a call: nothing is left of any round."""
        thread = T.Var("thread", "int32")
        nothing = [self._filled(thread, turn, T.const(0, "int64")) for turn in (0, 1)]
        return S.For(thread, 0, self.threads, S.ForKind.SERIAL, seq(nothing))

    def shared(self, thread: Expr, turn: int, begin: Expr, end: Expr) -> Stmt:
        """A thread's share of the tasks of a round, before it meets the others, or at first."""
        high = end.astype("int64") * T.const(1 << 32, "int64")
        return self._filled(thread, turn, high + begin.astype("int64"))

    def done(self, thread: Expr, turn: int, body: Callable[[Expr], Stmt]) -> Stmt:
        """``body`` for the tasks that a thread takes, until none is left to anybody."""
        task = T.decl_buffer((1,), "int32", "task", scope="local")
        words = T.address_of(self.words[turn])
        call = T.call_extern(
            "int32", "torch_pruner_take", words, thread, T.const(self.threads, "int32")
        )
        take = S.BufferStore(task, call, [T.const(0, "int32")])
        left = task[0] >= T.const(0, "int32")
        number: Var = T.Var("taken", "int32")
        one = seq([S.Bind(number, task[0]), body(number), take])
        return seq([stack(task), take, S.While(left, one)])

    def imported(self, body: Stmt) -> Stmt:
        """``body`` of an entry, with what ``done`` calls."""
        return importing(_TAKE, body)

    def _filled(self, thread: Expr, turn: int, word: Expr) -> Stmt:
        at = thread * T.const(_WORDS, "int32") + T.const(turn, "int32")
        return S.BufferStore(self.words, word, [at])
