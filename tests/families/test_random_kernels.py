"""Kernels of random graphs under random valid decisions, against the reference interpreter.

Each kernel runs on what the kernels before it computed, with guarded memory around its outputs and
scratch: a store outside them is an error even when the result is right.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.emitting import schedule
from tests.unit.graph.random_graphs import assert_close, inputs_for, random_graph, run_kernels
from torch_pruner.codegen.build.lower import aligned, compile_kernel, numpy_dtype
from torch_pruner.families import sketches_for
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_pruner.codegen.parts.kernel import ScheduledKernel
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.signature import BufferSpec

pytestmark = [pytest.mark.tvm, pytest.mark.sampled(4)]

_DIMS = (1, 2, 3, 4, 7, 16, 17, 40)  # vectors of 8 and 16 lanes: filled, crossed, missed
_GUARD = 4096
_FILL = 0xA5


class Guarded:
    """An aligned array of garbage between two stretches that nobody may write."""

    def __init__(self, spec: BufferSpec) -> None:
        self._raw = aligned((spec.nbytes + 2 * _GUARD,), "uint8")
        self._raw[...] = _FILL
        self._end = _GUARD + spec.nbytes
        inner = self._raw[_GUARD : self._end]
        self.array = inner.view(numpy_dtype(spec.dtype)).reshape(spec.shape)

    def intact(self) -> bool:
        around = (self._raw[:_GUARD], self._raw[self._end :])
        return all((part == _FILL).all() for part in around)


def run(
    kernel: ScheduledKernel, given: Sequence[np.ndarray], target: TargetSpec
) -> list[np.ndarray]:
    """The outputs, after checking that nothing else was written."""
    arrays = []
    for array, pack in zip(given, kernel.packs, strict=True):
        source = array if pack is None else pack.pack(array)
        arrays.append(aligned(source.shape, str(source.dtype)))
        arrays[-1][...] = source
    outputs = [Guarded(o) for o in kernel.outputs]
    scratch = [Guarded(s) for s in kernel.scratch]
    before = [a.copy() for a in arrays]
    everything = [*arrays, *(o.array for o in outputs), *(s.array for s in scratch)]
    compile_kernel(kernel, target).bind(everything)()
    assert all(g.intact() for g in (*outputs, *scratch)), "a store outside a buffer"
    for array, copy in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, copy, "an input was written")
    return [o.array for o in outputs]


def points(sketch: Sketch, rng: np.random.Generator, count: int) -> Iterator[dict[str, int]]:
    """The default and random valid points."""
    grid = np.stack(np.meshgrid(*sketch.domains, indexing="ij"), axis=-1)
    grid = grid.reshape(-1, len(sketch.names))
    grid = grid[sketch.valid(grid)]
    chosen = grid[rng.permutation(len(grid))[: count - 1]]
    for point in np.unique(np.concatenate([sketch.default()[None], chosen]), axis=0):
        yield dict(sketch.named(point))


def check(spec: Graph, given: Sequence[np.ndarray], rng: np.random.Generator, count: int) -> None:
    target = TargetSpec.detect(2)
    expected = evaluate(spec, given)
    halves = any(n.dtype in ("float16", "bfloat16") for n in spec.nodes)  # rounded less often
    for sketch in sketches_for(Task("kernel", spec, target, 2)):
        for decisions in points(sketch, rng, count):
            outputs = run(schedule(spec, sketch.name, decisions), given, target)
            try:
                assert_close(outputs, expected, 2e-2 if halves else 1e-4)
            except AssertionError as err:
                text = "\n".join(f"{i} {n}" for i, n in enumerate(spec.nodes))
                err.add_note(f"{sketch.name} {decisions}\n{text}\noutputs {spec.outputs}")
                raise


def check_seed(seed: int, *, moves: int, count: int) -> None:
    graph = random_graph(seed, moves=moves, numel=4096, dims=_DIMS)
    rng = np.random.default_rng(seed)
    seen = set()
    for kernel, given, _ in run_kernels(fuse(graph), inputs_for(graph)):
        if (digest := kernel.spec.digest()) not in seen:
            seen.add(digest)
            check(kernel.spec, given, rng, count)


@pytest.mark.parametrize("seed", range(40))
def test_random_kernels(seed: int) -> None:
    check_seed(seed, moves=1 + seed % 9, count=3)


@pytest.mark.stress
@pytest.mark.parametrize("first", range(1000, 1400, 20))
def test_many_random_kernels(first: int) -> None:
    for seed in range(first, first + 20):
        check_seed(seed, moves=1 + seed % 12, count=4)


def test_no_task_lies_past_the_last_row() -> None:
    """More chunks than rows fill wrote past the output: 24 chunks of 2 rows for 32 rows."""
    b = GraphBuilder()
    x = b.input(0, (32, 8), "float32")
    spec = b.finish([b.matmul(x, b.input(1, (8, 16), "float32", static=True))])
    arrays = inputs_for(spec)
    for chunks, order in itertools.product((3, 12, 24), (0, 1)):
        decisions = {
            "vl": 8,
            "tm": 1,
            "nv": 2,
            "mc": chunks,
            "order": order,
            "ku": 1,
            "pack": 1,
            "par": 1,
            "ahead": 1,
            "kb": 1,
        }
        outputs = run(schedule(spec, "contraction", decisions), arrays, TargetSpec.detect(2))
        assert_close(outputs, evaluate(spec, arrays), 1e-5)


@pytest.mark.parametrize("rank", [2, 3])
def test_row_kernels_store_in_the_order_of_a_square(rank: int) -> None:
    """An output transposed to the shape it had got the values of other rows."""
    b = GraphBuilder()
    axis = rank - 1
    x = b.input(0, (8,) * rank, "float32")
    e = b.pointwise("exp", x)
    total = b.reduce("sum", e, (axis,), keepdim=True)
    share, flat = b.pointwise("div", e, total), b.reshape(total, (8,) * axis)
    order, flat_order = tuple(reversed(range(rank))), tuple(reversed(range(axis)))
    graph = b.finish([share, b.pointwise("neg", flat)])
    fused = fuse(graph, dict(zip(graph.outputs, (order, flat_order), strict=True)))
    for kernel, given, _ in run_kernels(fused, inputs_for(graph)):
        check(kernel.spec, given, np.random.default_rng(0), 4)
