"""Products of few rows read the panels that another program has of the same weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.fakes import linear_spec
from torch_pruner.compiler import kept_layouts
from torch_pruner.compiler.choice import Choice
from torch_pruner.compiler.drafting import draft
from torch_pruner.compiler.kept_layouts import keep_to
from torch_pruner.families import signature_of
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from torch_pruner.graph.packing import PackLayout

DEPTH, COLUMNS = 512, 384


def product(rows: int, depth: int = DEPTH) -> Task:
    spec = linear_spec(rows, depth, COLUMNS)
    return Task(f"linear{rows}", spec, TargetSpec.detect(2), 2, 1)


def drafted(task: Task) -> dict[str, Choice]:
    return {task.workload: Choice(draft(task), "tuned", 1e-5)}


def layouts(task: Task, choices: dict[str, Choice]) -> list[PackLayout]:
    found = signature_of(task.spec, choices[task.workload].candidate).packs
    return [p for p in found if p is not None]


@pytest.fixture
def held() -> list[PackLayout]:
    prompt = product(64)
    found = layouts(prompt, drafted(prompt))
    assert len(found) == 1
    return found


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_few_rows_read_what_is_there(rows: int, held: list[PackLayout]) -> None:
    step = product(rows)
    found = keep_to([step], drafted(step), held)
    assert layouts(step, found) == held
    again = keep_to([step], found, held)
    assert again == found, "what reads it already stays, tuned or not"


def test_many_rows_keep_what_was_found_for_them(held: list[PackLayout]) -> None:
    prompt = product(64)
    choices = drafted(prompt)
    other = replace(held[0], block=held[0].block * 2)
    assert keep_to([prompt], choices, [other]) == choices


def test_other_weights_are_read_as_they_were(held: list[PackLayout]) -> None:
    step = product(1, depth=2 * DEPTH)
    choices = drafted(step)
    assert keep_to([step], choices, held) == choices
    assert keep_to([step], choices, []) == choices


def test_weights_in_fewer_bytes_stay(held: list[PackLayout], monkeypatch) -> None:
    """A copy of twelve bits is read sooner than panels of sixteen."""
    step = product(1)
    choices = drafted(step)
    found = keep_to([step], choices, held)
    (few,), (many,) = (kept_layouts._packs(step, found[step.workload].candidate), held)
    smaller = replace(few, shape=(1, 1, 1, 64))
    chosen = choices[step.workload].candidate
    known = kept_layouts._packs
    monkeypatch.setattr(
        kept_layouts, "_packs", lambda t, c: [smaller] if c == chosen else known(t, c)
    )
    assert smaller.nbytes < many.nbytes
    assert keep_to([step], choices, held) == choices
