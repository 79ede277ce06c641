"""LambdaRank: how badly scores order the candidates of a task, and which way each should move.

Burges, "From RankNet to LambdaRank to LambdaMART" (2010): every pair counts by what swapping it
would cost in NDCG, so the top of the list matters most. Pairs never cross lists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch_pruner.tuner.cost_model.base import Array

SHARPNESS = 5.0  # logits of a pair for one unit of score: 10 % of latency is then 0.5


def lambda_rank(scores: Array, labels: Array, mask: npt.NDArray[np.bool_]) -> tuple[float, Array]:
    """(loss, d loss / d scores) of lists (g, n); labels in [0, 1], entries outside ``mask`` absent.

    The loss is the mean over lists; a list without two different labels gives nothing.
    """
    held = np.where(mask, scores, -np.inf)
    order = np.argsort(-held, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.arange(scores.shape[1])[None, :], axis=1)
    discount = 1.0 / np.log2(rank + 2.0)
    gain = np.where(mask, 2.0 ** np.clip(labels, 0.0, 1.0) - 1.0, 0.0)
    ideal = -np.sort(-gain, axis=1) / np.log2(np.arange(scores.shape[1]) + 2.0)
    gain = gain / np.maximum(ideal.sum(axis=1, keepdims=True), 1e-12)

    better = (labels[:, :, None] > labels[:, None, :]) & mask[:, :, None] & mask[:, None, :]
    weight = np.abs(discount[:, :, None] - discount[:, None, :])
    weight = np.where(better, weight * np.abs(gain[:, :, None] - gain[:, None, :]), 0.0)
    margin = SHARPNESS * (scores[:, :, None] - scores[:, None, :])
    lists = len(scores)
    loss = float((weight * np.logaddexp(0.0, -margin)).sum()) / lists
    pull = -SHARPNESS * weight * _sigmoid(-margin) / lists
    return loss, np.asarray(pull.sum(axis=2) - pull.sum(axis=1))


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))
