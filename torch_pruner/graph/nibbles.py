"""Weights of four or eight bits as arrays: words, scales of groups, how they are made. numpy.

A matrix (k, n) of numbers of four bits is kept as int32 words (ceil(k / 8), n): bits ``4 i`` to
``4 i + 3`` of a word hold element ``8 row + i`` of its column as a signed number, -8 to 7; what
lies past the end is zero. Of numbers of eight bits a word has four. A column's elements are divided
into groups of neighbours along k, each with a scale and perhaps an offset: the weight is
``number * scale + offset``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Array = npt.NDArray[Any]

WORD = 32  # bits
CONVERTED, LOOKED_UP, IN_MANTISSA, DIGITS = range(4)
"""How kernels make floats of numbers of a word: see ``codegen.parts.nibbles``; or multiply numbers
with digits of the first operand: see ``families.int4_rows.digits``."""
LEAST, MOST = -8, 7
# The largest magnitude of a group as so many steps: below 8 it is one of the levels or is rounded
# inwards, above it the group is cut off for the sake of the rest.
_STEPS = np.linspace(6.5, 10.5, 17, dtype=np.float32)
_CHUNK = 1 << 17  # elements that a thread rounds at once: they stay in its caches
_THREADS = 4


def per_word(bits: int) -> int:
    """Numbers in a word."""
    return WORD // bits


def scales_of(weight: Array, group: int) -> Array:
    """The scale of each group of ``weight`` (k, n), float32 (ceil(k / group), n).

    Of seventeen steps it is the one that leaves the least mean squared error, and that step made
    better by least squares. It is negative where the largest magnitude is positive, so that -8,
    which 8 has no equal of, is used for it. A group with NaN or infinity has the scale NaN.
    """
    out = np.empty((-(-weight.shape[0] // group), weight.shape[1]), np.float32)

    def some(at: slice) -> None:
        out[:, at] = _best(_grouped(weight[:, at], group)).T

    _by_columns(weight, some)
    return out


def words_of(weight: Array, scales: Array, group: int) -> Array:
    """``weight`` (k, n) rounded to the nearest level of its group, as words."""
    out = np.empty((-(-weight.shape[0] // per_word(4)), weight.shape[1]), np.int32)

    def some(at: slice) -> None:
        groups = _grouped(weight[:, at], group)
        steps = np.ascontiguousarray(scales[:, at].T, dtype=np.float32)[..., None]
        levels = _rounded(groups, _inverse(steps), np.empty_like(groups)).astype(np.int8)
        flat = levels.reshape(len(levels), -1)[:, : weight.shape[0]]
        out[:, at] = packed(flat.T)

    _by_columns(weight, some)
    return out


def packed(levels: Array, bits: int = 4) -> Array:
    """Signed numbers (k, n) of so many bits as words."""
    depth, columns = levels.shape
    each = per_word(bits)
    rows = -(-depth // each)
    words = np.zeros((rows, columns), np.uint32)
    for i in range(each):
        given = levels[i::each].astype(np.uint8).astype(np.uint32) & np.uint32(2**bits - 1)
        words[: len(given)] |= given << np.uint32(bits * i)
    return words.view(np.int32)


def unpacked(words: Array, depth: int, bits: int = 4) -> Array:
    """The numbers (k, n) that ``words`` hold, int8."""
    rows, columns = words.shape
    each = per_word(bits)
    levels = np.empty((rows, each, columns), np.int8)
    for i in range(each):
        levels[:, i] = (words << np.int32(WORD - bits * (i + 1))) >> np.int32(WORD - bits)
    return levels.reshape(rows * each, columns)[:depth]


def weights_of(
    words: Array, scales: Array, offsets: Array | None, depth: int, group: int, bits: int = 4
) -> Array:
    """The weights (k, n) that words, scales and offsets stand for, float32."""
    of = np.arange(depth) // group
    weights = unpacked(words, depth, bits).astype(np.float32) * scales.astype(np.float32)[of]
    return weights if offsets is None else weights + offsets.astype(np.float32)[of]


def from_torch(given: Array, block: int) -> Array:
    """The numbers (k, n), -8 to 7, of torch's own packing for CPUs: uint8 (n, k / 2).

    Of ``block`` columns a row of the reduction is ``block / 2`` bytes, column ``j`` in the lower
    half of byte ``j``, column ``j + block / 2`` in the upper. Of the columns that are left, and of
    all where ``block`` is 0, it has the neighbours ``2 j`` and ``2 j + 1``. Stored is 8 more.
    """
    columns, depth = given.shape[0], 2 * given.shape[1]
    whole = columns // block * block if block else 0
    out = np.empty((depth, columns), np.int8)
    if whole:
        rows = given[:whole].reshape(whole // block, depth, block // 2)
        halves = np.concatenate([rows & 15, rows >> 4], axis=2)
        out[:, :whole] = halves.transpose(1, 0, 2).reshape(depth, whole)
    if whole < columns:
        pairs = given[whole:].reshape(depth, (columns - whole) // 2)
        out[:, whole:] = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(depth, -1)
    out -= 8
    return out


def _grouped(weight: Array, group: int) -> Array:
    """``weight`` (k, n) as float32 (n, groups, group), filled up with zeros."""
    depth, columns = weight.shape
    groups = -(-depth // group)
    if depth == groups * group:
        return np.ascontiguousarray(weight.T, dtype=np.float32).reshape(columns, groups, group)
    out = np.zeros((columns, groups * group), np.float32)
    out[:, :depth] = weight.T
    return out.reshape(columns, groups, group)


def _by_columns(weight: Array, work: Callable[[slice], None]) -> None:
    depth, columns = weight.shape
    each = max(1, _CHUNK // max(1, depth))
    parts: Iterable[slice] = (slice(a, min(a + each, columns)) for a in range(0, columns, each))
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(_quietly(work), parts))


def _quietly(work: Callable[[slice], None]) -> Callable[[slice], None]:
    """NaN and division by zero have answers here; numpy's settings are of a thread."""

    def run(part: slice) -> None:
        with np.errstate(all="ignore"):
            work(part)

    return run


def _best(groups: Array) -> Array:
    """The scales (n, groups) of ``groups`` (n, groups, group)."""
    low, high = groups.min(axis=2), groups.max(axis=2)
    finite = np.isfinite(low) & np.isfinite(high)
    if not finite.all():
        groups = np.where(finite[..., None], groups, np.float32(0))
    extreme = np.where(high > -low, high, low)
    levels = np.empty_like(groups)
    best_scale = np.zeros_like(extreme)
    best_gain = np.full_like(extreme, -1.0)
    for steps in _STEPS:
        _rounded(groups, _inverse(-extreme[..., None] / steps), levels)
        # The best scale for these levels is along / square; it takes along^2 / square off the error
        # of leaving all of it out.
        along = np.einsum("ngk,ngk->ng", groups, levels)
        square = np.maximum(np.einsum("ngk,ngk->ng", levels, levels), 1e-30)
        gain = along * along / square
        better = gain > best_gain
        best_gain = np.where(better, gain, best_gain)
        best_scale = np.where(better, along / square, best_scale)
    return np.where(finite, best_scale, np.float32(np.nan))


def _inverse(steps: Array) -> Array:
    return np.where(steps == 0, np.float32(0), np.float32(1) / steps)


def _rounded(groups: Array, inverse: Array, out: Array) -> Array:
    """The nearest levels, as floats, in ``out``; zero for what has none."""
    np.multiply(groups, inverse, out=out)
    np.rint(out, out=out)
    np.clip(out, LEAST, MOST, out=out)
    # Infinity times zero, or NaN itself: rare, and to look for them costs more than to round.
    if not np.isfinite(out.sum()):
        np.nan_to_num(out, copy=False)
    return out
