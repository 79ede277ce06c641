"""Updates: rows at positions of a value, in a copy of it or where it lies."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from tests.families.updates import Case, graph
from tests.unit.tuner import graphs_by_kind as G
from torch_pruner.codegen.build.lower import aligned, compile_kernel
from torch_pruner.families import sketches_for
from torch_pruner.graph.reference import evaluate
from torch_pruner.graph.updates import before_updates, written_inputs
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureInput, MeasureStatus, Task
from torch_pruner.tuner.measure import check
from torch_pruner.tuner.measure.base import EvaluatorSpec
from torch_pruner.tuner.measure.local import LocalExecutor

pytestmark = pytest.mark.tvm


CASES = {
    "one row": Case(),
    "a prompt": Case(places=(5,)),
    "the first axis": Case((7, 33), 0, (3,)),
    "the last axis": Case((5, 8), 1, (2,)),
    "a line": Case((9,), 0, (2,)),
    "a place": Case((4, 6, 20), 0, (3,), 2),
    "positions of two axes": Case((4, 6, 5), 1, (2, 3)),
    "half precision": Case(dtype="bfloat16"),
    "bytes": Case(dtype="int8"),
    "truth": Case(dtype="bool"),
    "another order": Case((2, 40, 3, 16), 2, order=(0, 2, 1, 3)),
}


@pytest.mark.parametrize("in_place", [False, True], ids=["copied", "in place"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_do_as_the_reference(name: str, in_place: bool) -> None:
    spec = graph(CASES[name], in_place=in_place)
    task = Task("kernel", spec, TargetSpec.detect(2), 2)
    (sketch,) = sketches_for(task)
    assert sketch.name == "update"
    given = [K.aligned(a.shape, a.dtype.name) for a in check.random_inputs(spec, 0)]
    for array, value in zip(given, check.random_inputs(spec, 0), strict=True):
        array[...] = value
    (expected,) = evaluate(spec, given)
    for decisions in K.points(sketch, 2):
        out = aligned(expected.shape, expected.dtype.name)
        out[...] = evaluate(before_updates(spec), given)[0] if in_place else 0
        kernel = schedule(spec, "update", decisions)
        compile_kernel(kernel, task.target).bind([*given, out])()
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("name", ["a prompt", "the first axis", "a line", "positions of two axes"])
def test_rows_are_added_in_their_order(name: str) -> None:
    spec = graph(CASES[name], adds=True)
    task = Task("kernel", spec, TargetSpec.detect(2), 2)
    (sketch,) = sketches_for(task)
    given = [K.aligned(a.shape, a.dtype.name) for a in check.random_inputs(spec, 0)]
    for array, value in zip(given, check.random_inputs(spec, 0), strict=True):
        array[...] = value if array.dtype == np.float32 else value.flat[0]  # all in one place
    (expected,) = evaluate(spec, given)
    for decisions in K.points(sketch, 2):
        out = aligned(expected.shape, "float32")
        compile_kernel(schedule(spec, "update", decisions), task.target).bind([*given, out])()
        np.testing.assert_allclose(out, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("places", [[7, 7, 7], [-1, 0, -40]], ids=["one place", "from the end"])
def test_the_last_row_for_a_place_stays(places: list[int]) -> None:
    spec = graph(Case(places=(3,)), in_place=True)
    cache, rows, _ = K.inputs_for(spec)
    index = aligned((3,), "int64")
    index[...] = places
    expected = evaluate(spec, [cache, rows, index])[0]
    assert np.array_equal(expected[:, :, places[-1]], rows[:, :, -1])
    kernel = schedule(spec, "update", {"vl": 8, "chunk": 1, "par": 1})
    compile_kernel(kernel, TargetSpec.detect(2)).bind([cache, rows, index, cache])()
    np.testing.assert_array_equal(cache, expected)


def test_what_is_written_in_place_is_known() -> None:
    assert written_inputs(graph(Case(), in_place=True)) == {0: 0}
    assert written_inputs(graph(Case(), in_place=False)) == {}
    assert before_updates(graph(Case(), in_place=False)) is None


def test_workers_compare_an_update_in_place_with_what_lay_there() -> None:
    task = Task("kernel", G.update(), TargetSpec.detect(1), 1)
    right = Candidate("update", (("chunk", 1), ("par", 0), ("vl", 8)))
    with LocalExecutor(1, EvaluatorSpec(repeat=2, min_repeat_s=2e-4)) as executor:
        (result,) = executor.measure([MeasureInput(task, right)])
    assert (result.status, result.error) == (MeasureStatus.OK, "")
