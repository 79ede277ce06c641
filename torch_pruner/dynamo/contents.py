"""Whether memory still holds what it held: a sample at every call, all of it within a round.

In: spans of memory of CPU tensors. Out: ``Contents``, what each held, and a ``Watch`` over many.
``graph.checksum`` has the plan of what is read, a program of ``codegen.checksum`` reads it.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch_pruner.graph.checksum import BLOCKS, PHASES, Span, checksums, plan_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    Entry = Callable[[int], object]

WORTH_THREADS = 4 * BLOCKS
"""Lines in one turn: fewer are read before another thread has started."""


def span_of(tensor: torch.Tensor) -> Span:
    """The memory from a tensor's first element to its last, whatever lies between them."""
    if not tensor.numel():
        return Span(0, 0)
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return Span.of(tensor.data_ptr(), (last + 1) * tensor.element_size())


@dataclass(frozen=True, slots=True)
class Contents:
    """What a span held: its checksums turn by turn, or its bytes if they are few."""

    span: Span
    sums: tuple[bytes, ...]
    bytes_: bytes = b""


def read_contents(spans: Sequence[Span], entries: Sequence[Entry]) -> list[Contents]:
    """What each span holds: all of it is read. ``entries`` as in ``Watch``."""
    watch = Watch([Contents(span, ()) for span in spans], entries)
    turns = [watch.read(phase) for phase in range(PHASES)]
    found, first = [], 0
    for span in spans:
        end = first + 8 * len(span.rows())
        sums = tuple(turn[first:end] for turn in turns) if end > first else ()
        found.append(Contents(span, sums, _bytes(span) if span.small else b""))
        first = end
    return found


def _bytes(span: Span) -> bytes:
    return ctypes.string_at(span.address, 8 * span.words) if span.words else b""


class _Table(threading.local):
    """What each calling thread hands to the program, and where that writes."""

    given: ctypes.Array[ctypes.c_int64] | None = None
    results: ctypes.Array[ctypes.c_uint64]


class Watch:
    """Looks whether spans hold what they held. Safe for concurrent calls.

    Raises nothing and writes nothing; spans must be readable as long as it is asked.
    """

    def __init__(self, held: Sequence[Contents], entries: Sequence[Entry]) -> None:
        """``entries``: the program's (one thread, all threads), or none where there is none."""
        self._plan = plan_of([c.span for c in held])
        self._entry = None
        if entries:
            lines = sum(-(-c.span.lines // max(c.span.distance, 1)) for c in held)
            self._entry = entries[1 if lines >= WORTH_THREADS else 0]
        self._small = tuple((c.span, c.bytes_) for c in held if c.span.small and c.span.words)
        read = [c.sums for c in held if c.sums]
        self._expected = tuple(map(b"".join, zip(*read, strict=True))) if read else ()
        self._phase = 0
        self._table = _Table()

    def unchanged(self) -> bool:
        """Whether this turn's sample is as it was. Each call takes the next turn."""
        if self._small and any(_bytes(span) != was for span, was in self._small):
            return False
        if not self._expected:
            return True
        phase = self._phase
        self._phase = phase + 1 if phase + 1 < PHASES else 0
        return self.read(phase) == self._expected[phase]

    def all_unchanged(self) -> bool:
        """The same for every byte."""
        return all(self.unchanged() for _ in range(PHASES if self._expected else 1))

    def read(self, phase: int) -> bytes:
        """The checksums of one turn, row by row."""
        if self._entry is None:
            return checksums(self._plan, phase).tobytes()
        table = self._table
        given = table.given
        if given is None:
            rows = len(self._plan)
            results = table.results = (ctypes.c_uint64 * rows)()
            address = ctypes.addressof(results)
            given = (ctypes.c_int64 * 4)(self._plan.ctypes.data, rows, 0, address)
            table.given = given
        given[2] = phase
        self._entry(ctypes.addressof(given))
        return bytes(table.results)
