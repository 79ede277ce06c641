"""Memory plans: kernels on the planned places compute the graph; live buffers never overlap."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.emitting import signature
from tests.unit.graph.random_graphs import assert_close, graphs, inputs_for, orders
from tests.unit.graph.random_graphs import from_memory as tensor_of
from torch_pruner.families import sketches_for
from torch_pruner.graph.fuse import FusedGraph, fuse
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.memory import ALIGNMENT, MemoryPlan, Place, plan_memory
from torch_pruner.graph.reference import evaluate, numpy_dtype
from torch_pruner.graph.signature import BufferSpec, Signature
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_MANY = settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
_TARGET = TargetSpec.detect(2)


def signatures(fused: FusedGraph, choose: Callable[[int], int]) -> list[Signature]:
    """Signatures of the kernels under some valid decisions each."""
    found = []
    for kernel in fused.kernels:
        sketches = sketches_for(Task("kernel", kernel.spec, _TARGET, 2))
        sketch = sketches[choose(len(sketches))]
        grid = np.stack(np.meshgrid(*sketch.domains, indexing="ij"), axis=-1)
        grid = grid.reshape(-1, len(sketch.names))
        grid = grid[sketch.valid(grid)]
        point = sketch.named(grid[choose(len(grid))])
        found.append(signature(kernel.spec, sketch.name, point))
    return found


def addresses(plan: MemoryPlan, fused: FusedGraph, arrays: Sequence[np.ndarray]) -> list[bytearray]:
    """Memory for every slot; what no input fills is garbage."""
    graph = fused.graph
    memory = []
    for slot in plan.slots:
        match slot.kind:
            case "input":
                order = fused.orders[graph.inputs[slot.index]]
                memory.append(bytearray(arrays[slot.index].transpose(order).tobytes()))
            case "packed":
                assert slot.pack is not None
                order = fused.orders[graph.inputs[slot.index]]
                stored = np.array(arrays[slot.index].transpose(order), order="C")
                memory.append(bytearray(slot.pack.pack(stored).tobytes()))
            case "output":
                memory.append(bytearray(b"\xa5" * graph.nodes[graph.outputs[slot.index]].nbytes))
            case "workspace":
                memory.append(bytearray(b"\xa5" * plan.workspace_bytes))
    return memory


def view(memory: list[bytearray], place: Place, spec: BufferSpec) -> np.ndarray:
    assert place.offset + spec.nbytes <= len(memory[place.slot])
    count = int(np.prod(spec.shape))
    flat = np.frombuffer(memory[place.slot], numpy_dtype(spec.dtype), count, place.offset)
    return flat.reshape(spec.shape)


def simulate(
    fused: FusedGraph, plan: MemoryPlan, takes: Sequence[Signature], arrays: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The outputs of a run in which every kernel destroys its scratch before it writes."""
    graph = fused.graph
    memory = addresses(plan, fused, arrays)
    for kernel, places, take in zip(fused.kernels, plan.arguments, takes, strict=True):
        n = len(take.inputs)
        given_ = []
        for node, place, spec, pack in zip(
            kernel.inputs, places, take.inputs, take.packs, strict=False
        ):
            if pack is None:
                given_.append(view(memory, place, spec).copy())
            else:  # the interpreter knows no packed operands
                index = graph.nodes[node].attr("index")
                given_.append(np.array(arrays[index].transpose(fused.orders[node]), order="C"))
                np.testing.assert_array_equal(view(memory, place, spec), pack.pack(given_[-1]))
        for place, spec in zip(places[n + len(take.outputs) :], take.scratch, strict=True):
            view(memory, place, spec).view(np.uint8)[...] = 0x5A
        for place, spec, value in zip(
            places[n:], take.outputs, evaluate(kernel.spec, given_), strict=False
        ):
            view(memory, place, spec)[...] = value
    results = []
    for node, slot in zip(graph.outputs, plan.outputs, strict=True):
        order = fused.orders[node]
        shape = tuple(graph.nodes[node].shape[k] for k in order)
        stored = view(memory, Place(slot), BufferSpec(shape, graph.nodes[node].dtype))
        results.append(tensor_of(stored, order))
    return results


def check_apart(fused: FusedGraph, plan: MemoryPlan, takes: Sequence[Signature]) -> None:
    """Within one kernel nothing overlaps, and every place is aligned."""
    for places, take in zip(plan.arguments, takes, strict=True):
        spans = []
        for place, spec in zip(places, (*take.inputs, *take.outputs, *take.scratch), strict=True):
            assert place.offset % ALIGNMENT == 0
            assert plan.slots[place.slot].kind == "workspace" or place.offset == 0
            if plan.slots[place.slot].kind == "workspace":
                assert place.offset + spec.nbytes <= plan.workspace_bytes
                spans.append((place.offset, place.offset + spec.nbytes))
        spans.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))


@_MANY
@given(st.data())
def test_runs_on_planned_memory(data) -> None:
    graph = data.draw(graphs(moves=14))
    fused = fuse(graph, data.draw(orders(graph)))
    takes = signatures(fused, lambda n: data.draw(st.integers(0, n - 1)))
    plan = plan_memory(fused, takes)
    arrays = inputs_for(graph)
    check_apart(fused, plan, takes)
    assert_close(simulate(fused, plan, takes, arrays), evaluate(graph, arrays), 1e-4)


@_MANY
@given(graphs(moves=14))
def test_inputs_are_not_written_and_slots_are_not_doubled(graph: Graph) -> None:
    fused = fuse(graph)
    takes = signatures(fused, lambda _: 0)
    plan = plan_memory(fused, takes)
    assert len(set(plan.slots)) == len(plan.slots)
    for places, take in zip(plan.arguments, takes, strict=True):
        n = len(take.inputs)
        assert all(plan.slots[p.slot].kind in ("output", "workspace") for p in places[n:])
    for node, slot in zip(graph.outputs, plan.outputs, strict=True):
        wanted = "input" if graph.nodes[node].op == "input" else "output"
        assert plan.slots[slot].kind == wanted


def chain(length: int) -> Graph:
    b = GraphBuilder()
    x = b.input(0, (32, 32), "float32")
    for i in range(length):
        x = b.matmul(x, b.input(i + 1, (32, 32), "float32", static=True))
    return b.finish([x])


def test_memory_of_a_chain_does_not_grow() -> None:
    """Two buffers take turns; the last is the caller's."""
    sizes = []
    for length in (4, 16):
        fused = fuse(chain(length))
        sizes.append(plan_memory(fused, signatures(fused, lambda _: 0)).workspace_bytes)
    assert sizes == [2 * 32 * 32 * 4] * 2


def test_one_node_twice_among_the_outputs_is_one_slot() -> None:
    b = GraphBuilder()
    x = b.input(0, (4,), "float32")
    y = b.pointwise("neg", x)
    fused = fuse(b.finish([y, x, y]))
    plan = plan_memory(fused, signatures(fused, lambda _: 0))
    assert plan.outputs[0] == plan.outputs[2]
    assert plan.slots[plan.outputs[1]].kind == "input"


def test_an_update_in_place_lies_where_its_input_does() -> None:
    """What reads it runs after it, on the same memory."""
    b = GraphBuilder()
    cache, rows = b.input(0, (2, 16, 8), "float32"), b.input(1, (2, 1, 8), "float32")
    put = (cache, b.pointwise("exp", rows), b.input(2, (1,), "int64"))
    new = b.append("update", put, (2, 16, 8), "float32", dim=1, in_place=True)
    scores = b.matmul(b.input(3, (2, 1, 8), "float32"), b.permute(new, (0, 2, 1)))
    graph = b.finish([new, scores])
    fused = fuse(graph)
    takes = signatures(fused, lambda _: 0)
    plan = plan_memory(fused, takes)
    assert plan.slots[plan.outputs[0]].kind == "input"
    assert [kernel.outputs for kernel in fused.kernels] == [
        (graph.outputs[0],),
        (graph.outputs[1],),
    ]
    arrays = inputs_for(graph)
    assert_close(simulate(fused, plan, takes, arrays), evaluate(graph, arrays), 1e-4)
