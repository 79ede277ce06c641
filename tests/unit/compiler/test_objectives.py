"""Which entry of the cache serves which objective, and what is chosen where nothing is measured."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests import fakes
from torch_pruner import exc
from torch_pruner.cache import KernelEntry
from torch_pruner.cache.entry import keep_best
from torch_pruner.cards import CARDS
from torch_pruner.compiler import drafting, kernels, objectives
from torch_pruner.compiler.choice import Choice
from torch_pruner.compiler.context import Context
from torch_pruner.compiler.stores import store_for
from torch_pruner.config import Config
from torch_pruner.families.footprint import footprint_of
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.log import PhaseTimer
from torch_pruner.pareto import TIE, Finalist, Footprint
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureResult, MeasureStatus, Task

if TYPE_CHECKING:
    from pathlib import Path

    from torch_pruner.task import MeasureInput

FAST, LEAN = Candidate("contraction", (("m", 4),)), Candidate("in_place", (("m", 8),))


def linear(rows: int = 64, columns: int = 40) -> Task:
    b = GraphBuilder()
    x = b.input(0, (rows, 128), "float32")
    w = b.input(1, (128, columns), "float32", static=True)
    context = Context.make(Config(), 1)
    return Task("linear", b.finish([b.matmul(x, w)]), context.target, 1, 1)


def known(*joules: float | None) -> tuple[Finalist, ...]:
    sizes = (Footprint(900, 900, 0), Footprint(0, 800, 10))
    us = (100e-6, 102e-6)
    given = joules or (None, None)
    return tuple(
        Finalist(c, s, f, j) for c, s, f, j in zip((FAST, LEAN), us, sizes, given, strict=True)
    )


class Cache:
    """One kernel in a store of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.task = folder, linear()
        config = self.config()
        self.store, self.context = store_for(config), Context.make(config, 1)

    def config(self, **options: Any) -> Config:
        return Config.from_options(options={"cache_dir": str(self.folder), **options})

    def put(self, finalists: tuple[Finalist, ...], **changes: Any) -> None:
        key = self.context.kernel_key(self.task.workload)
        fields = {"effort": "quick", "trials": 32, "task": "linear", **changes}
        entry = KernelEntry(key, FAST.to_json(), fields.pop("latency_s", 99e-6), **fields)
        self.store.put_kernel(replace(entry, finalists=finalists))

    def chosen(self, **options: Any) -> str | None:
        config = self.config(**options)
        found = kernels.look_up([self.task], config, self.store, self.context)
        return found[self.task.workload].sketch if found else None


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path)


def test_one_search_serves_every_objective(cache: Cache) -> None:
    cache.put(known(2e-3, 1e-3))
    assert cache.chosen() == "contraction"
    assert cache.chosen(objective="memory") == "in_place"
    assert cache.chosen(objective="energy") == "in_place"
    assert cache.chosen(objective="memory", on_miss="error") == "in_place"
    assert cache.chosen(objective="memory", effort="full") is None, "as without an objective"


def test_what_the_library_took_is_alone(cache: Cache) -> None:
    library = Choice(Candidate("library"), "library", 80e-6)
    cache.put(objectives.alone(cache.task, library))
    for objective in ("latency", "memory", "energy"):
        found = objectives.preferred(
            library, objectives.alone(cache.task, library), cache.task,
            cache.config(objective=objective), lambda c: True,
        )  # fmt: skip
        assert found == library


def test_an_entry_of_an_earlier_version_serves_latency_alone(cache: Cache) -> None:
    cache.put(())
    assert cache.chosen() == "contraction"
    for objective in ("memory", "energy"):
        assert cache.chosen(objective=objective) is None
        # Where an untuned kernel may run, or nothing is to be measured, it is better than a draft.
        assert cache.chosen(objective=objective, on_miss="fallback") == "contraction"
        assert cache.chosen(objective=objective, effort="none") == "contraction"


def test_what_nobody_metered_does_not_serve_energy(cache: Cache) -> None:
    cache.put(known())
    assert cache.chosen(objective="memory") == "in_place"
    assert cache.chosen(objective="energy") is None
    assert cache.chosen(objective="energy", on_miss="fallback") == "contraction"
    config = cache.config(objective="energy", on_miss="error")
    with pytest.raises(exc.CacheMiss, match=r"objective \(energy vs latency\)"):
        kernels.choose([cache.task], config, cache.store, cache.context, None, PhaseTimer())


def test_a_schedule_that_may_not_run_here_is_not_chosen(cache: Cache) -> None:
    fast, lean = known()
    cache.put((fast, replace(lean, candidate=Candidate("of_tomorrow"))))
    assert cache.chosen(objective="memory") == "contraction"


def test_how_often_a_kernel_is_called_counts(cache: Cache) -> None:
    packed = Finalist(FAST, 100e-6, Footprint(100, 100, 0))
    scratch = Finalist(LEAN, 100e-6, Footprint(0, 0, 500))
    cache.put((packed, scratch))
    assert cache.chosen(objective="memory") == "contraction"
    cache.task = replace(cache.task, weight=12)
    assert cache.chosen(objective="memory") == "in_place"


def test_freed_originals_count(cache: Cache) -> None:
    """Under ``frozen`` a copy of fewer bytes is less than the weights themselves."""
    coded = Finalist(FAST, 100e-6, Footprint(600, 600, 0))
    lying = Finalist(LEAN, 100e-6, Footprint(0, 800, 0))
    cache.put((coded, lying))
    assert cache.chosen(objective="memory") == "in_place"
    assert cache.chosen(objective="memory", weights="frozen") == "contraction"


def test_a_draft_of_least_memory_among_those_predicted_as_fast(cache: Cache) -> None:
    """Of another width than the fastest, say: 40 columns are 64 in panels of 32."""
    for columns in (24, 40, 72, 136):
        task = linear(columns=columns)
        ranked = drafting.drafts(task)
        found = objectives.drafted(task, ranked)
        assert all(f.latency_s <= TIE * ranked[0][0] for f in found)
        taken = {}
        for name in ("latency", "memory"):
            config = cache.config(objective=name, effort="none", cache_dir=str(cache.folder / name))
            choices = kernels.choose(
                [task], config, store_for(config), cache.context, None, PhaseTimer()
            )
            taken[name] = choices[task.workload]
            again = kernels.look_up([task], config, store_for(config), cache.context)
            assert again[task.workload].candidate == taken[name].candidate
            assert math.isinf(again[task.workload].latency_s), "predicted is not timed"
        assert taken["latency"].candidate == ranked[0][1]
        held = {n: footprint_of(task.spec, c.candidate).nbytes for n, c in taken.items()}
        assert held["memory"] == min(f.footprint.nbytes for f in found) <= held["latency"]


@pytest.mark.parametrize("card", ["h200", "a100", "t4"])
def test_cards_have_drafts_without_a_copy_of_the_weights(card: str) -> None:
    b = GraphBuilder()
    x = b.input(0, (128, 1024), "float16")
    w = b.input(1, (4096, 1024), "float16", static=True)
    spec = b.finish([b.matmul(x, b.permute(w, (1, 0)))])
    task = Task("layer", spec, TargetSpec.cuda(CARDS[card]), 1)
    ranked = drafting.drafts(task)
    assert footprint_of(spec, ranked[0][1]).packed_bytes >= 8 << 20
    found = objectives.drafted(task, ranked)
    assert min(f.footprint.packed_bytes for f in found) == 0


def test_a_draft_for_latency_is_drafted_again_for_memory(cache: Cache) -> None:
    for objective in ("latency", "memory", "latency"):
        config = cache.config(objective=objective, effort="none")
        found = kernels.choose(
            [cache.task], config, cache.store, cache.context, None, PhaseTimer()
        )[cache.task.workload]
        assert (found.candidate == drafting.draft(cache.task)) or objective == "memory"
    entry = cache.store.get_kernel(cache.context.kernel_key(cache.task.workload))
    assert Candidate.from_json(entry.candidate) == drafting.draft(cache.task)
    assert entry.finalists


class Packed(fakes.FakeExecutor):
    """The more a schedule packs the faster it is, by two percent at most; the draft is slower."""

    def __init__(self) -> None:
        super().__init__(self.one)
        self.first: Candidate | None = None

    def one(self, given: MeasureInput) -> MeasureResult:
        self.first = self.first or given.candidate
        packed = footprint_of(given.task.spec, given.candidate).packed_bytes
        seconds = 1e-4 * (1.02 - 0.02 * min(1.0, packed / (1 << 16)))
        factor = 1.5 if given.candidate == self.first or not packed else 1.0
        return MeasureResult(given.candidate, MeasureStatus.OK, (seconds * factor,))


def test_a_search_gives_both_and_the_next_process_finds_both(monkeypatch, cache: Cache) -> None:
    monkeypatch.setattr(kernels, "_import_ahead", lambda: None)
    asked = cache.config(objective="memory", trials=24)
    by = Packed()
    found = kernels.choose(
        [cache.task], asked, cache.store, cache.context, None, PhaseTimer(), executor=lambda: by
    )[cache.task.workload]
    for config in (asked, asked.replace(objective="latency")):
        again = kernels.look_up([cache.task], config, cache.store, cache.context)
        choice = again[cache.task.workload]
        size = footprint_of(cache.task.spec, choice.candidate).nbytes
        if config.objective == "memory":
            assert choice.candidate == found.candidate
            smaller = size
        else:
            assert size > smaller
            assert choice.latency_s < found.latency_s <= choice.latency_s * TIE


@pytest.mark.parametrize("objective", ["memory", "energy"])
def test_where_nothing_worked_no_objective_has_it_searched_again(
    monkeypatch, cache: Cache, objective: str
) -> None:
    monkeypatch.setattr(kernels, "_import_ahead", lambda: None)
    by = fakes.FakeExecutor(
        lambda given: MeasureResult(given.candidate, MeasureStatus.BUILD_ERROR, (), "no compiler")
    )
    config = cache.config(objective=objective)
    counts = []
    for _ in range(2):
        found = kernels.choose(
            [cache.task], config, cache.store, cache.context, None, PhaseTimer(),
            executor=lambda: by,
        )  # fmt: skip
        assert found[cache.task.workload].candidate == drafting.draft(cache.task)
        counts.append(by.n_measured)
    assert 0 < counts[0] == counts[1]
    assert cache.chosen(objective=objective), "it serves"


def test_finalists_go_with_the_better_schedule() -> None:
    key = Context.make(Config(), 1).kernel_key("a" * 64)
    old = KernelEntry(key, FAST.to_json(), 2e-4, effort="quick", finalists=known())
    passing = KernelEntry(key, LEAN.to_json(), 1e-4)
    assert keep_best(old, passing).finalists == known()
    chosen = replace(passing, finalists=known(1.0, 2.0), effort="quick")
    assert keep_best(old, chosen, chosen=True).finalists == known(1.0, 2.0)
    drafted = KernelEntry(key, FAST.to_json(), math.inf, source="untuned", finalists=known())
    assert keep_best(drafted, passing).finalists == (), "predictions are no times"
