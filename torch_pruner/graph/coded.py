"""bfloat16 in twelve bits, as arrays: what each number becomes, and back. numpy.

The upper byte of a bfloat16 has the sign and most of the exponent. Weights use few of those: the
sixteen commonest of a tensor are its table, and a number is kept as its lower byte and the number
of its upper byte in the table, four bits. Where a block of numbers has others the difference (an
exclusive or) of its upper bytes to what its codes stand for is kept beside, as a patch: nothing is
lost, whatever the numbers are.

A block is eight vectors of neighbours along the reduction. In words of sixteen bits:

* ``blocks`` of each column: sixteen bytes for each eight lanes, lower ones first, then codes. Bytes
  lie so that interleaving lower and upper ones, within sixteen bytes each, and then taking even and
  odd words makes vectors of neighbours.
* ``patch``: for each block the number of its patch, 0 for none.
* ``table``, and ``patches``, of which the first has zeros alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

VECTORS = 8
"""Vectors of a block."""
SPARE = 8
"""A block of so many may have a patch."""
TABLE = 16
_LINE = 32  # words
_MOST = 2**16  # patches that a word counts
_SAMPLE = 1 << 18
_BLOCK = 16 * VECTORS  # numbers of the longest vectors
_CHUNK = 1 << 16  # elements at once: a part of a second cache
_LOWER = np.uint64(0x00FF00FF00FF00FF)


class NotCodedError(ValueError):
    """Too many numbers have an upper byte that is not in the table."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parts of a coded operand lie, in words; its columns are ``depth`` long."""

    columns: int
    depth: int
    lanes: int

    @property
    def each(self) -> int:
        """Blocks of a column."""
        return -(-self.depth // (VECTORS * self.lanes))

    @property
    def block(self) -> int:
        """Words of a block: six bytes for each lane's four lower bytes and four codes."""
        return 6 * self.lanes

    @property
    def patch(self) -> int:
        """The first word of the numbers of patches."""
        return self.columns * self.each * self.block

    @property
    def table(self) -> int:
        """The first word of the table."""
        return self.patch + -(-self.columns * self.each // _LINE) * _LINE

    @property
    def patches(self) -> int:
        """The first word of the patches."""
        return self.table + _LINE

    @property
    def most(self) -> int:
        """Patches that there is room for, the one of zeros included."""
        return min(_MOST, 1 + -(-self.columns * self.each // SPARE))

    @property
    def words(self) -> int:
        """All of it."""
        return self.patches + self.most * 4 * self.lanes


def codes_well(upper: Array) -> bool:
    """Whether few upper bytes are not among sixteen, judged by a sample.

    However they are divided into blocks, half of the room for patches is left: numbers that change
    a little still code. Who codes them has the last word.
    """
    counts = np.sort(np.bincount(_sample(upper), minlength=256))
    return bool(2 * SPARE * _BLOCK * counts[:-TABLE].sum() <= counts.sum())


def _sample(upper: Array) -> Array:
    """Elements from all over one axis, an odd distance apart: rarely all of some columns alone."""
    return upper[:: max(1, len(upper) // _SAMPLE) | 1]


def _table(bits: Array) -> Array:
    """The sixteen commonest upper bytes of a sample of numbers (k, n), in increasing order."""
    flat = bits.reshape(-1) if bits.flags.c_contiguous else bits.T.reshape(-1)
    counts = np.bincount(_sample(flat) >> np.uint16(8), minlength=256)
    return np.sort(np.argsort(-counts, kind="stable")[:TABLE]).astype(np.uint8)


def coded(operand: Array, lanes: int, out: Array) -> None:
    """Code ``operand`` (k, n) of sixteen bits into ``out``, as many words as ``Places`` has.

    Raises ``NotCodedError`` where there is no room for what is not in the table.
    """
    depth, columns = operand.shape
    at = Places(columns, depth, lanes)
    bits = operand.view(np.uint16)
    table = _table(bits)
    code_of = np.zeros(256, np.uint8)
    code_of[table] = np.arange(TABLE)
    blocks = out[: at.patch].reshape(columns * at.each, at.block).view(np.uint8)
    numbers = out[at.patch : at.patch + len(blocks)]
    patches = out[at.patches : at.words].reshape(at.most, 4 * lanes).view(np.uint8)
    out[at.patch : at.patches] = 0
    out[at.table : at.table + TABLE // 2] = table.view(np.uint16)
    patches[0] = 0
    taken, some = 1, max(1, _CHUNK // (at.each * VECTORS * lanes))
    padded = np.full((some, at.each * VECTORS * lanes), int(table[0]) << 8, np.uint16)
    for first in range(0, columns, some):
        count = min(some, columns - first)
        padded[:count, :depth] = bits[:, first : first + count].T
        low, high = _arranged(padded[:count], lanes)
        code = np.take(code_of, high)
        wrong = np.take(table, code) ^ high
        rows = np.flatnonzero(wrong.any(axis=(1, 2)))
        if taken + len(rows) > at.most:
            raise NotCodedError(f"weights of {list(operand.shape)} have too many exponents")
        here = slice(first * at.each, (first + count) * at.each)
        blocks[here, : 8 * lanes] = low.reshape(len(low), -1)
        blocks[here, 8 * lanes :] = code[:, 0] | code[:, 1] << np.uint8(4)
        numbers[here][rows] = np.arange(taken, taken + len(rows))
        patches[taken : taken + len(rows)] = wrong[rows].reshape(len(rows), 8 * lanes)
        taken += len(rows)


def used(words: Array, at: Places) -> int:
    """Words up to the last patch."""
    last = int(words[at.patch : at.table].max())
    return at.patches + (last + 1) * 4 * at.lanes


def decoded(words: Array, columns: int, depth: int, lanes: int) -> Array:
    """The numbers (k, n) that ``coded`` was given, as words."""
    at = Places(columns, depth, lanes)
    blocks = words[: at.patch].reshape(columns * at.each, at.block).view(np.uint8)
    patches = words[at.patches : at.words].reshape(at.most, 4 * lanes).view(np.uint8)
    table = words[at.table : at.table + TABLE // 2].view(np.uint8)
    codes = blocks[:, 8 * lanes :]
    code = np.concatenate([codes & 15, codes >> 4], axis=1)
    high = table[code] ^ patches[words[at.patch : at.patch + len(blocks)]]
    pairs = np.stack([blocks[:, : 8 * lanes], high], axis=-1).view(np.uint16)
    # (block, unit, 128 bits, half, i, parity) -> (block, unit, half, parity, 128 bits, i)
    shape = (len(blocks), 2, lanes // 4, 2, 4, 2)
    ordered = pairs.reshape(shape).transpose(0, 1, 3, 5, 2, 4)
    return np.ascontiguousarray(ordered).reshape(columns, -1)[:, :depth].T


def _arranged(numbers: Array, lanes: int) -> tuple[Array, Array]:
    """Lower and upper bytes (block, unit, bytes of a vector) of whole blocks in their order."""
    # (block, unit, half, even or odd, 128 bits) of four numbers, the first in the lowest bits
    fours = numbers.view("<u8").reshape(-1, 2, 2, 2, lanes // 4)
    even, odd = fours[:, :, :, 0], fours[:, :, :, 1]
    eight = np.uint64(8)
    lower = (even & _LOWER) | (odd & _LOWER) << eight
    upper = (even >> eight & _LOWER) | (odd & ~_LOWER)
    return _by_lanes(lower), _by_lanes(upper)


def _by_lanes(eights: Array) -> Array:
    """Bytes (block, unit, bytes of a vector) of eights (block, unit, half, 128 bits)."""
    ordered = np.ascontiguousarray(eights.swapaxes(2, 3))
    return ordered.view(np.uint8).reshape(len(eights), 2, -1)
