"""Whether a program wins against another, and where programs race at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_pruner.config import Config
from torch_pruner.dynamo.run.network_finals import (
    LEAST,
    ROUNDS,
    WARM,
    leaving,
    limited,
    seconds_for,
    wins,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Clock:
    """Runs take what they say, times what the machine's pace is."""

    def __init__(self, pace: Callable[[float], float] = lambda now: 1.0) -> None:
        self.now, self.pace, self.calls = 0.0, pace, 0

    def __call__(self) -> float:
        return self.now

    def taking(self, seconds: Iterator[float] | float) -> Callable[[], None]:
        def run() -> None:
            self.calls += 1
            one = seconds if isinstance(seconds, float) else next(seconds)
            self.now += one * self.pace(self.now)

        return run


@pytest.mark.parametrize(("ratio", "expected"), [(0.97, True), (0.995, False), (1.0, False)])
def test_what_gains_less_than_a_percent_is_not_told_from_chance(
    ratio: float, expected: bool
) -> None:
    clock = Clock()
    assert wins(clock.taking(ratio * 0.01), clock.taking(0.01), clock) is expected


def test_a_machine_that_changes_its_pace_favours_nobody() -> None:
    clock = Clock(lambda now: 1.5 if int(now / 0.35) % 2 else 1.0)
    assert wins(clock.taking(0.0095), clock.taking(0.01), clock)
    assert not wins(clock.taking(0.0101), clock.taking(0.01), clock)


def test_the_slower_one_is_sent_home_soon() -> None:
    clock = Clock()
    assert not wins(clock.taking(0.012), clock.taking(0.01), clock)
    assert clock.calls <= 10 + 6 * LEAST
    clock = Clock()
    assert wins(clock.taking(0.008), clock.taking(0.01), clock)
    assert clock.calls >= 4 * ROUNDS


def test_two_rounds_of_three_are_not_enough() -> None:
    def now_and_then() -> Iterator[float]:
        yield from [0.01] * WARM
        while True:  # an untimed call and two timed ones each
            yield from [0.005] * 6 + [0.013] * 3

    clock = Clock()
    assert not wins(clock.taking(now_and_then()), clock.taking(0.01), clock)


def test_of_short_calls_many_are_a_turn_and_what_disturbs_some_does_not_count() -> None:
    def disturbed() -> Iterator[float]:
        while True:
            yield from [9e-6] * 3 + [5e-5]

    clock = Clock()
    assert wins(clock.taking(disturbed()), clock.taking(1e-5), clock)
    assert clock.calls > 1000 * ROUNDS


def graph(function: Callable[..., Any], *args: torch.Tensor) -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


PROGRAM = cast("Any", SimpleNamespace(regions=[object()], steps=[]))
CPU = cast("Any", SimpleNamespace(host_memory=True, builds_only=False))
FULL = Config(effort="full")


def plain() -> torch.fx.GraphModule:
    return graph(lambda x: [torch.relu(x)], torch.randn(4))


def seconds(
    config: Config = FULL, gm: Any = None, device: Any = CPU, writes: bool = False
) -> float:
    return seconds_for(config, gm or plain(), PROGRAM, device, writes=writes)


def test_a_fifth_of_the_time_that_was_asked_for_a_minute_at_most() -> None:
    assert seconds() == 60.0
    given = FULL.replace(time_budget_s=50.0)
    assert seconds(given) == 10.0
    assert leaving(given, 10.0).time_budget_s == 40.0
    assert leaving(FULL, 60.0) == FULL


def test_a_short_search_is_not_followed_by_a_long_stage() -> None:
    assert limited(60.0, 25.0) == 25.0
    assert limited(60.0, 2.0) == 10.0
    assert limited(4.0, 100.0) == 4.0


@pytest.mark.parametrize(
    "change",
    [
        {"effort": "quick"}, {"effort": "none"}, {"on_miss": "fallback"}, {"on_miss": "error"},
        {"objective": "memory"}, {"weights": "frozen"}, {"fallback": "inductor"}, {"trials": 0},
    ],
)  # fmt: skip
def test_only_what_a_full_search_chose_for_latency_is_judged_again(change: dict[str, Any]) -> None:
    assert seconds(FULL.replace(**change)) == 0.0


def test_no_graph_is_called_again_whose_calls_leave_something() -> None:
    assert seconds(writes=True) == 0.0
    draws = graph(lambda x: [torch.bernoulli(x)], torch.rand(4))
    program = cast("Any", SimpleNamespace(regions=[object()], steps=[SimpleNamespace(does=draws)]))
    assert seconds_for(FULL, plain(), program, CPU, writes=False) == 0.0
    assert seconds(gm=graph(lambda x: [x.add_(1)], torch.rand(4))) == 0.0


def test_nothing_races_where_this_process_does_not_run_it() -> None:
    away = SimpleNamespace(host_memory=False, builds_only=False)
    assert seconds(device=away) == 0.0
    assert seconds(device=SimpleNamespace(host_memory=True, builds_only=True)) == 0.0
