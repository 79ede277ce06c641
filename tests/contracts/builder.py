"""What every builder of measurement workers promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from tests.families import kernels as K
from torch_pruner.codegen.build.lower import aligned
from torch_pruner.graph.reference import evaluate
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from torch_pruner.task import Task
    from torch_pruner.tuner.measure.builder import Builder, BuiltKernel

Array = np.ndarray[Any, Any]
BOUND = 1e-4


def laid_out(built: BuiltKernel, inputs: list[Array]) -> list[Array]:
    """Arrays as a worker binds them: inputs packed, outputs and scratch full of 7."""
    arrays = []
    for array, pack in zip(inputs, built.packs, strict=True):
        packed = array if pack is None else pack.pack(array)
        arrays.append(aligned(packed.shape, str(packed.dtype)))
        arrays[-1][...] = packed
    for shape, dtype in (*built.outputs, *built.scratch):
        arrays.append(aligned(shape, dtype))
        arrays[-1][...] = 7
    return arrays


def outputs_of(built: BuiltKernel, arrays: list[Array]) -> list[Array]:
    n = len(built.packs)
    return arrays[n : n + len(built.outputs)]


class BuilderContract:
    """Subclasses give fixtures ``builder``, ``task`` and ``good``, a candidate of it.

    ``bad`` is a candidate that cannot be built; by default one of no family.
    """

    @pytest.fixture
    def builder(self) -> Builder:
        raise NotImplementedError

    @pytest.fixture
    def task(self) -> Task:
        raise NotImplementedError

    @pytest.fixture
    def good(self) -> Candidate:
        raise NotImplementedError

    @pytest.fixture
    def bad(self) -> Candidate:
        return Candidate("no_such_family")

    @pytest.fixture
    def built(self, builder: Builder, task: Task, good: Candidate) -> BuiltKernel:
        builder.set_threads(task.threads)
        return builder.build(task.spec, task.target, task.threads, good)

    def test_outputs_are_the_graph_s(self, built, task) -> None:
        nodes = [task.spec.nodes[o] for o in task.spec.outputs]
        assert [dtype for _, dtype in built.outputs] == [n.dtype for n in nodes]
        assert [np.prod(shape) for shape, _ in built.outputs] == [n.numel for n in nodes]
        assert len(built.packs) == len(task.spec.inputs)

    def test_a_call_computes_what_the_graph_says_and_again(self, built, task) -> None:
        inputs = K.inputs_for(task.spec)
        arrays = laid_out(built, inputs)
        given = [a.copy() for a in arrays[: len(inputs)]]
        call, out = built.bind(arrays), outputs_of(built, arrays)
        for _ in range(2):
            call()
            built.fetch(out)
            assert K.error(out, evaluate(task.spec, inputs)) < BOUND
            for mine, before in zip(arrays, given, strict=False):
                np.testing.assert_array_equal(mine, before)
            for array in out:
                array[...] = 7

    def test_calls_on_other_arrays_do_not_meet(self, built, task) -> None:
        sets = [K.inputs_for(task.spec, seed) for seed in (1, 2)]
        arrays = [laid_out(built, inputs) for inputs in sets]
        calls = [built.bind(a) for a in arrays]
        for at in (1, 0):
            calls[at]()
            built.fetch(outputs_of(built, arrays[at]))
        for inputs, mine in zip(sets, arrays, strict=True):
            assert K.error(outputs_of(built, mine), evaluate(task.spec, inputs)) < BOUND

    def test_a_call_keeps_its_arrays(self, built, task) -> None:
        """A worker keeps the call, and nothing of what it was made of but the outputs."""
        inputs = K.inputs_for(task.spec)
        arrays = laid_out(built, inputs)
        out, call = outputs_of(built, arrays), built.bind(arrays)
        del arrays
        _junk = [np.full(4096, 9.0, np.float32) for _ in range(64)]
        call()
        built.fetch(out)
        assert K.error(out, evaluate(task.spec, inputs)) < BOUND

    def test_its_clock_counts_every_call_or_is_the_worker_s(self, builder, built, task) -> None:
        arrays = [laid_out(built, K.inputs_for(task.spec, seed)) for seed in (1, 2)]
        ran = [0, 0]

        def counted(at: int, call: Any) -> Any:
            def run() -> None:
                ran[at] += 1
                call()

            return run

        seconds = builder.seconds([counted(k, built.bind(a)) for k, a in enumerate(arrays)], 5)
        if seconds is None:
            assert ran == [0, 0]
        else:
            assert seconds > 0
            assert ran == [3, 2]

    def test_renewed_arrays_hold_what_they_held(self, builder, built, task) -> None:
        builder.set_threads(2)
        arrays = K.inputs_for(task.spec)
        before = [a.copy() for a in arrays]
        renew = builder.renewal(task.target, arrays)
        if renew is not None:
            renew()
        for mine, theirs in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(mine, theirs)

    def test_a_bad_candidate_raises_and_the_next_is_built(self, builder, task, good, bad) -> None:
        with pytest.raises(Exception):  # noqa: B017, PT011 - any: the worker answers with its text
            builder.build(task.spec, task.target, task.threads, bad)
        builder.build(task.spec, task.target, task.threads, good)
