"""Graphs of updates, for the kernels of every device."""

from __future__ import annotations

from dataclasses import dataclass

from torch_pruner.graph.ir import Graph, GraphBuilder


@dataclass(frozen=True)
class Case:
    shape: tuple[int, ...] = (2, 3, 40, 16)
    dim: int = 2
    places: tuple[int, ...] = (1,)
    indices: int = 1
    dtype: str = "float32"
    order: tuple[int, ...] = ()


def graph(case: Case, *, in_place: bool = False, adds: bool = False) -> Graph:
    """A kernel of an update, whose cache and result lie in ``case.order``."""
    b = GraphBuilder()
    order = case.order or tuple(range(len(case.shape)))
    stored = [case.shape[k] for k in order]
    x = b.permute(b.input(0, stored, case.dtype), [order.index(k) for k in range(len(order))])
    rows = (*case.shape[: case.dim], *case.places, *case.shape[case.dim + case.indices :])
    given = [b.input(2 + k, case.places, "int64") for k in range(case.indices)]
    put = (x, b.input(1, rows, case.dtype), *given)
    attrs = {"dim": case.dim} if adds else {"dim": case.dim, "in_place": in_place}
    out = b.append("accumulate" if adds else "update", put, case.shape, case.dtype, **attrs)
    return b.finish([b.permute(out, order)])
