"""How much of a network's correction is believed: as much as would have served best so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch_pruner.tuner.cost_model.base import Array

SHARES = np.array([0.0, 0.25, 0.5, 0.75, 1.0])
FORGET = 0.9  # of what earlier batches said, with each new one: the network learns


class Trust:
    """The share of the correction, judged on every batch before the network learns from it.

    It begins at nothing: weights from elsewhere have to show first that they hold here.
    """

    def __init__(self, share: float = 0.0) -> None:
        self.share = share
        self._loss = np.zeros(len(SHARES))

    def judge(self, prior: Array, correction: Array, log_seconds: Array) -> None:
        """Take in candidates of one task: scores, corrections and measured logarithms (n,).

        Only differences within a task count. Fewer than two say nothing.
        """
        if len(prior) < 2:
            return
        wanted = _centred(-log_seconds - prior)
        given = _centred(correction)
        off = wanted[None, :] - SHARES[:, None] * given[None, :]
        self._loss = FORGET * self._loss + (off**2).mean(axis=1)
        self.share = float(SHARES[int(np.argmin(self._loss))])


def _centred(values: Array) -> Array:
    return np.asarray(values - values.mean())
