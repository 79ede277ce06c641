"""What is known of the padding of values that are computed at a larger size than they have.

A value has one extent where it is computed and a smaller one where it counts, along some of its
axes: a *varying factor* is such a pair of extents. Reshapes merge axes, so an axis is a product of
factors. Positions outside of the smaller extents are padding, and most of them hold anything; what
is known of them decides whether a sum over them needs a mask (``graph/bucket.py``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.graph import _reference_pointwise as reference
from torch_pruner.graph.ops import CONTRACT, FLOATS
from torch_pruner.graph.reference import numpy_dtype, widen

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_pruner.graph.ir import Node

Pair = tuple[int, int]
"""An extent where a value is computed, and where it counts."""

_AT_PADDING = {"lt": (False, True), "le": (False, True), "gt": (True, False),
               "ge": (True, False), "eq": (False, False), "ne": (True, True)}  # fmt: skip


class NotAlikeError(ValueError):
    """Two graphs are not the same one at two sizes, or padding would get into results."""


@dataclass(frozen=True, slots=True)
class Fact:
    """What lies at the padding of one factor, at positions that count along all others.

    ``fill``: this number. ``same``: what lies where it counts, since nothing varies along it.
    """

    fill: float | None = None
    same: bool = False


UNKNOWN = Fact()


@dataclass(frozen=True, slots=True)
class Padding:
    """The factors of every axis of a value, and a fact for each varying one, in that order.

    ``index``: elements are positions along this varying factor. ``value``: all elements are this
    number. ``origin``: elements are a function of this reduction of this node, and of nothing else.
    """

    dims: tuple[tuple[Pair, ...], ...]
    facts: tuple[Fact, ...] = ()
    index: int | None = None
    value: float | None = None
    origin: tuple[str, int] | None = None

    @property
    def varying(self) -> list[tuple[int, Pair]]:
        """Axis and extents of each varying factor."""
        return [(a, f) for a, axis in enumerate(self.dims) for f in axis if f[0] != f[1]]

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Both extents of every axis."""
        return tuple((math.prod(a for a, _ in x), math.prod(b for _, b in x)) for x in self.dims)

    def along(self, axes: Iterable[int]) -> list[int]:
        """Numbers of the varying factors of these axes."""
        wanted = set(axes)
        return [k for k, (axis, _) in enumerate(self.varying) if axis in wanted]

    def repeated(self, axis: int) -> bool:
        """Whether nothing varies along a whole axis, so that it may have any factors."""
        same = all(self.facts[k].same for k in self.along((axis,)))
        return same and len(self.dims[axis]) < 2

    def padding_last(self, axis: int) -> None:
        """Raises ``NotAlikeError`` unless all that counts along an axis comes first."""
        if any(large != small for large, small in self.dims[axis][1:]):
            raise NotAlikeError("an axis in which padding lies between what counts")

    def fact(self, k: int) -> Fact:
        """The fact for factor ``k`` of a value that has this operand: numbers have no axes."""
        return self.facts[k] if self.dims else Fact(self.value, same=True)


def axis_of(*factors: Pair) -> tuple[Pair, ...]:
    """An axis of these factors; neighbours that do not vary are one."""
    found: list[Pair] = []
    for large, small in factors:
        if (large, small) == (1, 1):
            continue
        if found and large == small and found[-1][0] == found[-1][1]:
            large = small = found.pop()[0] * large
        found.append((large, small))
    return tuple(found)


def regrouped(
    dims: Sequence[tuple[Pair, ...]], pairs: Sequence[Pair]
) -> tuple[tuple[Pair, ...], ...]:
    """The axes of a reshape to extents ``pairs``. Varying factors are never cut."""
    left = [f for axis in dims for f in axis][::-1]
    result = []
    for large, small in pairs:
        factors: list[Pair] = []
        while (large, small) != (1, 1):
            if not left:
                raise NotAlikeError("a reshape that factors do not explain")
            a, b = left.pop()
            if large % a == 0 and small % b == 0:
                factors.append((a, b))
                large, small = large // a, small // b
            elif a == b and large == small and a % large == 0:
                factors.append((large, large))
                left.append((a // large, a // large))
                large = small = 1
            else:
                raise NotAlikeError("a reshape that cuts an axis of varying size")
        result.append(axis_of(*factors))
    if any(f != (1, 1) for f in left):
        raise NotAlikeError("a reshape that factors do not explain")
    return tuple(result)


def permuted(known: Padding, perm: Sequence[int]) -> tuple[Padding, list[int]]:
    """The padding after a permutation, and which factor each of its factors was."""
    numbers = [k for axis in perm for k in known.along((axis,))]
    index = None if known.index is None else numbers.index(known.index)
    facts = tuple(known.facts[k] for k in numbers)
    dims = tuple(known.dims[axis] for axis in perm)
    return Padding(dims, facts, index, known.value, known.origin), numbers


def broadcast(known: Padding, pairs: Sequence[Pair]) -> tuple[Padding, list[int | None]]:
    """The padding after a broadcast to ``pairs``, and which factor each factor was (None: new)."""
    before = ((),) * (len(pairs) - len(known.dims)) + known.dims
    dims, facts, numbers = [], [], list[int | None]()
    old = iter(range(len(known.facts)))
    for axis, pair in zip(before, pairs, strict=True):
        if axis or pair == (1, 1):
            dims.append(axis)
            kept = [next(old) for f in axis if f[0] != f[1]]
            facts += [known.facts[k] for k in kept]
            numbers += kept
            continue
        dims.append(axis_of(pair))
        if pair[0] != pair[1]:
            facts.append(Fact(known.value, same=True))
            numbers.append(None)
    index = None if known.index is None else numbers.index(known.index)
    return Padding(tuple(dims), tuple(facts), index, known.value, known.origin), numbers


def unified(op: str, args: Sequence[Padding]) -> list[Padding]:
    """Operands of one shape with the same factors.

    What was repeated along an axis, such as a bias along (batch * length), takes the factors that
    the axis has in another operand.
    """
    full = [a for a in args if a.dims]
    wanted: list[tuple[Pair, ...]] = []
    for axis in range(len(full[0].dims) if full else 0):
        fixed = [a for a in full if not a.repeated(axis)]
        found = dict.fromkeys(a.dims[axis] for a in fixed or full[:1])
        if len(found) > 1 or len({a.pairs[axis] for a in full}) > 1:
            raise NotAlikeError(f"operands of {op} that vary along other factors")
        wanted += found
    return [_refactored(a, wanted) if a.dims else a for a in args]


def _refactored(known: Padding, dims: Sequence[tuple[Pair, ...]]) -> Padding:
    """``known`` with these factors; where they are others, nothing varies along the axis."""
    if known.dims == tuple(dims):
        return known
    facts, index = list[Fact](), None
    for axis, factors in enumerate(dims):
        own = known.along((axis,))
        if known.dims[axis] == factors:
            if known.index in own:
                index = len(facts) + own.index(known.index)
            facts += [known.facts[k] for k in own]
        else:
            fills = {known.facts[k].fill for k in own} or {known.value}
            fact = Fact(fills.pop() if len(fills) == 1 else None, same=True)
            facts += [fact for large, small in factors if large != small]
    return Padding(tuple(dims), tuple(facts), index, known.value, known.origin)


def pointwise(
    op: str, dtype: str, args: Sequence[Padding], ids: Sequence[int], dtypes: Sequence[str]
) -> Padding:
    """The padding of a pointwise operator's result; ``ids`` and ``dtypes`` are its operands'."""
    args = unified(op, args)
    full = [a for a in args if a.dims]
    dims = full[0].dims if full else ()
    count = len(full[0].facts) if full else 0
    facts = []
    for k in range(count):
        own = [a.fact(k) for a in args]
        fill = _fill(op, dtype, k, args, own, ids, dtypes)
        facts.append(Fact(fill, same=all(f.same for f in own)))
    values = [a.value for a in args]
    value = None if None in values else _number(op, dtype, values, dtypes)
    origins = {a.origin for a in args if a.value is None}
    origin = origins.pop() if len(origins) == 1 else None
    index = args[0].index if op == "cast" and dtype in ("int32", "int64") else None
    return Padding(dims, tuple(facts), index, value, origin)


def _fill(
    op: str,
    dtype: str,
    k: int,
    args: Sequence[Padding],
    facts: Sequence[Fact],
    ids: Sequence[int],
    dtypes: Sequence[str],
) -> float | None:
    """What lies at the padding of factor ``k`` of an operator's result, if it is one number."""
    fills = [f.fill for f in facts]
    if None not in fills:
        return _number(op, dtype, fills, dtypes)
    if op == "where" and fills[0] is not None:
        return fills[1] if fills[0] else fills[2]
    if op in ("logical_and", "logical_or") and (op == "logical_or") in fills:
        return op == "logical_or"
    if op in _AT_PADDING:
        return _compared(op, k, args)
    # Softmax: where these rules are wrong (a row of -inf, an infinite one) the row is NaN anyway,
    # since what counts of it goes through the same operators.
    if op == "sub" and fills[0] == -math.inf and args[1].origin == ("max", ids[0]):
        return -math.inf
    if op in ("div", "mul") and fills[0] == 0 and args[1].origin == ("sum", ids[0]):
        return 0.0
    return None


def _compared(op: str, k: int, args: Sequence[Padding]) -> float | None:
    """A comparison of positions along two factors of the same extents, such as a causal mask."""
    a, b = (arg.index for arg in args)
    if a is None or b is None or a == b or k not in (a, b):
        return None
    extents = [args[0].varying[n][1] for n in (a, b)]
    return _AT_PADDING[op][k == b] if extents[0] == extents[1] else None


def _number(
    op: str, dtype: str, values: Sequence[float | None], dtypes: Sequence[str]
) -> float | None:
    """``op`` of numbers, in the precision of the operator; None for NaN."""
    with np.errstate(all="ignore"):
        arrays = [
            widen(np.asarray(v).astype(numpy_dtype(d))) for v, d in zip(values, dtypes, strict=True)
        ]
        found = reference.convert(reference.apply(op, arrays), numpy_dtype(dtype))
    number: float = widen(found).item()
    return None if number != number else number


def neutral(op: str, dtype: str) -> float:
    """What changes no reduction."""
    if op in ("sum", "prod", "any", "all"):
        return {"sum": 0, "prod": 1, "any": False, "all": True}[op]
    least = op in ("max", "argmax")
    if dtype in FLOATS:
        return -math.inf if least else math.inf
    if dtype == "bool":
        return not least
    limits = np.iinfo(dtype)
    return int(limits.min if least else limits.max)


def windows_reach(node: Node, rank: int) -> dict[int, int]:
    """By axis that windows or a convolution move along how many elements behind the end of their
    operand they may read, at whatever size."""
    if node.op == "conv_transpose":
        return dict.fromkeys(range(2, rank), 1)
    if node.op in CONTRACT:
        return dict(enumerate((max(0, hi) for hi in node.attr("hi")), 2))
    spans = zip(node.attr("kernel"), node.attr("dilation"), strict=True)
    return dict(enumerate(((k - 1) * d for k, d in spans), rank - len(node.attr("kernel"))))
