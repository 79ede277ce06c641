"""A network's correction is believed as far as it has proved right."""

from __future__ import annotations

import numpy as np
import pytest

from torch_pruner.tuner.cost_model.trust import Trust


def batch(rng, right: float, n: int = 8):
    """Scores, corrections of which the share ``right`` would be best, and measured logarithms."""
    prior, correction = rng.standard_normal(n), rng.standard_normal(n)
    return prior, correction, -(prior + right * correction) + 3.0


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_the_share_that_would_have_served_best_is_found(right) -> None:
    rng, trust = np.random.default_rng(0), Trust()
    for _ in range(5):
        trust.judge(*batch(rng, right, n=30))
    assert abs(trust.share - right) <= 0.25


def test_harmful_corrections_are_left_out() -> None:
    rng, trust = np.random.default_rng(0), Trust(share=1.0)
    trust.judge(*batch(rng, -1.0))
    assert trust.share == 0.0


def test_what_a_network_has_learned_since_counts_more() -> None:
    rng, trust = np.random.default_rng(0), Trust()
    for _ in range(5):
        trust.judge(*batch(rng, 0.0))
    for _ in range(15):
        trust.judge(*batch(rng, 1.0))
    assert trust.share > 0.5


def test_one_candidate_says_nothing() -> None:
    trust = Trust()
    trust.judge(*batch(np.random.default_rng(0), 1.0, n=1))
    trust.judge(*batch(np.random.default_rng(0), 1.0, n=0))
    assert trust.share == 0.0
