"""A graph of one step and one of several, called as AOTAutograd does."""

from __future__ import annotations

import pytest
import torch

from torch_pruner.dynamo.run.runtime import GraphCall, GraphStep


def step(reads: tuple[int, ...], writes: tuple[int, ...], seen: list[object]) -> GraphStep:
    def run(values):
        seen.append(list(values))
        return [sum(values) + k for k in range(len(writes))]

    def named(values):
        seen.append("named")
        return run(values)

    return GraphStep(run, reads, writes, (), named)


@pytest.mark.parametrize("reads", [(0, 1, 2), (0, 1), (2, 0), (1,)])
def test_one_step_is_given_what_it_reads_and_empties_the_list(reads: tuple[int, ...]) -> None:
    seen: list[object] = []
    call = GraphCall([step(reads, (3, 4), seen)], 5, {}, [(3, None), (4, None)])
    args = [10, 20, 30]
    expected = sum(args[k] for k in reads)
    assert call(args) == [expected, expected + 1]
    assert (seen, args) == ([[10 * (k + 1) for k in reads]], [])


def test_results_in_another_order_with_constants_and_inputs() -> None:
    seen: list[object] = []
    outputs = [(4, None), (-1, 7), (0, None), (3, None)]
    call = GraphCall([step((0, 2), (3, 4), seen)], 5, {2: 5}, outputs)
    assert call([10, 20]) == [16, 7, 10, 15]


def test_a_profiler_sees_names() -> None:
    seen: list[object] = []
    call = GraphCall([step((0,), (1,), seen)], 2, {}, [(1, None)])
    with torch.autograd.profiler.profile():
        call([1])
    assert seen[0] == "named"
    call([1])
    assert seen.count("named") == 1
