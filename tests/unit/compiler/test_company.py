"""Drafts of kernels that share a program: which of them threads share."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from torch_pruner.compiler.choice import Choice
from torch_pruner.compiler.company import chosen_in_company, in_company
from torch_pruner.compiler.drafting import drafts
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, Task

if TYPE_CHECKING:
    from torch_pruner.report import Source

TARGET = replace(
    TargetSpec.from_dict({"kind": "llvm", "mcpu": "icelake-server"}, 2),
    cores=2, l1_bytes=48 << 10, l2_bytes=512 << 10, l3_bytes=32 << 20,
)  # fmt: skip


def pointwise(numel: int, threads: int = 2) -> Task:
    """A kernel that one thread does alone, at its size, and starts no others for."""
    b = GraphBuilder()
    x = b.pointwise("add", b.input(0, (numel,), "float32"), b.input(1, (numel,), "float32"))
    return Task("pointwise", b.finish([x]), TARGET, threads)


def product(threads: int = 2) -> Task:
    b = GraphBuilder()
    x = b.input(0, (256, 256), "float32")
    w = b.input(1, (256, 256), "float32", static=True)
    return Task("product", b.finish([b.matmul(x, w)]), TARGET, threads)


def par(candidate: Candidate) -> int:
    return dict(candidate.decisions)["par"]


def first(tasks: list[Task], others: list[Candidate] | None = None) -> list[Candidate]:
    found = in_company(tasks, [drafts(task) for task in tasks], others or [])
    return [ranked[0][1] for ranked in found]


MIDDLE = 26_000  # elements: five microseconds of one thread


def test_alone_one_thread_does_it() -> None:
    assert par(drafts(pointwise(MIDDLE))[0][1]) == 0
    assert [par(c) for c in first([pointwise(MIDDLE)])] == [0]


def test_threads_that_are_there_share_it() -> None:
    assert [par(c) for c in first([pointwise(MIDDLE), product()])] == [1, 1]


def test_so_they_do_beside_kernels_that_were_chosen_before() -> None:
    known = drafts(product())[0][1]
    assert [par(c) for c in first([pointwise(MIDDLE)], [known])] == [1]


@pytest.mark.parametrize("beside", ["nothing large", "one thread"])
def test_no_threads_are_started_for_it(beside: str) -> None:
    threads = 1 if beside == "one thread" else 2
    other = product(threads) if beside == "one thread" else pointwise(64)
    assert par(first([pointwise(MIDDLE, threads), other])[0]) == 0


def test_what_takes_no_time_stays_with_one_thread() -> None:
    assert [par(c) for c in first([pointwise(64), product()])] == [0, 1]


def test_the_draft_for_one_thread_comes_next() -> None:
    tasks = [pointwise(MIDDLE), product()]
    ranked = in_company(tasks, [drafts(task) for task in tasks])[0]
    assert ranked[1:] == drafts(tasks[0])


def choices_of(task: Task, *seconds: tuple[int, float]) -> tuple[Choice, dict[Candidate, float]]:
    """What a search found for a kernel: the fastest of candidates with this ``par`` alone."""
    base = dict(drafts(task)[0][1].decisions)
    sketch = drafts(task)[0][1].sketch
    measured = {
        Candidate(sketch, tuple(sorted((base | {"par": p}).items()))): s for p, s in seconds
    }
    best = min(measured, key=lambda c: measured[c])
    return Choice(best, "tuned", measured[best], trials=len(measured)), measured


def test_what_a_search_found_for_one_thread_gives_way_to_threads_that_are_there() -> None:
    small, times = choices_of(pointwise(MIDDLE), (0, 5.0e-6), (1, 6.5e-6))
    large, more = choices_of(product(), (1, 1e-4))
    found, other = chosen_in_company([small, large], [times, more])
    assert (par(found.candidate), found.latency_s, found.trials) == (1, 6.5e-6, 2)
    assert other == large


@pytest.mark.parametrize(
    ("shared_s", "beside"),
    [(9e-6, "threads"), (6.5e-6, "one thread"), (None, "threads")],
)
def test_it_stays_where_that_takes_longer_or_nothing_is_launched(
    shared_s: float | None, beside: str
) -> None:
    points = ((0, 5.0e-6),) if shared_s is None else ((0, 5.0e-6), (1, shared_s))
    small, times = choices_of(pointwise(MIDDLE), *points)
    large, more = choices_of(product(), (int(beside == "threads"), 1e-4))
    assert chosen_in_company([small, large], [times, more]) == [small, large]


@pytest.mark.parametrize("source", ["untuned", "library", "cache"])
def test_only_what_was_searched_for_now_is_changed(source: Source) -> None:
    small, times = choices_of(pointwise(MIDDLE), (0, 5.0e-6), (1, 6.5e-6))
    large, more = choices_of(product(), (1, 1e-4))
    known = replace(small, source=source)
    assert chosen_in_company([known, large], [times, more])[0] == known


def test_kernels_that_were_chosen_before_launch_threads_too() -> None:
    small, times = choices_of(pointwise(MIDDLE), (0, 5.0e-6), (1, 6.5e-6))
    known = drafts(product())[0][1]
    assert par(chosen_in_company([small], [times], [known])[0].candidate) == 1
    assert chosen_in_company([small], [times]) == [small]
