"""Other rankers on the same statement features: TenSet's kind of MLP, and trees where installed.

Each takes lists of (features, seconds), one for each task, and returns a function from features to
scores, higher is better.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Rows = Sequence[tuple[np.ndarray, np.ndarray]]

MLP_STEPS, XGB_ROUNDS = 400, 120


def fit_mlp(rows: Rows) -> Callable[[np.ndarray], np.ndarray]:
    """Three layers on statement features alone, LambdaRank within a task; no prior, no tokens."""
    import torch

    from torch_pruner.tuner.cost_model.ranking import lambda_rank

    every = np.concatenate([x for x, _ in rows])
    mean, scale = every.mean(axis=0), np.maximum(every.std(axis=0), 1.0)
    generator = torch.Generator().manual_seed(0)
    sizes = [(every.shape[1], 256), (256, 256), (256, 1)]
    weights = [torch.randn(s, generator=generator) * s[0] ** -0.5 for s in sizes]
    parameters = [p.requires_grad_() for w in weights for p in (w, torch.zeros(w.shape[1]))]
    optimiser = torch.optim.Adam(parameters, lr=7e-4, weight_decay=1e-6)
    rng = np.random.default_rng(0)

    def score(x: np.ndarray) -> torch.Tensor:
        h = torch.from_numpy(((x - mean) / scale).clip(-8, 8).astype(np.float32))
        for i in range(0, len(parameters), 2):
            h = h @ parameters[i] + parameters[i + 1]
            h = h.relu() if i < len(parameters) - 2 else h
        return h[:, 0]

    for _ in range(MLP_STEPS):
        optimiser.zero_grad()
        for k in rng.permutation(len(rows))[:4]:
            some = rng.permutation(len(rows[k][0]))[:32]
            found, seconds = score(rows[k][0][some]), rows[k][1][some]
            labels = seconds.min() / seconds if np.isfinite(seconds.min()) else 0.0 * seconds
            scores = found.detach().double().numpy()[None]
            _, pull = lambda_rank(scores, labels[None], np.ones((1, len(some)), dtype=bool))
            found.backward(torch.from_numpy(pull[0]).float())
        torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        optimiser.step()

    def predict(x: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return score(x).numpy().astype(np.float64)

    return predict


def fit_xgboost(rows: Rows) -> Callable[[np.ndarray], np.ndarray]:
    """Trees on statement features that predict the best latency of a task over a candidate's."""
    import xgboost

    y = [np.where(np.isfinite(s), s.min() / s, 0.0) for _, s in rows]
    matrix = xgboost.DMatrix(np.concatenate([x for x, _ in rows]), label=np.concatenate(y))

    parameters = {"max_depth": 6, "eta": 0.1, "nthread": 1, "seed": 0}
    trees = xgboost.train(parameters, matrix, num_boost_round=XGB_ROUNDS)
    return lambda x: np.asarray(trees.predict(xgboost.DMatrix(x)), dtype=np.float64)


AVAILABLE: dict[str, Any] = {"MLP": fit_mlp}
if importlib.util.find_spec("xgboost") is not None:
    AVAILABLE["XGBoost"] = fit_xgboost
