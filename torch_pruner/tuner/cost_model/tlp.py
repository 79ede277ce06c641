"""TLP's kind of model, trained online from nothing: it sees the schedule and nothing else.

TLP (ASPLOS 2023) scores a schedule by its primitives as if they were a sentence: attention over
them, a score for each, their sum, trained by LambdaRank within a task. Here a sketch's decisions
stand for the primitives that they parametrise. There are no symbols, no data flow, no facts of the
task and no draft model; what of the loops' extents shows is the largest option of each decision.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.cost_model.base import Array, CostModel, Decisions
from torch_pruner.tuner.cost_model.features import decisions_of, seconds_of
from torch_pruner.tuner.cost_model.layers import (
    Attention,
    affine,
    affine_back,
    size_of,
    views,
    whole_blocks,
)
from torch_pruner.tuner.cost_model.measured import Measured, lists_of
from torch_pruner.tuner.cost_model.ranking import lambda_rank
from torch_pruner.tuner.cost_model.training import Adam

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch_pruner.families.space import Sketch
    from torch_pruner.task import MeasureResult, Task
    from torch_pruner.tuner.cost_model.layers import Numbers

MAX_STEPS = 25  # of a sequence, the sketch's own included; what comes later is left out, as in TLP
KINDS = 24  # of primitives, by the hash of their names
TOKEN = 1 + KINDS + 3  # whether there is one, its kind, its numbers
WIDTH, HEADS = 32, 2
RATE, DECAY = 7e-4, 1e-6
MIN_LIST, STEPS, LISTS = 4, 8, 4
_SCALE = 8.0  # logarithms to base 2 of tiles reach this

SHAPES: Mapping[str, tuple[int, ...]] = {
    "up1.weight": (TOKEN, WIDTH),
    "up1.bias": (WIDTH,),
    "up2.weight": (WIDTH, WIDTH),
    "up2.bias": (WIDTH,),
    "qkv.weight": (WIDTH, 3 * WIDTH),
    "qkv.bias": (3 * WIDTH,),
    "mix.weight": (WIDTH, WIDTH),
    "mix.bias": (WIDTH,),
    "block1.weight": (WIDTH, WIDTH),
    "block1.bias": (WIDTH,),
    "block2.weight": (WIDTH, WIDTH),
    "block2.bias": (WIDTH,),
    "head1.weight": (WIDTH, WIDTH),
    "head1.bias": (WIDTH,),
    "head2.weight": (WIDTH, 1),
}


def sentences(sketch: Sketch, decisions: Decisions) -> Numbers:
    """(n, t, TOKEN): the sketch, then its decisions in order, as single precision.

    A decision's numbers are its value, its largest option and the ratio of both, as logarithms.
    """
    names = sketch.names[: MAX_STEPS - 1]
    out = np.zeros((len(decisions), 1 + len(names), TOKEN), np.float32)
    out[:, :, 0] = 1.0
    out[:, 0, 1 + _kind(sketch.name)] = 1.0
    for j, name in enumerate(names):
        value = np.log2(1.0 + np.abs(decisions[:, j].astype(np.float64)))
        largest = float(np.log2(1.0 + np.abs(sketch.domains[j]).max()))
        out[:, 1 + j, 1 + _kind(name)] = 1.0
        out[:, 1 + j, -3] = value / _SCALE
        out[:, 1 + j, -2] = largest / _SCALE
        out[:, 1 + j, -1] = (largest - value) / _SCALE
    return out


def _kind(name: str) -> int:
    return zlib.crc32(name.encode()) % KINDS


class Pass:
    """One forward pass over sequences (b, t, TOKEN), b a multiple of ROWS, and its backward pass.

    Steps whose first number is 0 do not count.
    """

    def __init__(self, p: Mapping[str, Numbers], tokens: Numbers) -> None:
        self._p, self._tokens = p, tokens
        self._there = tokens[:, :, 0] > 0
        self._up = np.maximum(affine("up1", tokens, p), 0.0)
        start = affine("up2", self._up, p)
        self._attention = Attention(start, self._there, p, HEADS)
        self._x1 = start + self._attention.out
        self._r1 = np.maximum(affine("block1", self._x1, p), 0.0)
        self._x2 = self._x1 + self._r1
        self._r2 = np.maximum(affine("block2", self._x2, p), 0.0)
        self._x3 = self._x2 + self._r2
        self._h = np.maximum(affine("head1", self._x3, p), 0.0)
        each = (self._h * p["head2.weight"][:, 0]).sum(axis=2)
        self.score: Numbers = (each * self._there).sum(axis=1)  # (b,)

    def backward(self, of_scores: Numbers, g: Mapping[str, Numbers]) -> None:
        """Add d loss / d parameters to ``g``, given d loss / d scores (b,)."""
        p = self._p
        last = (of_scores[:, None] * self._there).astype(self._h.dtype)[:, :, None]
        g["head2.weight"][:, 0] += (self._h * last).sum(axis=(0, 1))
        dh = last * p["head2.weight"][:, 0] * (self._h > 0)
        dx = affine_back("head1", self._x3, dh, p, g)
        dx = dx + affine_back("block2", self._x2, dx * (self._r2 > 0), p, g)
        dx = dx + affine_back("block1", self._x1, dx * (self._r1 > 0), p, g)
        dx = dx + self._attention.backward(dx, p, g)
        dup = affine_back("up2", self._up, dx, p, g) * (self._up > 0)
        affine_back("up1", self._tokens, dup, p, g, inner=False)


class TLPModel(CostModel):
    """Scores of the network. Until a task has a few measurements all points are equal."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng([seed, 0x71B])
        self._flat = initial(self._rng)
        self._optimiser = Adam(RATE, DECAY, clip=0.5, size=len(self._flat))
        self._tasks: dict[str, Measured] = {}

    def predict(self, task: Task, sketch: Sketch, decisions: Decisions) -> Array:
        n = len(decisions)
        if not n:
            return np.zeros(0)
        tokens = sentences(sketch, decisions)[whole_blocks(n)]
        return Pass(views(self._flat, SHAPES), tokens).score[:n].astype(np.float64)

    def update(
        self, task: Task, sketches: Sequence[Sketch], results: Sequence[MeasureResult]
    ) -> None:
        for sketch in sketches:
            own = [r for r in results if r.candidate.sketch == sketch.name]
            if own:
                tokens = sentences(sketch, decisions_of(sketch, (r.candidate for r in own)))
                padded = np.zeros((len(own), MAX_STEPS, TOKEN), np.float32)
                padded[:, : tokens.shape[1]] = tokens
                self._tasks.setdefault(task.workload, Measured()).add(padded, seconds_of(own))
        known = [m for m in self._tasks.values() if m.worked >= MIN_LIST]
        for _ in range(STEPS if known else 0):
            some = self._rng.permutation(len(known))[:LISTS]
            self._step([known[i] for i in some])

    def _step(self, tasks: Sequence[Measured]) -> None:
        tokens, labels, counted = lists_of(tasks, self._rng)
        longest = int((tokens[:, :, 0] > 0).sum(axis=1).max())
        run = Pass(views(self._flat, SHAPES), tokens[:, :longest])
        _, pull = lambda_rank(run.score.reshape(labels.shape).astype(np.float64), labels, counted)
        gradient = np.zeros_like(self._flat)
        run.backward(pull.reshape(-1), views(gradient, SHAPES))
        self._optimiser.step(self._flat, gradient)


def initial(rng: np.random.Generator, dtype: str = "float32") -> Numbers:
    """Parameters to start from. The last layer is zero: an untrained network has no opinion."""
    flat = np.zeros(size_of(SHAPES), dtype)
    for name, view in views(flat, SHAPES).items():
        if name.endswith("weight") and name != "head2.weight":
            view[...] = rng.standard_normal(view.shape) * view.shape[0] ** -0.5
    return flat
