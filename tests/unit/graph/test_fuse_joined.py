"""Which concatenations are computed inside the elementwise kernel that reads them."""

from __future__ import annotations

from torch_pruner.graph.fuse import fuse
from torch_pruner.graph.ir import Graph, GraphBuilder


def joined(*, readers: int = 1, mixed: bool = False, reduced: bool = False) -> Graph:
    b = GraphBuilder()
    x, y, scale = (b.input(i, (4, 32), "float32") for i in range(3))
    cat = b.append("cat", (x, y), (8, 32), "float32", dim=0)
    other = b.input(3, (8, 32), "float32")
    if mixed:
        other = b.append("cat", (y, scale), (8, 32), "float32", dim=0)
    out = [b.pointwise("tanh", b.pointwise("mul", cat, other))]
    if readers > 1:
        out.append(b.pointwise("relu", cat))
    if reduced:
        out = [b.reduce("sum", out[0], (1,))]
    return b.finish(out)


def stored(graph: Graph) -> list[bool]:
    """For each concatenation, whether it is an output of a kernel of its own."""
    kernels = fuse(graph).kernels
    made = {o for k in kernels for o in k.outputs}
    return [i in made for i, n in enumerate(graph.nodes) if n.op == "cat"]


def test_one_elementwise_reader_takes_it_in() -> None:
    assert stored(joined()) == [False]
    assert len(fuse(joined()).kernels) == 1


def test_several_readers_share_a_buffer() -> None:
    assert stored(joined(readers=2)) == [True]


def test_a_kernel_reads_one_part_by_part() -> None:
    assert True in stored(joined(mixed=True))


def test_reductions_read_a_buffer() -> None:
    assert stored(joined(reduced=True)) == [True]
