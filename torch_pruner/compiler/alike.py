"""Kernels that differ from one that was tuned in extents alone take its schedule.

A program for every size (``dynamo/sizes``) is made in the middle of a run, where nobody waits for
tuning, and often the same network was tuned for one size before. What this process has seen tuned
is remembered by what a kernel is without the extents that vary; a schedule is taken where it is
legal and not predicted to be much slower than the draft.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner import families

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph
    from torch_pruner.task import Candidate, Task

__all__ = ["Tuned", "tuned"]

_MOST = 4096  # kernels that are remembered
_MOST_ALIKE = 16  # of one kind
_SLOWER = 1.5  # times the draft's predicted latency that a schedule may have

_Kind = tuple[object, ...]
_Sizes = tuple[int, ...]


class Tuned:
    """Schedules that were tuned, by kind of kernel. Safe for several threads."""

    def __init__(self) -> None:
        self._known: OrderedDict[_Kind, OrderedDict[_Sizes, Candidate]] = OrderedDict()
        self._lock = threading.Lock()

    def note(self, task: Task, candidate: Candidate) -> None:
        """Remember that ``candidate`` is what tuning found for ``task``."""
        kind, sizes = _kind(task)
        with self._lock:
            alike = self._known.setdefault(kind, OrderedDict())
            alike[sizes] = candidate
            if len(alike) > _MOST_ALIKE:
                alike.popitem(last=False)
            if len(self._known) > _MOST:
                self._known.popitem(last=False)

    def schedule_for(self, task: Task, predicted_s: float) -> Candidate | None:
        """The schedule of the kernel most alike in size, or None.

        ``predicted_s``: the latency in seconds that is predicted for the draft.
        """
        kind, sizes = _kind(task)
        with self._lock:
            alike = list(self._known.get(kind, {}).items())
        alike.sort(key=lambda known: _distance(known[0], sizes))
        sketches = {s.name: s for s in families.sketches_for(task)}
        for _, candidate in alike:
            sketch, decisions = sketches.get(candidate.sketch), dict(candidate.decisions)
            if sketch is None or set(sketch.names) != decisions.keys():
                continue
            point = np.array([[decisions[name] for name in sketch.names]], dtype=np.int64)
            if not sketch.valid(point).all():
                continue
            if float(sketch.symbols(point).latency_s[0]) <= _SLOWER * predicted_s:
                return candidate
        return None


def _distance(known: _Sizes, wanted: _Sizes) -> float:
    return sum(abs(math.log((a + 1) / (b + 1))) for a, b in zip(known, wanted, strict=True))


def _kind(task: Task) -> tuple[_Kind, _Sizes]:
    """What a kernel is but for the extents of what is no parameter, and these."""
    nodes, target = _described(task.spec), task.target
    kind = (target, task.threads, tuple(row for row, _ in nodes))
    return kind, tuple(numel for _, numel in nodes)


def _described(spec: Graph) -> list[tuple[object, int]]:
    """One row for each node that computes something, and its number of elements.

    What only says how much counts is left out.
    """
    rows: list[tuple[object, int]] = []
    place: dict[int, int] = {}
    counts = {n.inputs[1] for n in spec.nodes if n.op == "within"}
    for i, node in enumerate(spec.nodes):
        if node.op == "within":
            place[i] = place[node.inputs[0]]
            continue
        if i in counts and node.op == "input":
            continue
        static = node.op == "input" and bool(node.attr("static"))
        attrs = tuple(a for a in node.attrs if a[0] not in ("index", "counts"))
        operands = tuple(place.get(x, -1) for x in node.inputs)
        shape = node.shape if static else len(node.shape)
        place[i] = len(rows)
        rows.append(((node.op, operands, node.dtype, attrs, shape), node.numel))
    return rows


tuned = Tuned()
