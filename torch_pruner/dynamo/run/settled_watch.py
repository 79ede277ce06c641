"""Whether parameters are as they were, asked of the system once they have been quiet for a while.

In: what spans of memory held. Out: a ``SettledWatch``. It reads a sample of the memory as ``Watch``
does; after ``QUIET`` calls it has writes to whole pages noted (``page_writes``) while it reads on
for a round. If nothing differed and nothing was noted all that time, every byte is what it was, and
from then on the notes are asked and only what lies beside whole pages is read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner import fork_locks
from torch_pruner.dynamo.run import page_writes
from torch_pruner.dynamo.run.weight_checks import SAME, State, Watch, read_contents
from torch_pruner.graph.weight_checksum import PHASES, Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.dynamo.run.page_writes import Pages, Range
    from torch_pruner.dynamo.run.weight_checks import Array, Contents, Entry

QUIET = 4
"""Calls without a change before writes are noted: what is trained between calls never is."""
CHANCES = 3
"""How often a note may be of a write that changed nothing: a neighbour's in the same page."""
LEAST_BYTES = 1 << 20
"""Of pages in a row that are worth a question: it takes as long as reading a sample of these."""


class SettledWatch:
    """See the module; otherwise as ``Watch``: it sees all that one sees, and more.

    Safe for concurrent calls.
    """

    def __init__(
        self,
        held: Sequence[Contents],
        entries: Sequence[Entry],
        facts: Array | None = None,
        *,
        alone: bool = True,
    ) -> None:
        """As of ``Watch``. Not ``alone``: others than this process may write to the spans."""
        self._held, self._entries, self._facts = held, entries, facts
        self._sampled = Watch(held, entries, facts)
        self.knows_facts = self._sampled.knows_facts
        self._lock = fork_locks.lock()
        self._chances = CHANCES if alone else 0
        self._quiet = self._read = 0
        # What there is to look at where nothing will be noted any more; else None.
        self.sample = None if alone else self._sampled
        # Pages whose writes are noted, and what is read beside them: while a round is read, after.
        self._noted: tuple[Pages, Watch] | None = None
        self._settled: tuple[Pages, Watch] | None = None

    @property
    def is_settled(self) -> bool:
        """Whether the memory itself is no longer read."""
        return self._settled is not None

    def look(self) -> State:
        """This turn's look. Each call takes the next turn."""
        settled = self._settled
        if settled is not None:
            pages, beside = settled
            return self._doubted(pages) if pages.written() else beside.look()
        if self._noted is not None:
            return self._read_on()
        state = self._sampled.look()
        self._quiet = self._quiet + 1 if state is SAME else 0
        if self._quiet >= QUIET and self._chances:
            self._begin()
        return state

    def unchanged(self) -> bool:
        """Whether everything is as it was, as far as this turn's look goes."""
        return self.look() is State.SAME

    def all_unchanged(self) -> bool:
        """The same for every byte."""
        return self._sampled.all_unchanged()

    def _begin(self) -> None:
        """Have writes noted, if the system does that."""
        with self._lock:
            if self._noted is not None:
                return
            found = page_writes.page_ranges([_range(c.span) for c in self._held])
            ranges = [(first, end) for first, end in found if end - first >= LEAST_BYTES]
            pages = page_writes.watch(ranges)
            if pages is None:
                self._chances, self.sample = 0, self._sampled
                return
            met = [_met(c.span, ranges) for c in self._held]
            pieces = [p for c, r in zip(self._held, met, strict=True) if r for p in _cut(c.span, r)]
            beside = [c for c, r in zip(self._held, met, strict=True) if not r]
            beside += read_contents(pieces, self._entries)
            self._read = 0
            self._noted = pages, Watch(beside, self._entries, self._facts)

    def _read_on(self) -> State:
        """One more turn of the round that begins after writes are noted."""
        with self._lock:
            noted = self._noted
            if noted is None or self._settled is not None:
                return self._sampled.look()
            state = self._sampled.look(self._read)
            if state is not State.SAME or noted[0].written():
                self._forget()
                return state
            self._read += 1
            if self._read == PHASES:
                self._settled = noted
            return state

    def _doubted(self, pages: Pages) -> State:
        """Something was written: perhaps what was there, or what lies in the same page."""
        with self._lock:
            if self._settled is not None and self._settled[0] is pages:
                self._forget()
        return State.SAME if self._sampled.all_unchanged() else State.WRITTEN

    def _forget(self) -> None:
        self._noted = self._settled = None
        self._quiet, self._chances = 0, self._chances - 1
        if not self._chances:
            self.sample = self._sampled


def _range(span: Span) -> Range:
    return span.address, span.address + 8 * span.words


def _met(span: Span, ranges: Sequence[Range]) -> Range | None:
    """The range in which a part of the span lies; there is one at most."""
    first, end = _range(span)
    return next(((a, b) for a, b in ranges if a < end and first < b), None)


def _cut(span: Span, met: Range) -> list[Span]:
    """What of a span lies beside a range."""
    first, end = _range(span)
    pieces = ((first, met[0]), (met[1], end))
    return [Span.of(a, b - a) for a, b in pieces if a < b]
