"""Which calls of one kernel are together."""

from __future__ import annotations

import pytest

from torch_pruner.graph.fuse import Kernel
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.neighbours import calls_together


def spec():
    b = GraphBuilder()
    return b.finish([b.pointwise("neg", b.input(0, (4,), "float32"))])


def kernels(*edges: tuple[tuple[int, ...], int]) -> list[Kernel]:
    return [Kernel(spec(), read, (written,)) for read, written in edges]


APART = [((0,), 1), ((0,), 2), ((0,), 3), ((3,), 4), ((4,), 5)]


@pytest.mark.parametrize(
    ("names", "edges", "want"),
    [
        ("ppp", APART[:3], {"p": 3}),
        ("pppp", APART[:4], {"p": 3}),  # the fourth waits for the third
        ("ppqp", APART[:4], {"p": 2, "q": 1}),
        ("qpqp", APART[:4], {"p": 1, "q": 1}),
        ("ppppp", [((0,), 1), ((1,), 2), ((2,), 3), ((0,), 4), ((0,), 5)], {"p": 3}),
        ("", [], {}),
    ],
)
def test_calls_together(names: str, edges, want: dict[str, int]) -> None:
    assert calls_together(kernels(*edges), names) == want
