"""Recurrences of the reference interpreter: one step after another, in float64."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Node


def states(
    node: Node, gates: np.ndarray, weights: np.ndarray, state: np.ndarray, *other: np.ndarray
) -> np.ndarray:
    """The states (T, N, D, H) after each step of a recurrence, and cells behind the last."""
    given, multiplied = gates.astype(np.float64), weights.astype(np.float64)
    result = np.zeros(node.shape)
    steps = gates.shape[0]
    for d, reverse in enumerate(node.attr("reverse")):
        more = [o[d].astype(np.float64) for o in other]
        h, kept = state[d].astype(np.float64), more[0] if more else np.zeros(())
        for t in reversed(range(steps)) if reverse else range(steps):
            x = given[t, :, d].transpose(1, 0, 2)  # (gates, N, H)
            both = (h @ multiplied[d]).reshape(h.shape[0], x.shape[0], -1).transpose(1, 0, 2)
            match node.op:
                case "lstm":
                    i, f, o = (_sigmoid(x[k] + both[k]) for k in (0, 1, 3))
                    kept = f * kept + i * np.tanh(x[2] + both[2])
                    h = o * np.tanh(kept)
                case "gru":
                    r, z = (_sigmoid(x[k] + both[k]) for k in (0, 1))
                    n = np.tanh(x[2] + r * (both[2] + kept))
                    h = n + z * (h - n)
                case "rnn_tanh":
                    h = np.tanh(x[0] + both[0])
                case _:
                    h = np.maximum(x[0] + both[0], 0)
            result[t, :, d] = h
        if node.op == "lstm" and node.attr("cells"):
            result[steps, :, d] = kept
    return result


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return np.asarray(1 / (1 + np.exp(-x)))
