"""A graph at a large size that also computes smaller ones: kernels for a bucket of sizes.

The same graph, captured at two sizes, says which extents vary. At the large one it computes what it
does at the small one if inputs are padded and nothing that counts depends on the padding: where a
sum, a maximum or a window would take it in, the value is masked by its position, and the size that
counts is one more input of the graph, a number. So a size that comes for the first time runs in
kernels that are there, and what is compared is the graphs themselves, for every size that comes.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch_pruner.graph._aligned import Alike, Place, aligned
from torch_pruner.graph._bucket_rules import RULES
from torch_pruner.graph._padded_builder import COUNT_DTYPE, PaddedBuilder
from torch_pruner.graph._padded_cat import joined, written
from torch_pruner.graph._padding import (
    UNKNOWN,
    Fact,
    NotAlikeError,
    Padding,
    Pair,
    axis_of,
    windows_reach,
)
from torch_pruner.graph.extents import Bound, bounded, said_once
from torch_pruner.graph.intervals import interval
from torch_pruner.graph.ir import Graph, GraphBuilder, Node, const_value
from torch_pruner.graph.ops import FLOATS, WINDOW, OpKind
from torch_pruner.graph.updates import writes_in_place

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

__all__ = ["COUNT_DTYPE", "Bucket", "NotAlikeError", "bucketed"]


@dataclass(frozen=True, slots=True)
class Bucket:
    """``graph`` has the inputs of the large graph and after them, for each of ``counts`` (an extent
    at the large size, and at the small one), the small one: an ``int32`` of shape ()."""

    graph: Graph
    counts: tuple[Pair, ...]

    def padded(self) -> Bucket:
        """The same with its padding computed, too: where nothing is masked, the large graph."""
        builder, new, kept = GraphBuilder(), list[int](), list[Pair]()
        own = len(self.graph.inputs) - len(self.counts)
        read = {x for n in self.graph.nodes if n.op != "within" for x in n.inputs}
        for i, node in enumerate(self.graph.nodes):
            attrs, operands = dict(node.attrs), [new[x] for x in node.inputs]
            if node.op == "within":
                new.append(operands[0])
                continue
            if node.op == "input" and node.attr("index") >= own:
                if i not in read:
                    new.append(-1)  # nobody reads it
                    continue
                kept.append(self.counts[node.attr("index") - own])
                attrs["index"] = own + len(kept) - 1
            new.append(builder.append(node.op, operands, node.shape, node.dtype, **attrs))
        return Bucket(builder.finish([new[o] for o in self.graph.outputs]), tuple(kept))


def bucketed(
    large: Graph,
    small: Graph,
    zeroed: Collection[int] = (),
    written: Collection[int] = (),
) -> Bucket:
    """``large`` so that it also computes ``small``, the same graph at smaller extents.

    Inputs are padded at the end of each axis by anything (what kernels index with is clamped), and
    those with the indices ``zeroed`` by zeros. Of the outputs the first elements of each axis
    count. Of ``zeroed`` inputs those ``written`` may be written into: to a cache that is given with
    room for what comes behind it, which then is an input with a longer axis than in ``large``.
    Raises ``NotAlikeError`` if the graphs differ in more than extents, or in a way that needs more
    than masks.
    """
    writer, found = Writer(large, zeroed, written), aligned(large, small)
    for both in found:
        writer.note(both)
    for both in found:
        writer.add(both)
    ends = zip(large.outputs, small.outputs, strict=True)
    outputs = [writer.ended(writer.new[pair]) for pair in ends]
    return Bucket(said_once(writer.builder.finish(outputs)), tuple(writer.counts))


def _extended(large: Graph, written: Collection[int]) -> dict[int, tuple[int, int]]:
    """Inputs that nothing reads but a concatenation with one more operand, which comes behind
    them: by position the axis, and the other operand's extent."""
    found = {}
    users = large.users() if written else []
    for at in (i for i in large.inputs if large.nodes[i].attr("index") in written):
        readers = [large.nodes[i] for i in users[at]]
        if len(readers) == 1 and readers[0].op == "cat" and at not in large.outputs:
            first, *others = readers[0].inputs
            if first == at and len(others) == 1 and others[0] != at:
                dim = readers[0].attr("dim")
                found[at] = dim, large.nodes[others[0]].shape[dim]
    return found


def _told(node: Node) -> list[tuple[str, object]]:
    """What attributes say of an operator that its extents do not: how far windows of a pool reach
    beyond an end follows from how many there are."""
    reaches = node.op in WINDOW
    return [(name, value) for name, value in node.attrs if not (reaches and name == "hi")]


class Writer(PaddedBuilder):
    """Writes the graph of a bucket, node by node."""

    def __init__(
        self, large: Graph, zeroed: Collection[int] = (), written: Collection[int] = ()
    ) -> None:
        super().__init__(len(large.inputs))
        self._zeroed, self._extended = zeroed, _extended(large, written)
        self._room: dict[int, Pair] = {}  # extents of inputs before they were made longer
        self.new: dict[Place, int] = {}  # of each pair of nodes
        self._varying: dict[Pair, None] = {}  # extents of inputs
        self._extents: dict[Pair, None] = {}  # of all values

    def note(self, both: Alike) -> None:
        """What varies of a node; before any is added: numbers come before what they are made of."""
        pairs = zip(both.large.shape, both.small.shape, strict=False)
        self._extents.update(dict.fromkeys(p for p in pairs if p[0] != p[1]))

    def add(self, both: Alike) -> None:
        """A node of the large graph that is one of the small graph, after its operands."""
        a, b, at = both.large, both.small, both.place
        if (a.op, a.dtype, len(a.shape)) != (b.op, b.dtype, len(b.shape)):
            raise NotAlikeError(f"{a.op} beside {b.op}")
        pairs = tuple(zip(a.shape, b.shape, strict=True))
        if any(x < y or y < 1 for x, y in pairs):
            raise NotAlikeError("an extent that is larger at the small size, or empty")
        if a.op == "const":
            self.new[at] = self._const(a, b)
            return
        if a.op != "slice" and _told(a) != _told(b):
            raise NotAlikeError(f"{a.op} with attributes that depend on the size")
        if a.op == "input":
            if a.attr("static") and any(x != y for x, y in pairs):
                raise NotAlikeError("a parameter of varying size")
            self._varying.update(dict.fromkeys(p for p in pairs if p[0] != p[1]))
            self.new[at] = self._input(a, pairs, self._extended.get(at[0]))
            return
        operands = [self.new[i] for i in both.operands]
        if a.op == "slice":
            a, operands = self._without_tails(a, b, operands[0])
            fixed = [axis for axis, (large, small) in enumerate(pairs) if large == small]
            operands[0] = self._counted(operands[0], fixed)
        if a.op in ("take", "gather"):
            operands[1] = self._from_the_front(operands[0], operands[1], a.attr("dim"))
            operands[0] = self._counted(operands[0], [a.attr("dim")])
        for k, (numbers, value) in RULES[a.op].masks(a, self.operands(operands)).items():
            operands[k] = self.masked(operands[k], frozenset(numbers), value)
            self.new[both.operands[k]] = operands[k]  # who reads it later reads what is masked
        if a.op in ("conv", *WINDOW):
            operands[0] = self._reached(a, b, operands)
        between = a.op == "cat" and any(
            self.known[i].along((a.attr("dim"),)) for i in operands[:-1]
        )
        if a.op == "cat" and operands[0] in self._room:
            self.new[at] = written(self, operands, self._room[operands[0]], a.attr("dim"), pairs)
        else:
            self.new[at] = joined(self, a, operands) if between else self.emit(a, operands, pairs)

    def _input(self, a: Node, pairs: Sequence[Pair], more: tuple[int, int] | None) -> int:
        """An input, if it varies there with ``more``: an axis, and what that has room for."""
        before = None
        if more is not None and pairs[more[0]][0] != pairs[more[0]][1]:
            axis, length = more
            before = pairs[axis]
            longer = before[0] + length, before[1]
            pairs = [longer if d == axis else p for d, p in enumerate(pairs)]
        at = self.emit(replace(a, shape=tuple(n for n, _ in pairs)), (), pairs)
        if before is not None:
            self._room[at] = before
        if a.attr("index") in self._zeroed:
            known = self.known[at]
            self.known[at] = replace(known, facts=(Fact(0.0),) * len(known.facts))
        return at

    def ended(self, output: int) -> int:
        """An output, of which what counts comes first along each axis, and the rest is nothing."""
        axes = range(len(self.known[output].dims))
        for axis in axes:
            self.known[output].padding_last(axis)
        if writes_in_place(self.builder.nodes[output]):  # which leaves what it does not write
            return output
        return bounded(self.builder, output, self._bounds(output, axes))

    def _reached(self, a: Node, b: Node, operands: Sequence[int]) -> int:
        """The operand of a window or convolution, of which nothing is read that lies further behind
        its end than windows reach."""
        x, rank, bounds = operands[0], len(a.shape), list[Bound]()
        kernel = a.attr("kernel") if a.op in WINDOW else self.builder.shape(operands[1])[2:]
        sides = zip(kernel, *(a.attr(k) for k in ("stride", "dilation", "lo")), strict=True)
        reach = windows_reach(a, rank)
        for (axis, more), (taps, stride, dilation, lo) in zip(reach.items(), sides, strict=True):
            for extent, node in zip(self.known[x].pairs[axis], (a, b), strict=True):
                last = (node.shape[axis] - 1) * stride + (taps - 1) * dilation - lo
                if last >= extent + more:
                    raise NotAlikeError("windows that reach further than their padding")
            bounds += [bound._replace(more=more) for bound in self._bounds(x, [axis])]
        return self._within(x, bounds, list(reach))

    def _bounds(self, x: int, axes: Iterable[int]) -> list[Bound]:
        """What counts of ``x`` along those of these axes whose padding comes last."""
        known, bounds = self.known[x], []
        for axis in axes:
            first, *rest = known.dims[axis] or ((1, 1),)
            if first[0] != first[1] and all(large == small for large, small in rest):
                inner = math.prod(n for n, _ in known.pairs[axis + 1 :])
                stride = inner * math.prod(n for n, _ in rest)
                bounds.append(Bound(stride, first[0], self.count(first)))
        return bounds

    def _counted(self, x: int, axes: Iterable[int]) -> int:
        """``x`` for a reader that reads nothing but what counts along these axes: kernels need not
        make the rest for it."""
        axes = list(axes)
        return self._within(x, self._bounds(x, axes), axes)

    def _within(self, x: int, bounds: Sequence[Bound], axes: Sequence[int]) -> int:
        """``x``, of which kernels need not make what lies behind these bounds along ``axes``."""
        if self.builder.nodes[x].op == "input" or not bounds:
            return x
        known, unknown = self.known[x], self.known[x].along(axes)
        facts = [UNKNOWN if k in unknown else fact for k, fact in enumerate(known.facts)]
        at = bounded(self.builder, x, bounds)
        self.known.setdefault(at, replace(known, facts=tuple(facts), index=None, value=None))
        return at

    # Masks

    def masked(self, x: int, numbers: frozenset[int], value: float) -> int:
        """``x`` with ``value`` wherever it does not count along any of the varying factors."""
        known, node = self.known[x], self.builder.nodes[x]
        if not numbers or (len(numbers) == 1 and known.facts[min(numbers)].fill == value):
            return x
        # Before a view, so that the kernel that makes the value can mask it.
        if (before := self._before_view(x, numbers)) is not None:
            return self.emit(node, [self.masked(node.inputs[0], before, value)], known.pairs)
        condition, *others = [self._counts(known, k) for k in sorted(numbers)]
        for other in others:
            condition = self.make("logical_and", [condition, other], known.pairs, "bool")
        fill = self.const(value, node.dtype)
        at = self.make("where", [condition, x, fill], known.pairs, node.dtype)
        facts = [
            Fact(self.known[fill].value) if k in numbers else fact
            for k, fact in enumerate(known.facts)
        ]
        self.known[at] = replace(known, facts=tuple(facts), index=None, value=None, origin=None)
        return at

    def _before_view(self, x: int, numbers: frozenset[int]) -> frozenset[int] | None:
        """The factors of a view's source that these factors of the view are, if they are."""
        node = self.builder.nodes[x]
        if node.kind is not OpKind.VIEW:
            return None
        source = self.known[node.inputs[0]]
        table = RULES[node.op].numbers(node, self.known[x].pairs, source)
        found = [None if table is None else table[k] for k in numbers]
        return frozenset(k for k in found if k is not None) if None not in found else None

    def _counts(self, known: Padding, k: int) -> int:
        """Whether the elements of a value of this padding count along factor ``k``."""
        axis, pair = known.varying[k]
        factors = known.dims[axis]
        if factors.count(pair) > 1:
            raise NotAlikeError("an axis that varies twice")
        line = tuple(f if f == pair else (1, 1) for f in factors)
        at = self.make("iota", [], line, COUNT_DTYPE, dim=line.index(pair))
        test = self.make("lt", [at, self.count(pair)], line, "bool")
        alone = [known.pairs[axis] if d == axis else (1, 1) for d in range(len(known.dims))]
        for op, pairs in (("broadcast", factors), ("reshape", alone)):
            if self.known[test].pairs != tuple(pairs):
                test = self.make(op, [test], pairs, "bool")
        shape = [large for large, _ in known.pairs]
        full = self.builder.broadcast(test, shape)
        facts = tuple(UNKNOWN if i == k else Fact(same=True) for i in range(len(known.facts)))
        return self.kept(full, Padding(known.dims, facts))

    # Numbers and places that depend on the size

    def _const(self, a: Node, b: Node) -> int:
        """A number; one that varies is what it is of an extent of an input."""
        large, small = const_value(a), const_value(b)
        if large == small or (large != large and small != small):
            return self.const(large, a.dtype)
        for pair in self._varying:
            if (found := self._of_extent(pair, large, small, a.dtype)) is not None:
                return found
        if a.dtype in FLOATS and (found := self._of_area(large, small, a.dtype)) is not None:
            return found
        raise NotAlikeError("a number that depends on the size")

    def _of_extent(self, pair: Pair, large: float, small: float, dtype: str) -> int | None:
        """The number that is ``large`` and ``small`` at the two extents: a multiple of the extent
        or of its reciprocal, or a number and the extent added to it or taken from it."""
        if dtype == "bool":
            return None
        if dtype in FLOATS and math.isclose(large * pair[0], small * pair[1], rel_tol=1e-12):
            return self.scalar("div", self.const(large * pair[0], dtype), pair, dtype)
        if dtype in FLOATS and math.isclose(large / pair[0], small / pair[1], rel_tol=1e-12):
            return self.scalar("mul", self.const(large / pair[0], dtype), pair, dtype)
        if large - small == pair[0] - pair[1]:
            return self.scalar("add", self.const(large - pair[0], dtype), pair, dtype)
        if small - large == pair[0] - pair[1]:
            return self.scalar("sub", self.const(large + pair[0], dtype), pair, dtype)
        return None

    def _of_area(self, large: float, small: float, dtype: str) -> int | None:
        """A multiple of an extent of any value, or of a product of two (a mean over an image), or
        of its reciprocal; that which is no multiple is likelier."""
        found: list[tuple[bool, str, float, tuple[Pair, ...]]] = []
        lines = ((pair,) for pair in self._extents)
        areas = itertools.combinations_with_replacement(self._extents, 2)
        for pairs in itertools.chain(lines, areas):
            first, second = (math.prod(n) for n in zip(*pairs, strict=True))
            for op, one, other in (
                ("div", large * first, small * second),
                ("mul", large / first, small / second),
            ):
                if math.isclose(one, other, rel_tol=1e-12):
                    found.append((not math.isclose(one, 1.0, rel_tol=1e-12), op, one, pairs))
        if not found:
            return None
        _, op, number, pairs = min(found, key=lambda match: match[0])
        area, *others = [self.count(pair) for pair in pairs]
        for other_count in others:
            area = self.make("mul", [area, other_count], (), COUNT_DTYPE)
        area = self.make("cast", [area], (), dtype)
        return self.make(op, [self.const(number, dtype), area], (), dtype)

    def _from_the_front(self, x: int, index: int, axis: int) -> int:
        """Positions along an axis of ``x``: negative ones count from the end of what counts."""
        pair = self.known[x].pairs[axis]
        if pair[0] == pair[1] or interval(self.builder.nodes, index)[0] >= 0:
            return index
        pairs, dtype = self.known[index].pairs, self.builder.dtype(index)
        end = self.scalar("add", self.const(0, dtype), pair, dtype)
        back = self.make("add", [index, end], pairs, dtype)
        test = self.make("lt", [index, self.const(0, dtype)], pairs, "bool")
        return self.make("where", [test, back, index], pairs, dtype)

    def _without_tails(self, a: Node, b: Node, x: int) -> tuple[Node, list[int]]:
        """A slice that begins at the same place at both sizes, and its operand.

        What is taken from the end (the last token) is taken before, at a place that is computed.
        """
        if a.attr("steps") != b.attr("steps"):
            raise NotAlikeError("a slice whose steps depend on the size")
        starts, steps = list(a.attr("starts")), list(a.attr("steps"))
        for axis, (far, near) in enumerate(zip(starts, b.attr("starts"), strict=True)):
            if far == near:
                continue
            extents, length = self.known[x].pairs[axis], a.shape[axis]
            if far - near != extents[0] - extents[1] or length != b.shape[axis]:
                raise NotAlikeError("a slice that begins where it depends on the size")
            x = self._taken(x, axis, far - extents[0], steps[axis], length)
            starts[axis], steps[axis] = 0, 1
        attrs = dict(a.attrs) | {"starts": tuple(starts), "steps": tuple(steps)}
        return replace(a, attrs=tuple(sorted(attrs.items()))), [x]

    def _taken(self, x: int, axis: int, start: int, step: int, length: int) -> int:
        """``length`` elements of ``x`` along an axis, from ``start`` on, which is counted from the
        end of what counts."""
        known, line = self.known[x], ((length, length),)
        known.padding_last(axis)
        x = self._counted(x, [axis])
        first = self.scalar("add", self.const(start, COUNT_DTYPE), known.pairs[axis], COUNT_DTYPE)
        at = self.make("iota", [], line, COUNT_DTYPE, dim=0)
        at = self.make("mul", [at, self.const(step, COUNT_DTYPE)], line, COUNT_DTYPE)
        at = self.make("add", [at, first], line, COUNT_DTYPE)
        shape = [length if d == axis else n for d, (n, _) in enumerate(known.pairs)]
        taken = self.builder.append("take", (x, at), shape, self.builder.dtype(x), dim=axis)
        facts = [f for k, f in enumerate(known.facts) if k not in known.along((axis,))]
        dims = [axis_of(*line) if d == axis else f for d, f in enumerate(known.dims)]
        return self.kept(taken, Padding(tuple(dims), tuple(facts), value=known.value))
