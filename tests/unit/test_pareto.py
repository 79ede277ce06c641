"""Which schedules are kept, and which one an objective takes."""

from __future__ import annotations

import json
import math

import pytest

from torch_pruner.pareto import MOST, Finalist, Footprint, Objective, non_dominated
from torch_pruner.task import Candidate

MEMORY, ENERGY = Objective("memory"), Objective("energy")


def finalist(
    name: str,
    us: float,
    packed: int = 0,
    read: int = 0,
    scratch: int = 0,
    joules: float | None = None,
) -> Finalist:
    sizes = Footprint(packed, packed + read, scratch)
    return Finalist(Candidate(name), us * 1e-6, sizes, joules)


def named(finalists) -> list[str]:
    return [f.candidate.sketch for f in finalists]


def test_what_is_beaten_in_everything_is_not_kept() -> None:
    fast, lean = finalist("fast", 100, packed=500), finalist("lean", 102, packed=100)
    slower = finalist("slower", 101, packed=500)
    assert named(non_dominated([slower, lean, fast, lean])) == ["fast", "lean"]


def test_each_kind_of_memory_counts_by_itself() -> None:
    """How often a kernel is called decides later which of them is less."""
    packed, scratch = finalist("packed", 100, packed=10), finalist("scratch", 100, scratch=50)
    assert set(named(non_dominated([packed, scratch]))) == {"packed", "scratch"}
    assert MEMORY.choose([packed, scratch], calls=1).candidate.sketch == "packed"
    assert MEMORY.choose([packed, scratch], calls=12).candidate.sketch == "scratch"


def test_an_unknown_energy_beats_none_that_is_known() -> None:
    known, unknown = finalist("known", 100, joules=1.0), finalist("unknown", 100)
    assert named(non_dominated([unknown, known])) == ["known"]
    assert named(non_dominated([finalist("unknown", 99), known])) == ["unknown", "known"]


def test_the_number_is_bounded_and_every_objective_keeps_its_choice() -> None:
    many = [
        finalist(f"{i}", 100 + 0.1 * i, packed=40 - i, scratch=(i * 7) % 11, joules=50.0 - i)
        for i in range(40)
    ]
    kept = non_dominated(many)
    assert len(kept) == MOST
    assert kept[0].candidate.sketch == "0"
    for objective in (Objective(), MEMORY, Objective("memory", freed=True), ENERGY):
        assert objective.choose(kept) == objective.choose(many)


@pytest.mark.parametrize(("us", "taken"), [(102.9, "lean"), (103.1, "fast")])
def test_only_what_is_within_three_percent_is_chosen(us: float, taken: str) -> None:
    found = [finalist("fast", 100, packed=500, joules=2.0), finalist("lean", us, joules=1.0)]
    assert MEMORY.choose(found).candidate.sketch == taken
    assert ENERGY.choose(found).candidate.sketch == taken
    assert Objective().choose(found).candidate.sketch == "fast"


def test_of_equal_cost_the_faster_is_chosen() -> None:
    found = [finalist("b", 101, packed=5), finalist("a", 100, packed=5)]
    assert MEMORY.choose(found).candidate.sketch == "a"


def test_a_copy_costs_little_where_the_original_is_freed() -> None:
    """And fewer bytes, coded, are then a gain; while originals stay, every copy is a cost."""
    lying, coded = finalist("lying", 101, read=1000), finalist("coded", 100, packed=750)
    assert MEMORY.choose([lying, coded]).candidate.sketch == "lying"
    assert Objective("memory", freed=True).choose([lying, coded]).candidate.sketch == "coded"


def test_energy_decides_where_some_of_those_as_fast_are_metered() -> None:
    a, b = finalist("a", 100), finalist("b", 101)
    assert not ENERGY.decides([])
    assert not ENERGY.decides([a, b])
    assert ENERGY.decides([a]), "there is nothing to choose from"
    assert not ENERGY.decides([a, b, finalist("slow", 200, joules=0.1)])
    assert ENERGY.decides([a, finalist("b", 101, joules=1.0)])
    assert MEMORY.decides([a, b])


def test_json() -> None:
    for found in (finalist("a", 100, 1, 2, 3, 0.5), finalist("b", math.inf)):
        assert Finalist.from_json(json.loads(json.dumps(found.to_json()))) == found


@pytest.mark.parametrize(
    "damage",
    [
        {"candidate": "rows"}, {"candidate": {"sketch": "rows"}}, {"latency_s": -1.0},
        {"candidate": {"sketch": "rows", "decisions": {"m": []}}}, {"latency_s": "1"},
        {"packed_bytes": -1}, {"scratch_bytes": None}, {"constant_bytes": 1.5}, {"joules": 0},
        {"joules": True},
    ],
    ids=str,
)  # fmt: skip
def test_damage_is_a_value_error(damage: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        Finalist.from_json({**finalist("a", 100).to_json(), **damage})
    with pytest.raises(ValueError, match="JSON object"):
        Finalist.from_json([])
