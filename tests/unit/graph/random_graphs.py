"""Random well-formed graphs with every operator, and running their kernels in the interpreter.

A graph grows by moves that append what models are made of: activations, views, normalisations,
contractions, pooling, indexing. Each value carries a bound of its magnitude and the number of
fractional bits it needs; operators that jump (comparisons, rounding) only take values that are
exact, so that summing in another order changes no result by much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from torch_pruner.graph.ops import FLOATS
from torch_pruner.graph.reference import evaluate, numpy_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch_pruner.graph.fuse import FusedGraph, Kernel
    from torch_pruner.graph.ir import Graph

from tests.unit.graph.random_growth import Growth
from tests.unit.graph.random_moves import MOVES


@st.composite
def graphs(draw: st.DrawFn, *, moves: int = 10, numel: int = 1024) -> Graph:
    """Graphs of at most ``moves`` moves whose values have at most ``numel`` elements."""
    growth = Growth(lambda n: draw(st.integers(0, n - 1)), numel)
    return growth.graph(1 + draw(st.integers(0, moves - 1)), MOVES)


def random_graph(
    seed: int, *, moves: int = 8, numel: int = 4096, dims: Sequence[int] = ()
) -> Graph:
    """The graph of a seed."""
    rng = np.random.default_rng(seed)
    growth = Growth(lambda n: int(rng.integers(n)), numel)
    growth.dims = tuple(dims) or growth.dims
    return growth.graph(moves, MOVES)


def inputs_for(graph: Graph, seed: int = 0) -> list[np.ndarray]:
    """Small multiples of a half, in -2..2; integers in 0..3."""
    rng = np.random.default_rng(seed)
    found = []
    for i in graph.inputs:
        node = graph.nodes[i]
        whole = rng.integers(-4, 5, node.shape) / 2
        if node.dtype not in FLOATS:
            whole = rng.integers(0, 2 if node.dtype == "bool" else 4, node.shape)
        found.append(np.asarray(whole).astype(numpy_dtype(node.dtype)))
    return found


def run_kernels(
    fused: FusedGraph, arrays: Sequence[np.ndarray]
) -> Iterator[tuple[Kernel, list[np.ndarray], list[np.ndarray]]]:
    """Every kernel in order with what it reads and what it gives, in memory order.

    Raises ``KeyError`` when a kernel reads what nothing has written.
    """
    graph = fused.graph
    memory = {}
    for i in graph.inputs:
        array = arrays[graph.nodes[i].attr("index")]
        memory[i] = np.array(array.transpose(fused.orders[i]), order="C")
    for kernel in fused.kernels:
        given = [memory[i] for i in kernel.inputs]
        made = evaluate(kernel.spec, given)
        memory.update(zip(kernel.outputs, made, strict=True))
        yield kernel, given, made


def from_memory(array: np.ndarray, order: Sequence[int]) -> np.ndarray:
    """The tensor whose dimensions lie in memory in ``order``."""
    return array.transpose(np.argsort(order)) if order else array


def assert_close(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray], tolerance: float) -> None:
    """Equal up to ``tolerance`` of the largest finite magnitude, or of one; coarser for halves."""
    assert len(got) == len(wanted)
    for k, (a, b) in enumerate(zip(got, wanted, strict=True)):
        assert a.shape == b.shape, f"output {k}"
        assert a.dtype == b.dtype, f"output {k}"
        half = b.dtype.itemsize == 2 and b.dtype.kind not in "iu"
        x, y = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y), f"output {k}: NaN")
        same = (x == y) | np.isnan(x)
        scale = max(1.0, np.abs(y[np.isfinite(y)]).max(initial=0.0))
        worst = np.abs(np.where(same, 0, x - y)).max(initial=0.0)
        allowed = (2e-2 if half else tolerance) * scale
        assert worst <= allowed, f"output {k} of {b.dtype}{list(b.shape)}: {worst} > {allowed}"


def run_fused(fused: FusedGraph, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """The outputs of the graph, computed kernel by kernel."""
    graph = fused.graph
    made = {i: arrays[graph.nodes[i].attr("index")] for i in graph.inputs}
    for kernel, _, values in run_kernels(fused, arrays):
        for node, value in zip(kernel.outputs, values, strict=True):
            made[node] = from_memory(value, fused.orders[node])
    return [made[o] for o in graph.outputs]


@st.composite
def orders(draw: st.DrawFn, graph: Graph) -> dict[int, tuple[int, ...]]:
    """Memory orders that a caller demands of some inputs and outputs."""
    fixed = {}
    for i in (*graph.inputs, *graph.outputs):
        if draw(st.booleans()):
            fixed[i] = tuple(draw(st.permutations(range(len(graph.nodes[i].shape)))))
    return fixed
