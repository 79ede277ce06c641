"""Values that eager tests: it raises for an index out of bounds, or a whole number divided by zero.

A kernel would clamp the one and give 0 for the other. Where an index is an input of the region, it
is looked at before the region runs. What the region computes is shown by one more output: for each
demand its largest key, a number that says whether a value lies outside and which one. So tests are
values of the graph like any others: nothing drops, repeats or pads them that would not do so to a
result. What can be seen to hold for every input is not tested.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from torch_pruner.dynamo.lower.aten.value import Value, concatenate
from torch_pruner.dynamo.lower.tensors import TensorSpec
from torch_pruner.graph.intervals import interval, limits
from torch_pruner.graph.ir import const_value
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.dynamo.lower.aten.demand import Demand, Range
    from torch_pruner.dynamo.lower.calls import RuntimeValue, StepCall
    from torch_pruner.graph.ir import GraphBuilder

__all__ = ["IndexCheck", "Watch", "flag_spec", "guarded", "watched"]

_KEY = "int64"
_LEAST = limits(_KEY)[0]


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """The elements of input ``input`` must lie in ``range`` or be ``ignored``.

    ``added``: each element stands for its sums with all numbers between these two.
    """

    input: int
    range: Range
    ignored: int | None
    added: tuple[int, int] = (0, 0)

    def __call__(self, index: torch.Tensor) -> None:
        if self._holds(index):
            return
        if self.added != (0, 0):
            first = int(index.min()) + self.added[0]
            bad = first if first < self.range.low else int(index.max()) + self.added[1]
            self.range.fail(torch.tensor([bad]))
        if self.ignored is not None:
            index = index[index != self.ignored]
            if index.numel() == 0 or self._holds(index):
                return
        self.range.fail(index)

    def _holds(self, index: torch.Tensor) -> bool:
        low, high = self.range.low - self.added[0], self.range.high - self.added[1]
        if index.numel() == 1:
            return bool(low <= index.item() < high)
        least, most = torch.aminmax(index)
        return bool(least.item() >= low and most.item() < high)


@dataclass(frozen=True, slots=True)
class Watch:
    """What keeps an eye on the demands of a graph; ``output`` is the node that shows ``flags``."""

    checks: tuple[IndexCheck, ...]
    flags: tuple[Range, ...]
    output: int | None


def watched(builder: GraphBuilder, demands: Sequence[Demand], *, flagged: bool) -> Watch:
    """The checks and flags that ``demands`` need, each once, in the order of the operators.

    Without ``flagged`` only inputs are looked at.
    """
    checks: dict[tuple[object, ...], IndexCheck] = {}
    flags: dict[tuple[int, int, int], tuple[Range, Value]] = {}
    for demand in demands:
        wanted = demand.range
        low, high = interval(builder.nodes, demand.value)
        if wanted.low <= low and high < wanted.high:
            continue
        source, ignored, added = _source(builder, demand.value, wanted)
        if source is not None:
            key = source, wanted.low, wanted.high, ignored, added
            checks.setdefault(key, IndexCheck(source, wanted, ignored, added))
        elif flagged:
            value = Value(builder, demand.value)
            flags.setdefault((demand.value, wanted.low, wanted.high), (wanted, value))
    keys = [_largest_key(value, wanted) for wanted, value in flags.values()]
    output = concatenate(keys, 0).id if keys else None
    return Watch(tuple(checks.values()), tuple(wanted for wanted, _ in flags.values()), output)


def _largest_key(value: Value, wanted: Range) -> Value:
    """Keys count from the least value that is in range, as unsigned numbers would: those of values
    outside are larger than all others."""
    key = value.cast(_KEY)
    key = key - wanted.low if wanted.low else key
    return key.apply("bitwise_xor", _LEAST).reduce("max", range(key.ndim)).reshape((1,))


def flag_spec(flags: Sequence[Range]) -> tuple[TensorSpec, ...]:
    """The output of a region that shows ``flags``, if there are any."""
    return (TensorSpec.make((len(flags),), (1,), getattr(torch, _KEY)),) if flags else ()


def guarded(run: StepCall, checks: Sequence[IndexCheck], flags: Sequence[Range] = ()) -> StepCall:
    """``run`` after all ``checks`` of its inputs, without its last output, which shows ``flags``.

    Raises what eager does where one does not hold.
    """
    if not checks and not flags:
        return run
    spans = tuple((wanted, wanted.high - wanted.low + _LEAST) for wanted in flags)

    def call(inputs: Sequence[RuntimeValue]) -> Sequence[RuntimeValue]:
        for check in checks:
            check(cast("torch.Tensor", inputs[check.input]))
        results = run(inputs)
        if not spans:
            return results
        *results, shown = results
        keys: list[int] = cast("torch.Tensor", shown).tolist()
        for key, (wanted, end) in zip(keys, spans, strict=True):
            if key >= end:
                wanted.fail(torch.tensor([_value(key, wanted)]))
        return results

    return call


def _value(key: int, wanted: Range) -> int:
    """The number that has this key."""
    value = key - _LEAST + wanted.low
    return value if value < -_LEAST else value + 2 * _LEAST


_Source = tuple[int | None, int | None, tuple[int, int]]
_NOT_FOUND: _Source = (None, None, (0, 0))


def _source(builder: GraphBuilder, at: int, wanted: Range) -> _Source:
    """The input with the same elements as node ``at``; which of them a loss replaces: the class to
    ignore; and the least and the largest number that is added to each of them."""
    ignored: int | None = None
    added = (0, 0)
    while True:
        at = _unviewed(builder, at)
        node = builder.nodes[at]
        if node.op == "input":
            index: int = node.attr("index")
            return index, ignored, added
        if node.op == "add" and ignored is None:
            found = _offset(builder, node.inputs)
            if found is None:
                return _NOT_FOUND
            at, (low, high) = found
            added = added[0] + low, added[1] + high
            continue
        if node.op != "where" or ignored is not None or added != (0, 0):
            return _NOT_FOUND
        condition, kept, other = (_unviewed(builder, i) for i in node.inputs)
        test, filler = builder.nodes[condition], builder.nodes[other]
        if test.op != "ne" or filler.op != "const":
            return _NOT_FOUND
        left, right = (_unviewed(builder, i) for i in test.inputs)
        number = builder.nodes[right]
        inside = wanted.low <= const_value(filler) < wanted.high
        if not inside or number.op != "const" or left != kept:
            return _NOT_FOUND
        at, ignored = kept, int(const_value(number))


def _offset(builder: GraphBuilder, operands: Sequence[int]) -> tuple[int, tuple[int, int]] | None:
    """A sum as one of its operands and the ends of what is added to every element of it: a number,
    or a count of positions from one element on."""
    for kept, other in (operands, operands[::-1]):
        ends = _ends(builder, other)
        start = _unviewed(builder, kept)
        if ends is not None and (ends[0] == ends[1] or builder.nodes[start].numel == 1):
            return start, ends
    return None


def _ends(builder: GraphBuilder, at: int) -> tuple[int, int] | None:
    """The least and the largest of consecutive numbers that node ``at`` holds, and no others."""
    node = builder.nodes[_unviewed(builder, at)]
    if node.op == "const":
        value = int(const_value(node))
        return value, value
    if node.op == "iota":
        return 0, node.shape[node.attr("dim")] - 1
    if node.op == "add":
        one, other = (_ends(builder, i) for i in node.inputs)
        if one and other and (one[0] == one[1] or other[0] == other[1]):
            return one[0] + other[0], one[1] + other[1]
    return None


def _unviewed(builder: GraphBuilder, at: int) -> int:
    """The node that has the same elements in another order, shape or wider dtype."""
    while True:
        node = builder.nodes[at]
        if node.op == "cast":
            source = builder.dtype(node.inputs[0])
            if not source.startswith(("int", "uint")) or ITEMSIZE[node.dtype] <= ITEMSIZE[source]:
                return at
        elif node.op not in ("reshape", "permute", "broadcast", "flip"):
            return at
        at = node.inputs[0]
