"""How much of a network's correction is believed: as much as would have served best so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.tuner.cost_model.ranking import lambda_rank

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

        Judged by how they would have been ranked. Fewer than two say nothing.
        """
        if len(prior) < 2:
            return
        labels = np.exp(log_seconds.min() - log_seconds)
        scores = prior[None, :] + SHARES[:, None] * correction[None, :]
        mask = np.ones((1, len(prior)), dtype=bool)
        loss = [lambda_rank(own[None], labels[None], mask)[0] for own in scores]
        self._loss = FORGET * self._loss + np.array(loss)
        self.share = float(SHARES[int(np.argmin(self._loss))])
