"""Weights of four bits as arrays: words of eight, scales of groups, and how they are made. numpy.

A matrix (k, n) is kept as int32 words (ceil(k / 8), n): bits ``4 i`` to ``4 i + 3`` of a word hold
element ``8 row + i`` of its column as a signed number, -8 to 7; what lies past the end is zero. A
column's elements are divided into groups of neighbours along k, each with a scale and perhaps an
offset: the weight is ``number * scale + offset``.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Array = npt.NDArray[Any]

PER_WORD = 8
LEAST, MOST = -8, 7
# The largest magnitude of a group as so many steps: below 8 it is one of the levels or is rounded
# inwards, above it the group is cut off for the sake of the rest.
_STEPS = np.linspace(6.5, 10.5, 17, dtype=np.float32)
_CHUNK = 1 << 16  # elements that a thread rounds at once: they stay in its caches
_THREADS = 4


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
    out = np.empty((-(-weight.shape[0] // PER_WORD), weight.shape[1]), np.int32)

    def some(at: slice) -> None:
        groups = _grouped(weight[:, at], group)
        steps = np.ascontiguousarray(scales[:, at].T, dtype=np.float32)[..., None]
        levels = _rounded(groups, _inverse(steps)).astype(np.int8)
        flat = levels.reshape(len(levels), -1)[:, : weight.shape[0]]
        out[:, at] = packed(flat.T)

    _by_columns(weight, some)
    return out


def packed(levels: Array) -> Array:
    """Numbers (k, n) from -8 to 7 as words."""
    depth, columns = levels.shape
    rows = -(-depth // PER_WORD)
    whole = np.zeros((rows * PER_WORD, columns), np.uint32)
    whole[:depth] = levels.astype(np.uint8) & 15
    lanes = whole.reshape(rows, PER_WORD, columns)
    words = np.zeros((rows, columns), np.uint32)
    for i in range(PER_WORD):
        words |= lanes[:, i] << np.uint32(4 * i)
    return words.view(np.int32)


def unpacked(words: Array, depth: int) -> Array:
    """The numbers (k, n) that ``words`` hold, int8."""
    rows, columns = words.shape
    levels = np.empty((rows, PER_WORD, columns), np.int8)
    for i in range(PER_WORD):
        levels[:, i] = (words << np.int32(28 - 4 * i)) >> np.int32(28)
    return levels.reshape(rows * PER_WORD, columns)[:depth]


def weights_of(words: Array, scales: Array, offsets: Array | None, depth: int, group: int) -> Array:
    """The weights (k, n) that words, scales and offsets stand for, float32."""
    of = np.arange(depth) // group
    weights = unpacked(words, depth).astype(np.float32) * scales.astype(np.float32)[of]
    return weights if offsets is None else weights + offsets.astype(np.float32)[of]


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
    extreme = np.where(high > -low, high, low)
    best_scale = np.zeros_like(extreme)
    best_gain = np.full_like(extreme, -1.0)
    for steps in _STEPS:
        levels = _rounded(groups, _inverse(-extreme[..., None] / steps))
        # The best scale for these levels is along / square; it takes along^2 / square off the error
        # of leaving all of it out.
        along = np.einsum("ngk,ngk->ng", groups, levels)
        square = np.maximum(np.einsum("ngk,ngk->ng", levels, levels), 1e-30)
        gain = along * along / square
        better = gain > best_gain
        best_gain = np.where(better, gain, best_gain)
        best_scale = np.where(better, along / square, best_scale)
    return np.where(np.isfinite(low) & np.isfinite(high), best_scale, np.float32(np.nan))


def _inverse(steps: Array) -> Array:
    return np.where(steps == 0, np.float32(0), np.float32(1) / steps)


def _rounded(groups: Array, inverse: Array) -> Array:
    """The nearest levels, as floats; zero for what has none."""
    levels = groups * inverse
    np.rint(levels, out=levels)
    np.clip(levels, LEAST, MOST, out=levels)
    return np.asarray(np.nan_to_num(levels, copy=False))
