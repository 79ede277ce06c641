"""The first choice beside the best known: who is the best of a race that another one judges."""

from __future__ import annotations

import math

import pytest

from benchmarks import zero_race


def test_luck_of_one_race_does_not_count() -> None:
    races = [[1.0, 0.5, 1.0], [1.0, 3.0, 1.0], [1.0, 3.0, 1.0]]  # the first one was lucky once
    assert zero_race.reached(races) == pytest.approx(1.0)


def test_the_best_known_is_that_of_the_other_races() -> None:
    assert zero_race.reached([[2.0, 1.0, 3.0]] * 3) == pytest.approx(0.5)
    assert zero_race.reached([[1.0, 2.0, 3.0]] * 3) == pytest.approx(2.0)


def test_a_race_in_which_the_machine_changed_does_not_count() -> None:
    assert zero_race.reached([[2.0, 1.0], [1.0, 1.0], [1.0, 1.0]]) == pytest.approx(1.0)


def test_a_known_schedule_that_fails_is_not_the_best() -> None:
    assert zero_race.reached([[1.0, math.inf, 2.0]] * 3) == pytest.approx(2.0)


def test_a_first_choice_that_fails_is_an_error() -> None:
    with pytest.raises(ValueError, match="failed"):
        zero_race.reached([[math.inf, 1.0]] * 3)


def test_the_table_has_the_worst_first() -> None:
    page = zero_race.render({"good": [[1e-6, 1e-6]] * 3, "bad": [[2e-6, 1e-6]] * 3})
    assert page.startswith("2 tasks: 0.707 (worst 0.50)")
    assert page.index("| bad |") < page.index("| good |")
    assert "2 us, 1 us" in page
