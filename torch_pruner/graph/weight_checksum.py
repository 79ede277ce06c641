"""Checksums of the memory of parameters that are kept in another form: a sample at every call.

Writes that torch's version counter does not see (through ``.data``, numpy, a view of a flat
buffer, another process) are found by content. Reading all of it would cost as much as the network,
so memory is read in turns: in each of ``PHASES`` turns one line of every ``PHASES``, so all of it
once a round. What changes a stretch of a page or more changes a line of every turn. The distance
between lines is a prime number of them, so that columns of a matrix, a regular distance apart, do
not all lie between.

numpy only: what a compiled program computes (``codegen.checksum``), the plan that both share, and
where there is no program, this.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Sequence

LINE = 64
"""Bytes that are read together."""
PHASES = 61
"""Lines of which one is read in a turn, and turns in a round."""
BLOCKS = 256
"""Most lines of one row of the plan in one turn, but for one that is left over."""
BLOCK_ROWS = 128
"""Most rows of what one thread takes at once."""
WORDS = LINE // 8
FIELDS = 6
"""Numbers of one row of the plan: see ``Span.rows``."""
FACTS = 4
"""Numbers that are known of a tensor: see ``codegen.checksum``."""
LINE_KEY = 0x9E3779B97F4A7C15
LANE_KEYS = tuple(
    (LINE_KEY * (2 * k + 3) ^ 0x5851F42D4C957F2D << k) % (1 << 64) | 1 for k in range(WORDS)
)
"""Keys by which lines (by their address) and words are told apart: the same words elsewhere are
another checksum, so that sums over many spans are as good as each of theirs.

Odd: what lanes are multiplied by loses nothing.
"""

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of memory in whole words of 8 bytes: its address and its length in words."""

    address: int
    words: int

    @staticmethod
    def of(address: int, nbytes: int) -> Span:
        """The words in which ``nbytes`` at ``address`` lie: up to 7 bytes more on either side.

        A word lies in one page, so reading it whole is safe.
        """
        first, end = address & ~7, address + nbytes + 7 & ~7
        return Span(first, (end - first) // 8)

    @property
    def lines(self) -> int:
        """Lines of the span; the last one ends with it and may overlap the one before."""
        return -(-self.words // WORDS)

    @property
    def distance(self) -> int:
        """Lines from one that is read to the next; small spans are read in fewer turns."""
        return min(PHASES, self.lines)

    def rows(self) -> list[tuple[int, ...]]:
        """Rows of the plan: (address of the first line in turn 0, bytes from one line to the next,
        address of the last line, lines, turns in which there is one more, turns of a round).

        Spans of less than a line have none: see ``small``.
        """
        if self.words < WORDS:
            return []
        step, last = self.distance * LINE, self.address + (self.words - WORDS) * 8
        each, more = divmod(self.lines, self.distance)
        found: list[tuple[int, ...]] = []
        for first in range(0, each + (more > 0), BLOCKS):
            whole = first + BLOCKS <= each
            counts = (BLOCKS, 0) if whole else (each - first, more)
            found.append((self.address + first * step, step, last, *counts, self.distance))
        return found

    @property
    def small(self) -> bool:
        """Whether the span is less than a line; it is compared as it is."""
        return self.words < WORDS


def plan_of(spans: Sequence[Span]) -> Array:
    """The rows of all spans, one after another: int64 of shape (rows, ``FIELDS``)."""
    rows = [row for span in spans for row in span.rows()]
    return np.array(rows, dtype=np.int64).reshape(-1, FIELDS)


def checksums(plan: Array, phase: int) -> Array:
    """uint64 of each row in one turn, as the compiled program computes them."""
    rows = [[int(field) for field in row] for row in plan]
    return np.array([_row(row, phase) for row in rows], dtype=np.uint64)


@functools.cache
def _lane_keys() -> Array:
    return np.array(LANE_KEYS, dtype=np.uint64)


def _row(row: Sequence[int], phase: int) -> np.uint64:
    """Sum over lines of the products of both halves of each word, mixed with its key."""
    begin, step, last, count, more, distance = row
    turn = phase % distance
    first = np.arange(count + (turn < more), dtype=np.int64) * step + begin + turn * LINE
    at = np.minimum(first, last)
    low = min(begin, last)  # the last line may overlap the one before
    words = (max(begin, last) - low) // 8 + WORDS
    memory = np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(low))
    values = memory[(at[:, None] - low) // 8 + np.arange(WORDS)]
    keys = at.astype(np.uint64)[:, None] * np.uint64(LINE_KEY) + _lane_keys()
    mixed = values ^ keys
    low, high = mixed & np.uint64(0xFFFFFFFF), mixed >> np.uint64(32)
    lanes = (low * high + mixed).sum(axis=0, dtype=np.uint64)
    return np.uint64((lanes * _lane_keys()).sum(dtype=np.uint64))
