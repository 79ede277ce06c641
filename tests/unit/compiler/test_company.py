"""Drafts of kernels that share a program: which of them threads share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torch_pruner.compiler.company import in_company
from torch_pruner.compiler.kernels import drafts
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, Task

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
