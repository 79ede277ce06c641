"""Phases of a program: what runs between two barriers, what every thread repeats, and memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.graph.random_graphs import graphs
from tests.unit.graph.test_memory import signatures
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.memory import plan_memory
from torch_pruner.graph.phases import Division, Manner, plan_phases

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.phases import Turn

SMALL = Manner(serial=True, alone_s=1e-6, repeated_s=1e-6)
LARGE = Manner(serial=False, alone_s=1e-4, repeated_s=2e-4)
BARRIER_S = 1e-6


def halves(tasks: int = 4, width: int = 32) -> Manner:
    return Manner(False, 1e-4, 2e-4, division=Division(tasks, width))


def linear(b: GraphBuilder, x: int, index: int, n: int = 128) -> int:
    k = b.shape(x)[-1]
    return b.matmul(x, b.input(index, (k, n), "float32", static=True))


def turns(graph: Graph, manners: Mapping[str, Manner], threads: int = 2) -> list[Turn]:
    """Turns of the kernels; ``manners`` by "product" and "other", or by position."""
    fused = fuse(graph)
    found = []
    for k, kernel in enumerate(fused.kernels):
        product = any(n.op == "matmul" for n in kernel.spec.nodes)
        found.append(manners.get(str(k), manners["product" if product else "other"]))
    return list(plan_phases(fused, found, threads, BARRIER_S))


def scaled(b: GraphBuilder, x: int) -> int:
    """A row, scaled by its sum: a kernel of its own."""
    return b.pointwise("mul", x, b.reduce("sum", x, [1], keepdim=True))


def siblings(*, kept: bool = False, joined: bool = False) -> Graph:
    """Two products of a scaled row, and one of the scaled first of them.

    ``kept``: the row is an output, too. ``joined``: the second product's epilogue reads the first.
    """
    b = GraphBuilder()
    y = scaled(b, b.input(0, (1, 64), "float32"))
    one, two = linear(b, y, 1), linear(b, y, 2)
    if joined:
        return b.finish([b.pointwise("mul", b.pointwise("exp", one), two)])
    last = linear(b, scaled(b, one), 3)
    return b.finish([last, two, y][: 3 if kept else 2])


def test_siblings_share_a_phase_and_what_is_small_is_repeated() -> None:
    norm, one, two, *rest = turns(siblings(), {"product": LARGE, "other": SMALL})
    assert norm.everywhere
    assert {norm.phase, one.phase, two.phase} == {0}
    assert [(t.phase, t.everywhere) for t in rest] == [(1, True), (1, False)]


def test_an_output_is_made_once() -> None:
    norm, one, two, *_ = turns(siblings(kept=True), {"product": LARGE, "other": SMALL})
    assert not norm.everywhere
    assert (norm.phase, one.phase, two.phase) == (0, 1, 1)


@pytest.mark.parametrize(("extra_s", "repeated"), [(0.5e-6, True), (2e-6, False)])
def test_repeating_costs_less_than_a_barrier(extra_s: float, repeated: bool) -> None:
    other = Manner(serial=False, alone_s=1e-6, repeated_s=1e-6 + extra_s)
    norm, one, *_ = turns(siblings(), {"product": LARGE, "other": other})
    assert norm.everywhere == repeated
    assert one.phase == int(not repeated)


def test_serial_kernels_that_only_serial_ones_read_are_run_once() -> None:
    found = turns(siblings(), {"product": SMALL, "other": SMALL})
    assert {(t.phase, t.everywhere) for t in found} == {(0, False)}


def test_what_runs_apart_has_a_phase_of_its_own() -> None:
    apart = Manner(serial=False, apart=True)
    found = turns(siblings(), {"product": LARGE, "other": SMALL, "1": apart})
    assert [t.phase for t in found[:3]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("first", "second", "threads", "together"),
    [
        (halves(), halves(), 2, True),
        (halves(4, 32), halves(2, 64), 2, True),  # halves of 64 columns either way
        (halves(4, 32), halves(2, 64), 4, False),  # two tasks for four threads
        (halves(3, 48), halves(3, 48), 2, True),  # the same share has a task more
        (halves(3, 64), halves(6, 32), 2, False),
        (halves(), LARGE, 2, False),
    ],
)
def test_a_share_may_read_the_same_share(
    first: Manner, second: Manner, threads: int, together: bool
) -> None:
    graph = siblings(joined=True)
    manners = {"product": LARGE, "other": SMALL, "1": first, "2": second}
    norm, one, two = turns(graph, manners, threads)
    assert norm.phase == one.phase == 0
    assert two.phase == int(not together)


def test_what_is_left_over_goes_round() -> None:
    odd = halves(3, 48)
    found = turns(siblings(), {"product": odd, "other": SMALL})
    assert [t.more for t in found] == [0, 0, 1, 0, 0]
    norm, one, two = turns(siblings(joined=True), {"product": odd, "other": SMALL})
    assert (norm.more, one.more, two.more) == (0, 0, 0)


def test_a_share_that_is_summed_or_turned_over_needs_all_of_it() -> None:
    b = GraphBuilder()
    x = b.input(0, (64, 64), "float32")
    one = linear(b, x, 1, 64)
    summed = b.finish([b.pointwise("mul", linear(b, one, 2, 64), one)])
    b = GraphBuilder()
    x = b.input(0, (64, 64), "float32")
    one, two = linear(b, x, 1, 64), linear(b, x, 2, 64)
    turned = b.finish([b.pointwise("mul", two, b.permute(one, (1, 0)))])
    for graph in (summed, turned):
        found = turns(graph, {"product": halves(4, 16), "other": SMALL})
        assert [t.phase for t in found] == [0, 1]


@pytest.mark.parametrize(("rows", "repeated"), [(1, True), (2, False)])
def test_an_update_of_one_row_is_repeated_where_it_lies(rows: int, repeated: bool) -> None:
    """Of two rows for one place the first could overwrite what another thread goes on to read."""
    b = GraphBuilder()
    y = scaled(b, b.input(0, (rows, 64), "float32"))
    cache, at = b.input(1, (32, 64), "float32"), b.input(2, (rows,), "int64")
    made = linear(b, y, 3, 64)
    updated = b.append("update", (cache, made, at), (32, 64), "float32", dim=0, in_place=True)
    graph = b.finish([b.matmul(y, b.permute(updated, (1, 0))), updated])
    update, product = turns(graph, {"product": LARGE, "other": SMALL})[2:]
    assert (update.phase, update.everywhere) == (1, repeated)
    assert product.phase == 2 - repeated


def test_what_comes_last_is_repeated_after_the_barrier() -> None:
    summed = Manner(serial=False, alone_s=1e-4, repeated_s=2e-4, epilogue_s=1e-7)
    norm, one, two, *_ = turns(siblings(), {"product": LARGE, "other": SMALL, "1": summed})
    assert (norm.phase, one.phase, two.phase) == (0, 1, 1)
    assert one.epilogue
    long = Manner(serial=False, alone_s=1e-4, repeated_s=2e-4, epilogue_s=1e-5)
    assert not turns(siblings(), {"product": LARGE, "other": SMALL, "1": long})[1].epilogue


@pytest.mark.parametrize(("seconds", "repeated"), [(1e-7, True), (1e-5, False)])
def test_what_comes_first_is_repeated_where_it_is_short(seconds: float, repeated: bool) -> None:
    copies = Manner(serial=False, alone_s=1e-4, repeated_s=2e-4, prologue_s=seconds)
    norm, one, two, *_ = turns(siblings(), {"product": copies, "other": SMALL})
    assert [norm.prologue, one.prologue, two.prologue] == [False, repeated, repeated]


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
@given(st.data())
def test_nothing_that_a_phase_writes_is_used_by_another_kernel_of_it(data) -> None:
    """Unless that kernel reads it as its own thread's."""
    fused = fuse(data.draw(graphs(moves=14)))
    ends = Manner(serial=False, alone_s=1e-4, epilogue_s=1e-7)
    kinds = [SMALL, LARGE, Manner(serial=True), Manner(serial=False, apart=True), ends]
    manners = [data.draw(st.sampled_from(kinds)) for _ in fused.kernels]
    found = plan_phases(fused, manners, 3, BARRIER_S)
    takes = signatures(fused, lambda _: 0)
    plan = plan_memory(fused, takes, found, 3)
    maker = {o: k for k, kernel in enumerate(fused.kernels) for o in kernel.outputs}
    written: dict[int, np.ndarray] = {}
    for k, (kernel, places, take) in enumerate(
        zip(fused.kernels, plan.arguments, takes, strict=True)
    ):
        if k == 0 or (found[k].phase != found[k - 1].phase and not found[k].epilogue):
            written = {}
        specs = (*take.inputs, *take.outputs, *take.scratch)
        for at, (place, spec) in enumerate(zip(places, specs, strict=True)):
            if plan.slots[place.slot].kind != "workspace":
                continue
            used = np.zeros(plan.workspace_bytes, bool)
            for copy in range(3 if place.apart else 1):
                begin = place.offset + copy * place.apart
                assert begin + spec.nbytes <= plan.workspace_bytes
                used[begin : begin + spec.nbytes] = True
            source = maker.get(kernel.inputs[at]) if at < len(take.inputs) else None
            if source is not None:
                same = found[source].phase == found[k].phase
                alone = manners[source].serial and manners[k].serial
                own = found[source].everywhere or found[source].epilogue
                assert not same or own or alone
            clashes = [j for j, m in written.items() if (m & used).any() and j not in (source, k)]
            assert not clashes
            if at >= len(take.inputs):
                written[k] = written.get(k, np.zeros_like(used)) | used
    assert all(a.phase <= b.phase <= a.phase + 1 + b.epilogue for a, b in itertools.pairwise(found))
