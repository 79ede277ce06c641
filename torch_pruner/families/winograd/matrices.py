"""Matrices of minimal filtering in one dimension: three taps, two or four neighbouring results,
and two taps, two results.

``y = A^T [(G g) * (B^T d)]``: ``B^T`` transforms the inputs, ``G`` the taps, ``A^T`` back. Of two
results they add and halve; of two taps they add. Those of four come from the polynomial that
interpolates at 0, two pairs of opposite points and infinity (Cook and Toom). What they round grows
with the points: 5/8 and 3/2 have the smallest error of the pairs that were tried, a half of that of
1/2 and 2 (docs/experiments.md), and all of ``A^T`` and ``B^T`` is exact in float32.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

TAPS, PAIR, RESULTS, MORE_RESULTS = 3, 2, 2, 4
POINTS = Fraction(5, 8), Fraction(3, 2)

Matrix = tuple[tuple[float, ...], ...]
Exact = tuple[tuple[Fraction, ...], ...]
_ONE: Matrix = ((1.0,),)
_INPUT: Matrix = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
_WEIGHT: Matrix = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
_OUTPUT: Matrix = ((1, 1, 1, 0), (0, 1, -1, -1))


class Transforms(NamedTuple):
    """The matrices of one dimension. ``input`` and ``output`` are factors, the first to be applied
    first: what opposite points share is computed once."""

    input: tuple[Matrix, ...]
    weight: Matrix
    output: tuple[Matrix, ...]


def transforms(tile: int) -> Transforms:
    """Of tiles with so many inputs: three (of two taps), four, six, or one where a kernel has a
    single tap."""
    if tile == 1:
        return Transforms((_ONE,), _ONE, (_ONE,))
    if tile == PAIR + RESULTS - 1:
        return _OF_PAIR
    return _OF_FOUR if tile == TAPS + MORE_RESULTS - 1 else _OF_TWO


def input_factors(a: Fraction, b: Fraction) -> tuple[Exact, Exact]:
    """``B^T`` for the points 0, a, -a, b, -b and infinity: even and odd parts, then their sums."""
    zero, one, p, q = Fraction(0), Fraction(1), a * a, b * b
    first = (
        (p * q, zero, -(p + q), zero, one, zero),
        (zero, zero, -q, zero, one, zero),
        (zero, -q, zero, one, zero, zero),
        (zero, zero, -p, zero, one, zero),
        (zero, -p, zero, one, zero, zero),
        (zero, p * q, zero, -(p + q), zero, one),
    )
    second = (
        (one, zero, zero, zero, zero, zero),
        (zero, one, a, zero, zero, zero),
        (zero, one, -a, zero, zero, zero),
        (zero, zero, zero, one, b, zero),
        (zero, zero, zero, one, -b, zero),
        (zero, zero, zero, zero, zero, one),
    )
    return first, second


def weight_matrix(a: Fraction, b: Fraction) -> Exact:
    """``G`` for these points: the taps' polynomial there, over the differences of the points."""
    p, q = a * a, b * b
    rows = [(Fraction(1), Fraction(0), p * q)]
    rows += [(Fraction(1), x, 2 * p * (p - q)) for x in (a, -a)]
    rows += [(Fraction(1), x, 2 * q * (q - p)) for x in (b, -b)]
    finite = tuple((one / over, x / over, x * x / over) for one, x, over in rows)
    return (*finite, (Fraction(0), Fraction(0), Fraction(1)))


def output_factors(a: Fraction, b: Fraction) -> tuple[Exact, Exact]:
    """``A^T``: sums and differences of opposite points, then their powers."""
    zero, one = Fraction(0), Fraction(1)
    first = (
        (one, zero, zero, zero, zero, zero),
        (zero, one, one, zero, zero, zero),
        (zero, one, -one, zero, zero, zero),
        (zero, zero, zero, one, one, zero),
        (zero, zero, zero, one, -one, zero),
        (zero, zero, zero, zero, zero, one),
    )
    second = (
        (one, one, zero, one, zero, zero),
        (zero, zero, a, zero, b, zero),
        (zero, a**2, zero, b**2, zero, zero),
        (zero, zero, a**3, zero, b**3, one),
    )
    return first, second


def _rounded(matrix: Exact) -> Matrix:
    return tuple(tuple(float(c) for c in row) for row in matrix)


_OF_TWO = Transforms((_INPUT,), _WEIGHT, (_OUTPUT,))
_OF_PAIR = Transforms(
    (((1, -1, 0), (0, 1, 0), (0, -1, 1)),), ((1, 0), (1, 1), (0, 1)), (((1, 1, 0), (0, 1, 1)),)
)
_OF_FOUR = Transforms(
    tuple(map(_rounded, input_factors(*POINTS))),
    _rounded(weight_matrix(*POINTS)),
    tuple(map(_rounded, output_factors(*POINTS))),
)
