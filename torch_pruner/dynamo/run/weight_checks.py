"""Whether parameters are as they were: what torch says of each, and a sample of their memory.

In: tensors' facts, and spans of memory of CPU tensors. Out: ``Contents``, what each span held, and
a ``Watch`` over many. ``graph.checksum`` has the plan of what is read, a program of
``codegen.checksum`` reads it.
"""

from __future__ import annotations

import ctypes
import enum
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_pruner.dynamo.run import tensor_impl
from torch_pruner.graph.weight_checksum import (
    BLOCK_ROWS,
    BLOCKS,
    FACTS,
    PHASES,
    Span,
    checksums,
    plan_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    Entry = Callable[[int], object]

Array = npt.NDArray[Any]

WORTH_THREADS = 4 * BLOCKS
"""Lines in one turn: fewer are read before another thread has started."""
BLOCK_LINES = 128
"""Lines that a thread takes at once; facts count as the lines in which they lie."""
_FACT_LINES = 3


class State(enum.Enum):
    """What became of parameters."""

    SAME = enum.auto()
    WRITTEN = enum.auto()  # memory holds something else, though nobody said so
    MOVED = enum.auto()  # they lie elsewhere, or torch says that they were written


# A member of an enumeration is looked up by a function of Python's (3.11), at every call several.
SAME, WRITTEN, MOVED = State.SAME, State.WRITTEN, State.MOVED


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


@dataclass(frozen=True, slots=True)
class _Table:
    """What a calling thread hands to the program, and where that writes."""

    given: ctypes.Array[ctypes.c_int64]
    address: int  # of ``given``
    results: ctypes.Array[ctypes.c_char]
    places: ctypes.Array[ctypes.c_int64]


class _Local(threading.local):
    """What each calling thread has for itself."""

    table: _Table | None = None


def facts_of(tensors: Sequence[torch.Tensor], versions: Sequence[int | None]) -> Array | None:
    """What a program can ask of tensors: int64 of shape (tensors, ``FACTS``).

    A tensor without a version here is not asked for it. None where torch's implementation is
    another than we know.
    """
    if tensor_impl.find() is None:
        return None
    rows = [
        (t._cdata, t.untyped_storage().data_ptr(), t.storage_offset(), -1 if v is None else v)
        for t, v in zip(tensors, versions, strict=True)
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, FACTS)


class Watch:
    """Looks whether spans hold what they held, and tensors are what they were.

    Safe for concurrent calls. Raises nothing and writes nothing; spans must be readable and tensors
    alive as long as it is asked.
    """

    def __init__(
        self, held: Sequence[Contents], entries: Sequence[Entry], facts: Array | None = None
    ) -> None:
        """``entries``: the program's (one thread, all threads), or none where there is none.

        ``facts`` as ``facts_of`` says; without a program nobody looks at them.
        """
        self._plan = plan_of([c.span for c in held])
        self._entry = None
        lines = [-(-c.span.lines // max(c.span.distance, 1)) for c in held]
        if entries:
            self._entry = entries[1 if sum(lines) >= WORTH_THREADS else 0]
        self._facts = np.zeros((0, FACTS), np.int64) if facts is None else facts
        self.knows_facts = facts is not None and self._entry is not None
        self._small = tuple((c.span, c.bytes_) for c in held if c.span.small and c.span.words)
        rows = [c.sums for c in held if c.sums]
        # Until sums are known, each row has its own.
        known = len(rows) == sum(not c.span.small for c in held)
        self._blocks = _blocks(self._plan, len(self._facts), alone=not known)
        self._expected = self._expected_sums(rows) if rows else ()
        self._asked = bool(rows) or self.knows_facts
        self._phase = 0
        self._local = _Local()

    def _expected_sums(self, rows: Sequence[tuple[bytes, ...]]) -> tuple[bytes, ...]:
        """What the program writes in each turn if nothing has changed."""
        turns = (np.frombuffer(b"".join(turn), np.uint64) for turn in zip(*rows, strict=True))
        return tuple(map(self._totals, turns))

    def _totals(self, rows: Array) -> bytes:
        """Results of the program for these checksums of rows, with all facts true."""
        ends = np.concatenate([np.zeros(1, np.uint64), np.cumsum(rows, dtype=np.uint64)])
        totals: Array = ends[self._blocks[1:, 0]] - ends[self._blocks[:-1, 0]]
        return totals.tobytes() + bytes(totals.nbytes)

    def look(self, turn: int | None = None) -> State:
        """This turn's look. Each call takes the next turn, or the one that is given."""
        if self._small and any(_bytes(span) != was for span, was in self._small):
            return WRITTEN
        if not self._asked:
            return SAME
        phase = self._phase if turn is None else turn
        self._phase = phase + 1 if phase + 1 < PHASES else 0
        found = self._results(phase)
        if self._expected and found == self._expected[phase]:
            return SAME
        half = len(found) // 2
        if any(found[half:]):
            return MOVED
        return WRITTEN if self._expected else SAME

    def unchanged(self) -> bool:
        """Whether everything is as it was, as far as this turn's look goes."""
        return self.look() is State.SAME

    def all_unchanged(self) -> bool:
        """The same for every byte."""
        turns = range(PHASES if self._expected else 1)
        return all(self.look(turn) is State.SAME for turn in turns)

    def read(self, phase: int) -> bytes:
        """The checksums of one turn, block by block."""
        found = self._results(phase)
        return found[: len(found) // 2]

    def _results(self, phase: int) -> bytes:
        if self._entry is None:
            return self._totals(checksums(self._plan, phase))
        table = self._local.table
        if table is None:
            table = self._local.table = self._new_table()
        table.given[5] = phase
        self._entry(table.address)
        return table.results.raw

    def _new_table(self) -> _Table:
        count = len(self._blocks) - 1
        results = (ctypes.c_uint64 * (2 * count))()
        layout = tensor_impl.find() if self.knows_facts else None
        words = layout.as_words() if layout else (0,) * 5
        places = (ctypes.c_int64 * len(words))(*words)
        arrays = (a.ctypes.data for a in (self._plan, self._blocks, self._facts))
        given = (ctypes.c_int64 * 7)(
            *arrays, ctypes.addressof(results), count, 0, ctypes.addressof(places)
        )
        written = (ctypes.c_char * ctypes.sizeof(results)).from_buffer(results)
        return _Table(given, ctypes.addressof(given), written, places)


def _blocks(plan: Array, facts: int, *, alone: bool) -> Array:
    """(first row, first fact) of each block, and where the last one ends: int64, C order."""
    starts = [0]
    if alone:
        starts += range(1, len(plan))
    else:
        lines = 0
        for k, row in enumerate(plan):
            if lines >= BLOCK_LINES or k - starts[-1] == BLOCK_ROWS:
                starts.append(k)
                lines = 0
            lines += int(row[3]) + (row[4] > 0)
    pieces = max(len(starts), -(-facts * _FACT_LINES // BLOCK_LINES))
    starts += [len(plan)] * (pieces - len(starts) + 1)
    ends = [facts * k // pieces for k in range(pieces + 1)]
    return np.ascontiguousarray(np.array([starts, ends], dtype=np.int64).T)
