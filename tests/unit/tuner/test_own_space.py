"""Search spaces of users, in the place of built-in ones."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import pytest

from torch_pruner.families import drop_space, sketches_for, use_space
from torch_pruner.families.contraction.space import ContractionSketch
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task


class Narrow(ContractionSketch):
    """One vector at a time, for small products."""

    @staticmethod
    def fits(task):
        return task.spec.nodes[task.spec.outputs[0]].shape[0] < 24

    @cached_property
    def domains(self):
        options = dict(zip(self.names, super().domains, strict=True))
        options["nv"] = np.array([1])
        return tuple(options.values())


class Narrower(Narrow):
    pass


@pytest.fixture
def spaces():
    used = []

    def use(space):
        use_space(space)
        used.append(space)

    yield use
    for space in used:
        drop_space(space)


def product(rows):
    b = GraphBuilder()
    x, w = b.input(0, (rows, 64), "float32"), b.input(1, (64, 64), "float32", static=True)
    return Task("matmul", b.finish([b.matmul(x, w)]), TargetSpec.detect(2), 2, 1)


def kinds(rows):
    return [type(s) for s in sketches_for(product(rows))]


def test_a_space_takes_the_place_of_the_built_in_one_of_its_name(spaces) -> None:
    spaces(Narrow)
    assert kinds(20) == [Narrow]
    assert kinds(32) == [ContractionSketch]
    sketch = sketches_for(product(20))[0]
    assert sketch.named(sketch.default())["nv"] == 1


def test_the_last_one_counts(spaces) -> None:
    spaces(Narrow)
    spaces(Narrower)
    spaces(Narrow)  # it is used already
    assert kinds(20) == [Narrower]


def test_a_space_is_dropped(spaces) -> None:
    spaces(Narrow)
    drop_space(Narrow)
    drop_space(Narrow)
    assert kinds(20) == [ContractionSketch]
