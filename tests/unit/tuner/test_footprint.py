"""What schedules need in memory, told without building them."""

from __future__ import annotations

import pytest

from torch_pruner import families
from torch_pruner.families.footprint import footprint_of
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, Task

ROWS, DEPTH, COLUMNS = 64, 128, 40
WEIGHT = DEPTH * COLUMNS * 4


def task(*, static: bool = True) -> Task:
    b = GraphBuilder()
    x = b.input(0, (ROWS, DEPTH), "float32")
    w = b.input(1, (DEPTH, COLUMNS), "float32", static=static)
    return Task("linear", b.finish([b.matmul(x, w)]), TargetSpec.detect(2), 2)


def point(given: Task, name: str, **changes: int) -> Candidate:
    sketch = next(s for s in families.sketches_for(given) if s.name == name)
    taken = {**sketch.named(sketch.default()), **changes}
    return Candidate(name, tuple(sorted(taken.items())))


def test_panels_are_padded_to_their_width() -> None:
    given = task()
    narrow = footprint_of(given.spec, point(given, "contraction", vl=8, nv=1))
    wide = footprint_of(given.spec, point(given, "contraction", vl=16, nv=2))
    assert narrow.packed_bytes == narrow.constant_bytes == WEIGHT
    assert wide.packed_bytes == DEPTH * 64 * 4


def test_what_is_read_where_it_lies_has_no_copy() -> None:
    b = GraphBuilder()
    x = b.input(0, (4, DEPTH), "float32")
    w = b.input(1, (COLUMNS, DEPTH), "float32", static=True)
    given = Task("linear", b.finish([b.matmul(x, b.permute(w, (1, 0)))]), TargetSpec.detect(2), 2)
    found = footprint_of(given.spec, point(given, "in_place"))
    assert (found.packed_bytes, found.constant_bytes) == (0, WEIGHT)
    assert found.held(3, freed=False) == found.scratch_bytes
    assert found.held(3, freed=True) == 3 * WEIGHT + found.scratch_bytes


def test_the_copy_of_what_changes_is_scratch() -> None:
    """As under ``weights="live"``: packed anew by every call, and shared by all."""
    given = task(static=False)
    found = footprint_of(given.spec, point(given, "contraction", vl=16, nv=2, pack=1))
    assert found.packed_bytes == found.constant_bytes == 0
    assert found.scratch_bytes >= DEPTH * 64 * 4
    assert found.held(5, freed=True) == found.scratch_bytes


def test_the_librarys_own_memory_is_not_known() -> None:
    assert footprint_of(task().spec, Candidate("library")).nbytes == 0


def test_a_family_that_nobody_knows() -> None:
    with pytest.raises(KeyError):
        footprint_of(task().spec, Candidate("of_tomorrow"))
