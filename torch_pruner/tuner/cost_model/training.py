"""Training of the pattern-aware network: what was measured, in lists by task, and the optimiser.

Labels are the best latency of a task over a candidate's, 0 for one that failed, and follow when a
task's best improves. Lists are ranked within a task only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.cost_model import network
from torch_pruner.tuner.cost_model.layers import ROWS
from torch_pruner.tuner.cost_model.network import Batch
from torch_pruner.tuner.cost_model.pattern import MAX_TOKENS, STATEMENT, TOKEN, Patterns
from torch_pruner.tuner.cost_model.ranking import lambda_rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch_pruner.tuner.cost_model.layers import Numbers

PRETRAINING, ONLINE, ADAPTING = 2e-3, 5e-4, 1e-4  # rates: offline, from nothing, from weights
CLIP = 8.0  # scaled features beyond this carry no more news
MAX_LISTED = 512  # records kept of one task, the latest
LIST = ROWS  # of one list in training


@dataclass(frozen=True, slots=True)
class Scaling:
    """Mean and scale of every feature: fitted once, kept with the weights."""

    statement: Numbers  # (2, STATEMENT): mean, scale
    token: Numbers  # (2, TOKEN)

    @staticmethod
    def fit(lists: Iterable[TaskList]) -> Scaling:
        """From measured points. A feature that hardly varies yet is not blown up: the least scale
        is one, and features are logarithms to base 2.
        """
        parts = [(t.statement, t.tokens, t.mask) for t in lists]
        rows = np.concatenate([s for s, _, _ in parts]).astype(np.float64)
        tokens = np.concatenate([t[m] for _, t, m in parts]).astype(np.float64)
        return Scaling(_moments(rows), _moments(tokens))

    def batch(self, patterns: Patterns) -> Batch:
        """The scaled features of points of one sketch, all of whose tokens count."""
        n, t = patterns.tokens.shape[:2]
        return Batch(
            _scaled(patterns.statement, self.statement),
            _scaled(patterns.tokens, self.token),
            np.broadcast_to(patterns.roles, (n, t)),
            np.ones((n, t), dtype=bool),
        )


def _moments(rows: Numbers) -> Numbers:
    return np.stack([rows.mean(axis=0), np.maximum(rows.std(axis=0), 1.0)])


def _scaled(values: Numbers, moments: Numbers) -> Numbers:
    scaled: Numbers = np.clip((values - moments[0]) / moments[1], -CLIP, CLIP)
    return scaled.astype(np.float32)


@dataclass(slots=True)
class TaskList:
    """What was measured of one task. Tokens are padded to MAX_TOKENS, kept in single precision."""

    statement: Numbers = field(default_factory=lambda: np.zeros((0, STATEMENT), np.float32))
    tokens: Numbers = field(default_factory=lambda: np.zeros((0, MAX_TOKENS, TOKEN), np.float32))
    roles: Numbers = field(default_factory=lambda: np.zeros((0, MAX_TOKENS), np.int8))
    mask: Numbers = field(default_factory=lambda: np.zeros((0, MAX_TOKENS), bool))
    prior: Numbers = field(default_factory=lambda: np.zeros(0))
    seconds: Numbers = field(default_factory=lambda: np.zeros(0))  # infinite: failed

    def add(self, patterns: Patterns, seconds: Sequence[float]) -> None:
        n, t = patterns.tokens.shape[:2]
        tokens = np.zeros((n, MAX_TOKENS, TOKEN), np.float32)
        tokens[:, :t] = patterns.tokens
        roles = np.zeros((n, MAX_TOKENS), np.int8)
        roles[:, :t] = patterns.roles
        mask = np.zeros((n, MAX_TOKENS), bool)
        mask[:, :t] = True
        self.statement = _latest(self.statement, patterns.statement.astype(np.float32))
        self.tokens, self.roles = _latest(self.tokens, tokens), _latest(self.roles, roles)
        self.mask, self.prior = _latest(self.mask, mask), _latest(self.prior, patterns.prior)
        self.seconds = _latest(self.seconds, np.array(seconds, dtype=np.float64))

    @property
    def measured(self) -> int:
        """How many did not fail."""
        return int(np.isfinite(self.seconds).sum())

    def labels(self) -> Numbers:
        """Best latency over each one's, in [0, 1]."""
        best = float(self.seconds.min(initial=np.inf))
        return best / self.seconds if np.isfinite(best) else np.zeros(len(self.seconds))


def _latest(old: Numbers, new: Numbers) -> Numbers:
    return np.concatenate([old, new])[-MAX_LISTED:]


def sample(
    lists: Sequence[TaskList], scaling: Scaling, rng: np.random.Generator
) -> tuple[Batch, Numbers, Numbers, Numbers]:
    """A batch of at most LIST random candidates of each list, with prior, labels, mask (g, LIST).

    Short lists are padded with copies that ``mask`` leaves out.
    """
    chosen, counts = [], []
    for own in lists:
        n = len(own.seconds)
        some = rng.permutation(n)[:LIST] if n > LIST else np.arange(n)
        counts.append(len(some))
        chosen.append(np.resize(some, LIST))
    pairs = list(zip(lists, chosen, strict=True))
    mask = np.concatenate([t.mask[i] for t, i in pairs])
    width = max(1, int(mask.sum(axis=1).max()))
    batch = Batch(
        _scaled(np.concatenate([t.statement[i] for t, i in pairs]), scaling.statement),
        _scaled(np.concatenate([t.tokens[i, :width] for t, i in pairs]), scaling.token),
        np.concatenate([t.roles[i, :width] for t, i in pairs]).astype(np.int64),
        mask[:, :width],
    )
    listed = np.arange(LIST)[None, :] < np.array(counts)[:, None]
    labels = np.stack([t.labels()[i] for t, i in pairs])
    return batch, np.stack([t.prior[i] for t, i in pairs]), labels, listed


class Adam:
    """Kingma and Ba's optimiser on a flat vector, with decoupled decay and a bound on the step."""

    def __init__(
        self,
        rate: float = PRETRAINING,
        decay: float = 1e-2,
        clip: float = 1.0,
        size: int = network.SIZE,
    ) -> None:
        self.rate, self.decay, self.clip = rate, decay, clip
        self._mean, self._square = np.zeros(size, np.float32), np.zeros(size, np.float32)
        self._steps = 0

    def step(self, flat: Numbers, gradient: Numbers) -> None:
        """Move ``flat`` in place."""
        norm = float(np.sqrt((gradient**2).sum()))
        gradient = gradient * min(1.0, self.clip / max(norm, 1e-12))
        self._steps += 1
        self._mean += 0.1 * (gradient - self._mean)
        self._square += 0.001 * (gradient**2 - self._square)
        mean = self._mean / (1 - 0.9**self._steps)
        square = self._square / (1 - 0.999**self._steps)
        flat -= self.rate * (mean / (np.sqrt(square) + 1e-8) + self.decay * flat)


def train_step(
    flat: Numbers,
    optimiser: Adam,
    lists: Sequence[TaskList],
    scaling: Scaling,
    rng: np.random.Generator,
) -> float:
    """One step on one batch of lists; returns the loss before it."""
    batch, prior, labels, mask = sample(lists, scaling, rng)
    run = network.Pass(network.named(flat), batch)
    loss, pull = lambda_rank(prior + run.score.reshape(prior.shape), labels, mask)
    gradient = np.zeros(network.SIZE, flat.dtype)
    run.backward(pull.reshape(-1), network.named(gradient))
    optimiser.step(flat, gradient)
    return loss
