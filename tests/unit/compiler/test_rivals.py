"""Which kernels are changed together inside a network, and what is left in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch_pruner.compiler.building.kept import Scratch
from torch_pruner.compiler.choice import Choice
from torch_pruner.compiler.rivals import Rivals, settle
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from collections.abc import Mapping


def choice(kernel: str, kind: str) -> Choice:
    return Choice(Candidate(f"{kernel}.{kind}"), "tuned", 1e-3)


def rivals(seconds: Mapping[str, float], *ways: Mapping[str, str]) -> Rivals:
    """Kernels with what they take alone; ``ways`` by kernel beside what was chosen."""
    chosen = {w: choice(w, "chosen") for w in seconds}
    others = [{w: choice(w, kind) for w, kind in way.items()} for way in ways]
    nothing = cast("Any", None)
    return Rivals(nothing, nothing, chosen, [chosen, *others], seconds, nothing)


def kinds(choices: Mapping[str, Choice]) -> dict[str, str]:
    return {w: c.sketch.split(".")[1] for w, c in choices.items()}


class Network:
    """Takes what its kernels take in it; what is not seen in a call is level."""

    def __init__(self, inside: Mapping[str, float], visible: float = 0.0) -> None:
        self.inside, self.visible, self.asked = inside, visible, 0

    def seconds(self, choices: Mapping[str, Choice]) -> float:
        return sum(self.inside[c.sketch] for c in choices.values())

    def wins(self, other: Mapping[str, Choice], best: Mapping[str, Choice]) -> bool:
        self.asked += 1
        return self.seconds(other) < self.seconds(best) * (1.0 - self.visible)


def always(_: object) -> bool:
    return True


def test_all_then_long_ones_alone_then_short_ones_together() -> None:
    seconds = {"a": 50.0, "b": 30.0, "c": 6.0, "d": 4.0, "e": 4.0, "f": 3.0, "g": 3.0}
    groups = rivals(seconds).groups()
    assert groups[0] == tuple(seconds)
    assert groups[1:4] == [("a",), ("b",), ("c",)]
    assert groups[4:] == [("d", "e", "f"), ("g",)]


def test_each_kernel_ends_as_what_is_best_inside() -> None:
    inside = {
        "a.chosen": 5.0, "a.draft": 4.0, "a.second": 4.5,
        "b.chosen": 3.0, "b.draft": 9.0, "b.second": 2.0,
        "c.chosen": 1.0, "c.draft": 1.5,
    }  # fmt: skip
    given = rivals(
        {"a": 5.0, "b": 3.0, "c": 1.0},
        {"a": "draft", "b": "draft", "c": "draft"},
        {"a": "second", "b": "second"},
    )
    network = Network(inside)
    assert kinds(settle(given, network.wins, always)) == {
        "a": "draft",
        "b": "second",
        "c": "chosen",
    }


def test_where_all_drafts_win_what_the_search_found_still_has_its_chance() -> None:
    """Of ten kernels nine are better as drafts; only alone does the tenth show."""
    names = "abcdefghij"
    inside = {f"{k}.chosen": 1.1 for k in names} | {f"{k}.draft": 1.0 for k in names}
    inside |= {"a.chosen": 1.0, "a.draft": 1.4}
    network = Network(inside, visible=0.01)
    given = rivals(dict.fromkeys(names, 1.0), dict.fromkeys(names, "draft"))
    assert kinds(settle(given, network.wins, always)) == {
        k: "chosen" if k == "a" else "draft" for k in names
    }


def test_nothing_is_asked_twice_or_beyond_the_time() -> None:
    given = rivals({"a": 1.0}, {"a": "draft"}, {"a": "draft"})
    network = Network({"a.chosen": 1.0, "a.draft": 2.0})
    assert settle(given, network.wins, always) == given.chosen
    assert network.asked == 1, "the one kernel is the first group, and so is all"
    assert settle(given, network.wins, lambda _: False) == given.chosen
    assert network.asked == 1


def test_what_takes_too_long_to_build_at_once_is_tried_in_parts() -> None:
    given = rivals({"a": 5.0, "b": 3.0}, {"a": "draft", "b": "draft"})
    network = Network({"a.chosen": 5.0, "a.draft": 4.0, "b.chosen": 3.0, "b.draft": 2.0})

    def one(other: Mapping[str, Choice]) -> bool:
        return kinds(other) != {"a": "draft", "b": "draft"}

    assert kinds(settle(given, network.wins, one)) == {"a": "draft", "b": "chosen"}


class Shelf:
    """``Kept`` of a store."""

    def __init__(self) -> None:
        self.has: dict[str, Any] = {"known": "code"}

    def find(self, workload: str, kernel: Any) -> Any:
        return self.has.get(workload)

    def keep(self, workload: str, kernel: Any, made: Any) -> None:
        self.has[workload] = made


def test_what_is_built_to_be_looked_at_reaches_the_store_when_it_is_taken() -> None:
    shelf = Shelf()
    scratch = Scratch(cast("Any", shelf))
    scratch.keep("looked at", None, cast("Any", "made"))
    scratch.keep("taken", None, cast("Any", "made, too"))
    assert scratch.find("known", None) == "code"
    assert scratch.find("looked at", None) == "made"
    assert list(shelf.has) == ["known"]
    scratch.taken(cast("Any", {"taken": None, "known": None}))
    assert shelf.has == {"known": "code", "taken": "made, too"}


def test_kernels_that_nobody_timed_are_in_no_group() -> None:
    assert rivals({}).groups() == []
