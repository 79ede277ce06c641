"""What is watched: inputs before a region, computed values by one output, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torch_pruner.dynamo.lower.aten.demand import KINDS, Demand, Range
from torch_pruner.dynamo.lower.bounds import IndexCheck, guarded, watched
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.reference import evaluate

EXTREMES = [-(2**63), -(2**63) + 1, -(2**40), -8, -7, -1, 0, 6, 7, 2**40, 2**63 - 1]


def demanded(make, *ranges: Range, flagged: bool = True):
    b = GraphBuilder()
    x = make(b, b.input(0, (3, 4), "int64"))
    return b, watched(b, [Demand(x, r) for r in ranges], flagged=flagged)


def doubled(b: GraphBuilder, x: int) -> int:
    return b.pointwise("mul", x, b.const(2, "int64"))


def same(_b: GraphBuilder, x: int) -> int:
    return x


@pytest.mark.parametrize("low", [0, -7])
def test_the_key_of_every_value_outside_is_found_and_named(low: int) -> None:
    wanted = Range(low, 7, "index" if low else "gather")
    b = GraphBuilder()
    x = b.input(0, (3, 4), "int64")
    watch = watched(b, [Demand(b.pointwise("bitwise_not", x), wanted)], flagged=True)
    graph = b.finish([watch.output])
    for value in EXTREMES:
        data = np.zeros((3, 4), np.int64) - 1
        data[1, 2] = ~value
        keys = torch.from_numpy(evaluate(graph, [data])[0].copy())
        call = guarded(lambda given, keys=keys: [*given, keys], (), watch.flags)
        if low <= value < 7:
            assert call([1]) == [1]
        else:
            with pytest.raises((IndexError, RuntimeError), match=f"index {value} is out of bounds"):
                call([1])


def test_an_input_is_looked_at_before() -> None:
    wanted = Range(0, 7, "embedding")
    view = demanded(lambda b, x: b.permute(b.reshape(x, (12, 1)), (1, 0)), wanted)[1]
    assert view.checks == (IndexCheck(0, wanted, None),)
    assert view.output is None
    part = demanded(lambda b, x: b.slice(x, (1, 0), (2, 4)), wanted)[1]
    assert part.checks == ()
    assert part.flags == (wanted,)
    narrow = demanded(lambda b, x: b.cast(x, "int32"), wanted)[1]
    assert narrow.flags == (wanted,)
    assert demanded(doubled, wanted, flagged=False)[1].output is None


def test_each_once_and_none_that_cannot_fail() -> None:
    wanted = Range(0, 7, "gather")
    assert demanded(doubled, wanted, wanted, Range(0, 9, "gather"))[1].flags == (
        wanted,
        Range(0, 9, "gather"),
    )
    modulo = demanded(lambda b, x: b.pointwise("mod", x, b.const(7, "int64")), wanted)[1]
    assert (modulo.checks, modulo.flags, modulo.output) == ((), (), None)


def test_a_class_that_a_loss_ignores() -> None:
    def kept(b: GraphBuilder, x: int) -> int:
        test = b.pointwise("ne", x, b.const(-100, "int64"))
        return b.pointwise("where", test, x, b.const(0, "int64"))

    wanted = Range(0, 5, "nll_loss")
    (check,) = demanded(kept, wanted)[1].checks
    assert check == IndexCheck(0, wanted, -100)
    check(torch.tensor([-100, 4, 0]))
    with pytest.raises(IndexError, match="Target -1 is out of bounds"):
        check(torch.tensor([-100, -1, 0]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("axis", "rank"), [(0, 1), (0, 3), (1, 2), (2, 3)])
def test_every_kind_raises(kind: str, axis: int, rank: int) -> None:
    for value in (1, 2**40, -9):
        with pytest.raises((IndexError, RuntimeError)):
            Range(0, 1, kind, axis, rank).fail(torch.tensor([value]))


def counted(b: GraphBuilder, x: int) -> int:
    """As a cache counts positions: from an element on."""
    first = b.reshape(b.slice(x, (0, 0), (1, 1)), ())
    positions = b.append("iota", (), (3,), "int64", dim=0)
    return b.pointwise("add", positions, b.pointwise("add", first, b.const(2, "int64")))


@pytest.mark.parametrize("shape", [(), (1,)], ids=["a number", "a vector"])
def test_positions_that_are_counted_from_an_input_are_looked_at_before(shape) -> None:
    wanted = Range(0, 7, "index_copy")
    b = GraphBuilder()
    positions = b.append("iota", (), (3,), "int64", dim=0)
    start = b.pointwise("add", b.reshape(b.input(0, shape, "int64"), ()), b.const(2, "int64"))
    watch = watched(b, [Demand(b.pointwise("add", positions, start), wanted)], flagged=True)
    assert watch.checks == (IndexCheck(0, wanted, None, (2, 4)),)
    assert watch.output is None
    (check,) = watch.checks
    for good in (-2, 0, 2):
        check(torch.full(shape, good))
    for bad in (-3, 3, 9):
        with pytest.raises((IndexError, RuntimeError)):
            check(torch.full(shape, bad))


def test_sums_of_many_elements_are_not_taken_for_a_count() -> None:
    wanted = Range(0, 7, "index_copy")
    assert demanded(counted, wanted)[1].checks == ()
    both = demanded(
        lambda b, x: b.pointwise("add", x, b.append("iota", (), (3, 4), "int64", dim=1)), wanted
    )
    assert both[1].checks == ()
    shifted = demanded(lambda b, x: b.pointwise("add", x, b.const(-1, "int64")), wanted)
    assert shifted[1].checks == (IndexCheck(0, wanted, None, (-1, -1)),)
