"""For every operator: which padding of its operands it would take in, and what its own is.

See ``graph/bucket.py``. A rule sees the large graph's node, the extents of its result at both
sizes, and what is known of its operands' padding. It raises ``NotAlikeError`` where masks do not
help: an axis that is reversed, or put together so that padding comes before what counts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from torch_pruner.graph._padding import (
    UNKNOWN,
    Fact,
    NotAlikeError,
    Padding,
    Pair,
    axis_of,
    broadcast,
    neutral,
    permuted,
    pointwise,
    regrouped,
    windows_reach,
)
from torch_pruner.graph.ops import (
    BINARY,
    CONTRACT,
    GROUPED,
    INJECTIVE,
    PARTIAL,
    PREPARED,
    RECURRENCE,
    REDUCE,
    TERNARY,
    UNARY,
    UPDATE,
    VIEWS,
    WINDOW,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch_pruner.graph.ir import Node


class Operand(NamedTuple):
    """A node of the new graph, its dtype and what is known of its padding."""

    at: int
    dtype: str
    padding: Padding


Masks = dict[int, tuple[list[int], float]]
"""By operand: the varying factors along which padding has to hold a number, and the number."""


class Rule:
    """An operator whose result is made of what lies at the same position of its operands."""

    def masks(self, node: Node, operands: Sequence[Operand]) -> Masks:
        """What has to be masked before the operator reads it."""
        del node, operands
        return {}

    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        """What is known of the result, whose extents are ``pairs``."""
        del pairs
        ids = [o.at for o in operands]
        known, dtypes = [o.padding for o in operands], [o.dtype for o in operands]
        return pointwise(node.op, node.dtype, known, ids, dtypes)

    def numbers(
        self, node: Node, pairs: tuple[Pair, ...], source: Padding
    ) -> Sequence[int | None] | None:
        """Which factor of a view's source each varying factor is. None: not a view."""
        del node, pairs, source
        return None


class _Leaf(Rule):
    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        del operands
        dims = tuple(axis_of(pair) for pair in pairs)
        plain = Padding(dims)
        if node.op != "iota":
            return replace(plain, facts=(UNKNOWN,) * len(plain.varying))
        axes = [axis for axis, _ in plain.varying]
        along = node.attr("dim")
        facts = tuple(UNKNOWN if axis == along else Fact(same=True) for axis in axes)
        return Padding(dims, facts, axes.index(along) if along in axes else None)


class _Reshape(Rule):
    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        del node
        return replace(operands[0].padding, dims=regrouped(operands[0].padding.dims, pairs))

    def numbers(
        self, node: Node, pairs: tuple[Pair, ...], source: Padding
    ) -> Sequence[int | None] | None:
        return range(len(source.facts))


class _Permute(Rule):
    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        return permuted(operands[0].padding, node.attr("perm"))[0]

    def numbers(
        self, node: Node, pairs: tuple[Pair, ...], source: Padding
    ) -> Sequence[int | None] | None:
        return permuted(source, node.attr("perm"))[1]


class _Broadcast(Rule):
    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        return broadcast(operands[0].padding, pairs)[0]

    def numbers(
        self, node: Node, pairs: tuple[Pair, ...], source: Padding
    ) -> Sequence[int | None] | None:
        return broadcast(source, pairs)[1]


class _Slice(Rule):
    """Begins at the same place at both sizes, so what counts is made of what counts."""

    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        known = operands[0].padding
        dims, facts = list[tuple[Pair, ...]](), list[Fact]()
        places = zip(node.attr("starts"), node.attr("steps"), pairs, strict=True)
        for axis, (start, step, pair) in enumerate(places):
            own = [known.facts[k] for k in known.along((axis,))]
            if known.pairs[axis] == pair and (start, step) == (0, 1):
                dims.append(known.dims[axis])
                facts += own
                continue
            known.padding_last(axis)
            dims.append(axis_of(pair))
            if pair[0] != pair[1]:
                facts.append(Fact(same=bool(own) and own[0].same))
        return Padding(tuple(dims), tuple(facts), value=known.value)


class _Flip(Rule):
    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        known = operands[0].padding
        _refuse(known.along(node.attr("dims")), "an axis of varying size, reversed")
        return known


class _Pad(Rule):
    def masks(self, node: Node, operands: Sequence[Operand]) -> Masks:
        return {0: (operands[0].padding.along(_padded(node)), float(node.attr("value")))}

    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        known, value = operands[0].padding, float(node.attr("value"))
        axes = _padded(node)
        for axis in axes:
            known.padding_last(axis)
        dims = [axis_of(pairs[d]) if d in axes else f for d, f in enumerate(known.dims)]
        facts = []
        for (axis, _), fact in zip(known.varying, known.facts, strict=True):
            if axis in axes:
                facts.append(Fact(value))
            else:
                facts.append(replace(fact, fill=value if fact.fill == value else None))
        return Padding(tuple(dims), tuple(facts))


class _Cat(Rule):
    """Operands of which only the last varies along the axis: padding then comes last."""

    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        dim, known = node.attr("dim"), [o.padding for o in operands]
        for x in known[:-1]:
            _refuse(x.along((dim,)), "something put behind an axis of varying size")
        known[-1].padding_last(dim)
        rest = [(*x.dims[:dim], *x.dims[dim + 1 :]) for x in known]
        if any(r != rest[0] for r in rest):
            raise NotAlikeError("operands of cat that vary along other factors")
        by_axis = [_by_axis(x) for x in known]
        facts = list[Fact]()
        for axis in range(len(pairs)):
            if axis == dim:
                facts += [Fact(f.fill) for f in by_axis[-1][axis]]
                continue
            for same in zip(*(x[axis] for x in by_axis), strict=True):
                fills = {f.fill for f in same}
                fill = fills.pop() if len(fills) == 1 else None
                facts.append(Fact(fill, same=all(f.same for f in same)))
        dims = tuple(axis_of(p) if d == dim else known[0].dims[d] for d, p in enumerate(pairs))
        return Padding(dims, tuple(facts))


class _Take(Rule):
    """Positions are those of the small graph, and do not count from the end (``graph/bucket.py``):
    where they count, they name what counts."""

    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        dim, x, index = node.attr("dim"), operands[0].padding, operands[1].padding
        x.padding_last(dim)
        before = _by_axis(x)
        facts = [f for axis in before[:dim] for f in axis]
        facts += [Fact(same=f.same) for f in index.facts]
        facts += [f for axis in before[dim + 1 :] for f in axis]
        return Padding((*x.dims[:dim], *index.dims, *x.dims[dim + 1 :]), tuple(facts))


class _Gather(Rule):
    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        x, index = operands[0].padding, operands[1].padding
        x.padding_last(node.attr("dim"))
        for axis in range(len(x.dims)):
            other = axis != node.attr("dim") and x.dims[axis] != index.dims[axis]
            if other and (x.along((axis,)) or index.along((axis,))):
                raise NotAlikeError("gather along axes that vary differently")
        return Padding(index.dims, (UNKNOWN,) * len(index.facts))


class _Update(Rule):
    """Rows along an axis of fixed size, at as many positions as there always are."""

    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        x, rows, *indices = (o.padding for o in operands)
        first, count = node.attr("dim"), len(indices)
        # Rows of padding would be written over what counts.
        _refuse((f for index in indices for f in index.facts), "an update at varying positions")
        _refuse(x.along(range(first, first + count)), "an update along an axis of varying size")
        rank = len(rows.dims) - len(x.dims) + count
        if (*rows.dims[:first], *rows.dims[first + rank :]) != (
            *x.dims[:first], *x.dims[first + count :],
        ):  # fmt: skip
            raise NotAlikeError("an update with rows that vary along other factors")
        return Padding(x.dims, (UNKNOWN,) * len(x.facts))


class _Grouped(Rule):
    """Rows behind the last group are zeros, whatever they are multiplied by."""

    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        rows, matrices, ends = (o.padding for o in operands)
        _refuse((*matrices.facts, *ends.facts), "matrices of groups that vary")
        _refuse(rows.along((1,)), "rows of groups whose length varies")
        return Padding((rows.dims[0], axis_of(pairs[1])), (UNKNOWN,) * len(rows.facts))


class _Reduce(Rule):
    def masks(self, node: Node, operands: Sequence[Operand]) -> Masks:
        known = operands[0].padding
        numbers = known.along(node.attr("axes"))
        if numbers and node.op in ("argmax", "argmin"):
            for axis in node.attr("axes"):
                known.padding_last(axis)
        return {0: (numbers, neutral(node.op, operands[0].dtype))}

    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        known, axes = operands[0].padding, node.attr("axes")
        gone, facts = set(known.along(axes)), []
        for k, fact in enumerate(known.facts):
            if k not in gone:
                keeps = fact.fill is not None and (
                    node.op in ("max", "min", "any", "all")
                    or (node.op in ("sum", "prod") and fact.fill == neutral(node.op, node.dtype))
                )
                facts.append(replace(fact, fill=fact.fill if keeps else None))
        dims = tuple(f for axis, f in enumerate(known.dims) if axis not in axes)
        return Padding(dims, tuple(facts), origin=(node.op, operands[0].at))


class _Window(Rule):
    """Windows along the last axes: what lies behind the end of such an axis is masked."""

    def masks(self, node: Node, operands: Sequence[Operand]) -> Masks:
        x = operands[0].padding
        axes = [axis for axis, more in windows_reach(node, len(x.dims)).items() if more]
        op = "max" if node.op in ("window_max", "window_argmax") else "sum"
        return {0: (x.along(axes), neutral(op, operands[0].dtype))}

    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        x = operands[0].padding
        first = self.first(node, x)
        if node.op == "window_argmax":
            inner = x.along(range(first + 1, len(x.dims)))
            _refuse(inner, "positions along rows whose length varies")
        for axis in range(first, len(x.dims)):
            x.padding_last(axis)
        before = self.leading(pairs, operands)[:first]
        dims = [*before, *(axis_of(p) for p in pairs[first:])]
        plain = Padding(tuple(dims))
        return replace(plain, facts=(UNKNOWN,) * len(plain.varying))

    def first(self, node: Node, x: Padding) -> int:
        """The first axis that windows move along."""
        return len(x.dims) - len(node.attr("kernel"))

    def leading(
        self, pairs: tuple[Pair, ...], operands: Sequence[Operand]
    ) -> Sequence[tuple[Pair, ...]]:
        """The axes of the result before those: the operand's."""
        del pairs
        return operands[0].padding.dims


class _Convolution(_Window):
    def first(self, node: Node, x: Padding) -> int:
        del node, x
        return 2

    def leading(
        self, pairs: tuple[Pair, ...], operands: Sequence[Operand]
    ) -> Sequence[tuple[Pair, ...]]:
        x, weight = (o.padding for o in operands)
        _refuse([*weight.facts, *x.along((1,))], "a convolution whose channels vary")
        return x.dims[0], axis_of(pairs[1])


class _Matmul(Rule):
    def masks(self, node: Node, operands: Sequence[Operand]) -> Masks:
        a, b = (o.padding for o in operands)
        return {
            0: (a.along((len(a.dims) - 1,)), 0),
            1: (b.along((len(b.dims) - 2,)), 0),
        }

    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        a, b = (o.padding for o in operands)
        if a.dims[:-2] != b.dims[:-2] or a.dims[-1] != b.dims[-2]:
            raise NotAlikeError("a product of what varies along other factors")
        left, right = _by_axis(a), _by_axis(b)
        facts = [
            Fact(same=f.same and g.same)
            for axis in range(len(pairs) - 2)
            for f, g in zip(left[axis], right[axis], strict=True)
        ]
        facts += [Fact(same=f.same) for f in (*left[-2], *right[-1])]
        return Padding((*a.dims[:-1], b.dims[-1]), tuple(facts))


class _MatmulGrouped(Rule):
    """Rows alone may vary: what else there is are parameters."""

    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        rows = operands[0].padding
        _refuse(
            [*rows.along((1,)), *(f for o in operands[1:] for f in o.padding.facts)],
            "weights of four bits whose size varies",
        )
        facts = tuple(Fact(same=f.same) for f in rows.facts)
        return Padding((rows.dims[0], axis_of(pairs[1])), facts)


class _Fixed(Rule):
    """Nothing may vary: prepared weights, and recurrent layers, a kernel for each size."""

    def __init__(self, what: str) -> None:
        self._what = what

    def padding(self, node: Node, pairs: tuple[Pair, ...], operands: Sequence[Operand]) -> Padding:
        varies = [p for p in pairs if p[0] != p[1]]
        _refuse([*varies, *(f for o in operands for f in o.padding.facts)], self._what)
        return Padding(tuple(axis_of(p) for p in pairs))


def _padded(node: Node) -> list[int]:
    sides = zip(node.attr("lo"), node.attr("hi"), strict=True)
    return [axis for axis, (lo, hi) in enumerate(sides) if lo or hi]


def _by_axis(known: Padding) -> list[list[Fact]]:
    return [[known.facts[k] for k in known.along((axis,))] for axis in range(len(known.dims))]


def _refuse(found: Iterable[object], why: str) -> None:
    if list(found):
        raise NotAlikeError(why)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(("input", "iota"), _Leaf()),
    **dict.fromkeys((*UNARY, *BINARY, *TERNARY, *PARTIAL), Rule()),
    **dict(zip(VIEWS, (_Reshape(), _Permute(), _Broadcast(), _Slice(), _Flip()), strict=True)),
    **dict(zip(INJECTIVE, (_Pad(), _Cat(), _Take(), _Gather()), strict=True)),
    **dict.fromkeys(REDUCE, _Reduce()),
    **dict.fromkeys(WINDOW, _Window()),
    **dict.fromkeys(CONTRACT, _Convolution()),
    **dict.fromkeys(UPDATE, _Update()),
    **dict.fromkeys(RECURRENCE, _Fixed("steps that vary")),
    **dict.fromkeys(GROUPED, _Grouped()),
    "matmul": _Matmul(),
    "matmul_grouped": _MatmulGrouped(),
    **dict.fromkeys(PREPARED, _Fixed("weights that vary")),
}
