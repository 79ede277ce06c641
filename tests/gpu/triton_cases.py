"""Kernels in Triton's language for tests: candidates, and their numbers by its interpreter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tests.families import kernels as K
from tests.gpu import triton_interpreter
from torch_pruner import families
from torch_pruner.cards import CARDS
from torch_pruner.graph.reference import evaluate, numpy_dtype
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph.ir import Graph

SMALL = 64  # rows and columns of a block: the interpreter takes as long for what is not there


def task_of(spec: Graph, card: str = "h200") -> Task:
    return Task("kernel", spec, TargetSpec.cuda(CARDS[card]), 1)


def candidates(
    spec: Graph, family: str, count: int, seed: int = 0, most: int = SMALL
) -> list[Candidate]:
    """Random points of the space, with blocks of at most so many rows and columns."""
    sketch = families.named(family).space()(task_of(spec))
    full = np.stack(np.meshgrid(*sketch.domains, indexing="ij"), axis=-1)
    points = full.reshape(-1, len(sketch.names))
    points = points[(points[:, 0] <= most) & (points[:, 1] <= most)]
    points = points[sketch.valid(points)]
    some = np.random.default_rng(seed).choice(len(points), min(count, len(points)), replace=False)
    return [Candidate(family, tuple(sorted(sketch.named(p).items()))) for p in points[some]]


def errors(cases: Sequence[tuple[Graph, Candidate]]) -> list[float]:
    """Largest relative difference between each kernel's text, interpreted, and the reference."""
    work, arrays = [], []
    for spec, candidate in cases:
        takes = families.signature_of(spec, candidate)
        given = K.inputs_for(spec)
        arrays.append(given)
        packed = [a if p is None else p.pack(a) for a, p in zip(given, takes.packs, strict=True)]
        made = [
            np.full(max(1, b.nbytes), 0xFF, np.uint8)  # what is not written is not right by chance
            for b in (*takes.outputs, *takes.scratch)
        ]
        raw = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in packed]
        dtypes = [b.dtype for b in (*takes.inputs, *takes.outputs, *takes.scratch)]
        texts = families.named(candidate.sketch).texts(spec, candidate)
        work.append((texts, [*raw, *made], dtypes))
    return [
        _error(spec, candidate, given, after)
        for (spec, candidate), given, after in zip(
            cases, arrays, triton_interpreter.run(work), strict=True
        )
    ]


def _error(
    spec: Graph, candidate: Candidate, given: list[Any], after: list[np.ndarray[Any, Any]]
) -> float:
    takes = families.signature_of(spec, candidate)
    outputs = [
        raw.view(numpy_dtype(b.dtype)).reshape(b.shape)
        for raw, b in zip(after[len(takes.inputs) :], takes.outputs, strict=False)
    ]
    return float(K.error(outputs, evaluate(spec, given)))
