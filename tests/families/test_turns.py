"""Programs whose kernels share phases: as planned for some threads, on fewer and on more.

On one thread, shares run one after the other: what would have to wait for another share finds the
NaN with which memory was filled, however fast machines are.
"""

from __future__ import annotations

import ctypes
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.emitting import schedule, signature
from tests.families import kernels as K
from tests.unit.graph.random_graphs import assert_close, inputs_for, random_graph
from torch_pruner.codegen.build.load import set_threads
from torch_pruner.codegen.build.lower import aligned, compile_module, program_module
from torch_pruner.compiler.drafting import draft
from torch_pruner.compiler.phases import turns_of
from torch_pruner.families import named, sketches_for
from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.memory import KernelCall, plan_memory
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.phases import Turn

pytestmark = pytest.mark.tvm

HIDDEN, WIDE = 96, 192


def layer(rows: int, dtype: str = "float32") -> Graph:
    """A decoder's layer, in place of its attention a product of three projections."""
    b = GraphBuilder()
    count = iter(range(99))
    x = b.input(next(count), (rows, HIDDEN), dtype)

    def linear(y: int, n: int) -> int:
        w = b.input(next(count), (n, b.shape(y)[-1]), dtype, static=True)
        return b.matmul(y, b.permute(w, (1, 0)))

    def norm(y: int) -> int:
        mean = b.reduce("sum", b.pointwise("mul", y, y), [1], keepdim=True)
        scale = b.pointwise("sqrt", b.pointwise("add", mean, b.const(1.0, dtype)))
        return b.pointwise("div", y, scale)

    y = norm(x)
    q, k, v = (linear(y, HIDDEN) for _ in range(3))
    turned = b.append("flip", (k,), b.shape(k), dtype, dims=(1,))
    mixed = b.pointwise("add", b.pointwise("mul", q, turned), norm(v))
    x = b.pointwise("add", x, linear(mixed, HIDDEN))
    y = norm(x)
    gate, up = linear(y, WIDE), linear(y, WIDE)
    gated = b.pointwise("mul", b.pointwise("exp", b.pointwise("neg", gate)), up)
    return b.finish([b.pointwise("add", x, linear(gated, HIDDEN))])


def planned(
    graph: Graph,
    threads: int,
    choose: Callable[[Task], Candidate],
    arrays: Sequence[np.ndarray] = (),
) -> tuple[tuple[Turn, ...], Callable[[], list[np.ndarray]]]:
    """The turns of a graph's kernels, and its program on inputs that are always the same."""
    target = TargetSpec.detect(threads)
    fused = fuse(graph)
    workloads = [k.spec.digest() for k in fused.kernels]
    tasks = {
        w: Task("k", k.spec, target, threads) for w, k in zip(workloads, fused.kernels, strict=True)
    }
    chosen = {w: (task, choose(task)) for w, task in tasks.items()}
    turns = turns_of(fused, workloads, chosen, threads)
    assert turns is not None
    ways = {w: (t.spec, c.sketch, dict(c.decisions)) for w, (t, c) in chosen.items()}
    plan = plan_memory(fused, [signature(*ways[w]) for w in workloads], turns, threads)
    calls = [
        KernelCall(w, places, turn)
        for w, places, turn in zip(workloads, plan.arguments, turns, strict=True)
    ]
    scheduled = {w: schedule(*way) for w, way in ways.items()}
    module = program_module(scheduled, {"main": calls}, len(plan.slots), threads)
    library = compile_module(module, target)
    arrays = arrays or inputs_for(graph)

    def run() -> list[np.ndarray]:
        memory = []
        for slot in plan.slots:
            node = graph.inputs[slot.index] if slot.kind in ("input", "packed") else -1
            match slot.kind:
                case "input":
                    given = np.array(arrays[slot.index].transpose(fused.orders[node]), order="C")
                case "packed":
                    assert slot.pack is not None
                    given = slot.pack.pack(arrays[slot.index].transpose(fused.orders[node]))
                case "output":
                    result = graph.nodes[graph.outputs[slot.index]]
                    given = aligned(result.shape, result.dtype)
                case _:
                    given = np.full(max(plan.workspace_bytes // 4, 1), np.nan, np.float32)
            memory.append(aligned(given.shape, str(given.dtype)))
            memory[-1][...] = given
        table = (ctypes.c_int64 * len(memory))(*(m.ctypes.data for m in memory))
        library["main"](ctypes.addressof(table))
        return [memory[slot] for slot in plan.outputs]

    return turns, run


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(
    ("family", "rows", "dtype"),
    [
        ("in_place", 1, "float32"),
        ("in_place", 5, "float32"),
        ("in_place", 3, "bfloat16"),
        ("contraction", 5, "float32"),
        ("contraction", 7, "bfloat16"),
        ("bf16_pairs", 4, "bfloat16"),
    ],
)
def test_a_layer_with_five_barriers(threads: int, family: str, rows: int, dtype: str) -> None:
    if family == "bf16_pairs" and not TargetSpec.detect().bf16_dot:
        pytest.skip("the processor has no such instructions")
    graph = layer(rows, dtype)
    turns, run = planned(graph, threads, partial(divided, family))
    assert turns[-1].phase <= 4  # as many barriers, one more to begin the next layer
    assert sum(t.everywhere for t in turns) >= 3
    if family == "in_place":  # which widens its first operand before the product
        assert any(t.prologue for t in turns) == (dtype == "bfloat16")
    for actual in (1, 2, threads, 4):
        set_threads(actual)
        try:
            for _ in range(5):
                assert_close(run(), evaluate(graph, inputs_for(graph)), 1e-5)
        finally:
            set_threads(2)


def divided(name: str, task: Task) -> Candidate:
    """The draft; a product as a family does it whose tasks are columns."""
    if not any(n.op == "matmul" for n in task.spec.nodes):
        return draft(task)
    (sketch,) = [s for s in sketches_for(task) if s.name == name]
    grid = np.stack(np.meshgrid(*sketch.domains, indexing="ij"), axis=-1)
    grid = grid.reshape(-1, len(sketch.names))
    grid = grid[sketch.valid(grid)]
    family = named(name)
    for at in np.argsort(sketch.symbols(grid).latency_s):
        point = sketch.named(grid[at])
        if family.division(task.spec, family.typed(point)) is not None:
            return Candidate(name, tuple(sorted(point.items())))
    raise AssertionError("no schedule is divided by columns")


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_in_random_schedules(seed: int) -> None:
    graph = random_graph(seed, moves=12)
    rng = np.random.default_rng(seed)

    def anyhow(task: Task) -> Candidate:
        sketches = [s for s in sketches_for(task) if s.name != "metaschedule"]
        sketch = sketches[rng.integers(len(sketches))]
        chosen = K.points(sketch, 8)
        point = chosen[rng.integers(len(chosen))]
        return Candidate(sketch.name, tuple(sorted(point.items())))

    _, run = planned(graph, 3, anyhow)
    for actual in (1, 2, 3):
        set_threads(actual)
        try:
            assert_close(run(), evaluate(graph, inputs_for(graph)), 1e-4)
        finally:
            set_threads(2)
