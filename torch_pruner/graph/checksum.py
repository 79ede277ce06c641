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
"""Most lines of one row of the plan, which one thread reads in one turn."""
WORDS = LINE // 8
FIELDS = 4
"""Numbers of one row of the plan: address, words, distance between lines, first line over it."""
LINE_KEY = 0x9E3779B97F4A7C15
LANE_KEYS = tuple(
    (LINE_KEY * (2 * k + 3) ^ 0x5851F42D4C957F2D << k) % (1 << 64) | 1 for k in range(WORDS)
)
"""Keys by which lines and words are told apart: the same words elsewhere are another checksum.

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

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Rows of the plan. Spans of less than a line have none: see ``small``."""
        if self.words < WORDS:
            return []
        count = -(-self.lines // self.distance)
        return [(self.address, self.words, self.distance, b) for b in range(0, count, BLOCKS)]

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
    return np.array([_row(a, w, d, first, phase) for a, w, d, first in rows], dtype=np.uint64)


@functools.cache
def _lane_keys() -> Array:
    return np.array(LANE_KEYS, dtype=np.uint64)


def _row(address: int, words: int, distance: int, first: int, phase: int) -> np.uint64:
    """Sum over lines of the products of both halves of each word, mixed with its key."""
    lines = -(-words // WORDS)
    memory = np.ctypeslib.as_array((ctypes.c_uint64 * words).from_address(address))
    chosen = np.arange(first, first + BLOCKS, dtype=np.int64) * distance + phase % distance
    chosen = chosen[chosen < lines]
    at = np.minimum(chosen * WORDS, words - WORDS)
    values = memory[at[:, None] + np.arange(WORDS)]
    keys = chosen.astype(np.uint64)[:, None] * np.uint64(LINE_KEY) + _lane_keys()
    mixed = values ^ keys
    low, high = mixed & np.uint64(0xFFFFFFFF), mixed >> np.uint64(32)
    lanes = (low * high + mixed).sum(axis=0, dtype=np.uint64)
    return np.uint64((lanes * _lane_keys()).sum(dtype=np.uint64))
