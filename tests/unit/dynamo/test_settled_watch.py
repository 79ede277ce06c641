"""Parameters that were quiet for a while: from then on any write is seen at the next look."""

from __future__ import annotations

import pytest
import torch

from torch_pruner.dynamo.run import page_writes, settled_watch
from torch_pruner.dynamo.run.settled_watch import CHANCES, QUIET, SettledWatch
from torch_pruner.dynamo.run.weight_checks import State, read_contents, span_of
from torch_pruner.graph.weight_checksum import PHASES

BYTES = 9 << 17
ROUND = QUIET + PHASES


def watched(*tensors: torch.Tensor, **how: bool) -> SettledWatch:
    return SettledWatch(read_contents([span_of(t) for t in tensors], ()), (), **how)


def looks(watch: SettledWatch, count: int) -> set[State]:
    return {watch.look() for _ in range(count)}


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    """A large one that begins between pages, and a small one."""
    made = [torch.zeros(BYTES + 8192, dtype=torch.uint8)[72:], torch.zeros(300, dtype=torch.uint8)]
    if page_writes.watch(page_writes.page_ranges([settled_watch._range(span_of(made[0]))])) is None:
        pytest.skip("this system notes no writes")
    return made


@pytest.mark.parametrize("at", [0, 5000, 70_001, -1, None])
def test_one_byte_is_seen_within_a_round_wherever_it_lies(tensors, at) -> None:
    watch = watched(*tensors)
    assert looks(watch, ROUND) == {State.SAME}
    assert watch.is_settled
    assert looks(watch, 3) == {State.SAME}
    if at is None:
        tensors[1][-1] = 1
    else:
        tensors[0][at] = 1
    whole_pages = at in (5000, 70_001)
    assert State.WRITTEN in looks(watch, 1 if whole_pages else PHASES)


def test_a_write_while_the_last_round_is_read_is_not_missed(tensors) -> None:
    watch = watched(*tensors)
    assert looks(watch, QUIET + 5) == {State.SAME}
    tensors[0][128] = 1  # of what was read in this round already
    assert State.WRITTEN in looks(watch, 2 * PHASES)


def test_values_written_over_themselves_are_a_chance_less(tensors) -> None:
    watch = watched(*tensors)
    for _ in range(CHANCES):
        assert looks(watch, ROUND) == {State.SAME}
        assert watch.is_settled
        tensors[0].mul_(1)
        assert watch.look() is State.SAME
        assert not watch.is_settled
    assert looks(watch, ROUND) == {State.SAME}
    assert not watch.is_settled


@pytest.mark.parametrize("reason", ["the system", "others"])
def test_where_nothing_is_noted_it_reads_on(tensors, monkeypatch, reason) -> None:
    if reason == "the system":
        monkeypatch.setattr(page_writes, "watch", lambda _: None)
    watch = watched(*tensors, alone=reason == "the system")
    assert looks(watch, 2 * ROUND) == {State.SAME}
    assert not watch.is_settled
    tensors[0][4096:12288] = 1
    assert watch.look() is State.WRITTEN
