"""What was measured of one task, as features and seconds, for models that rank within a task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.cost_model.layers import ROWS

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from torch_pruner.tuner.cost_model.layers import Numbers

MAX_KEPT = 512  # candidates of one task, the latest


@dataclass(slots=True)
class Measured:
    """Features (n, ...) and seconds per call (n,), infinite for a candidate that failed."""

    features: Numbers | None = None
    seconds: Numbers = field(default_factory=lambda: np.zeros(0))

    def add(self, features: Numbers, seconds: Sequence[float]) -> None:
        """Candidates with their features, whose shape is the same each time."""
        old = features[:0] if self.features is None else self.features
        self.features = np.concatenate([old, features])[-MAX_KEPT:]
        self.seconds = np.concatenate([self.seconds, seconds])[-MAX_KEPT:]

    @property
    def worked(self) -> int:
        """How many did not fail."""
        return int(np.isfinite(self.seconds).sum())

    def throughput(self) -> Numbers:
        """(n,) in [0, 1]: the best latency over each one's, 0 for one that failed."""
        best = float(self.seconds.min(initial=np.inf))
        return best / self.seconds if np.isfinite(best) else np.zeros(len(self.seconds))


def lists_of(
    tasks: Sequence[Measured], rng: np.random.Generator
) -> tuple[Numbers, Numbers, npt.NDArray[np.bool_]]:
    """At most ROWS random candidates of each task, for a step of training by rank.

    Features (g * ROWS, ...), throughput (g, ROWS), and which entries count (g, ROWS): short lists
    are filled up with copies that do not. Every task must have something.
    """
    features, labels, counted = [], [], []
    for own in tasks:
        assert own.features is not None
        n = len(own.seconds)
        some = rng.permutation(n)[:ROWS]
        chosen = np.resize(some, ROWS)
        features.append(own.features[chosen])
        labels.append(own.throughput()[chosen])
        counted.append(np.arange(ROWS) < len(some))
    return np.concatenate(features), np.stack(labels), np.stack(counted)
