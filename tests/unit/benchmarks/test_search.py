"""The page of ``benchmarks.search``: who got there when, from the second timing alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import search, search_table, timing
from tests import fakes


def searched(name: str, seed: int, *events: tuple[float, int, str]) -> dict[str, Any]:
    return {
        "search": name,
        "seed": seed,
        "trials": events[-1][1] if events else 0,
        "failed": 0,
        "seconds": events[-1][0] + 10.0 if events else 1.0,
        "phases": {"draft": 1.0, "verify": 1.0, "build": 5.0, "measure": 12.0, "train": 1.0},
        "events": [
            {"seconds": at, "trial": trial, "latency_s": 1.0, "candidate": {}, "digest": digest}
            for at, trial, digest in events
        ],
    }


@pytest.fixture
def row() -> dict[str, Any]:
    """The reference has its 2 ms after 40 s; ours has 1.9 ms after 4 s, another 3 ms only."""
    return {
        "status": "ok",
        "error": "",
        "commit": "older",
        "settings": {"searches": ["draft-verify/moa", "random/random"]},
        "name": "conv",
        "threads": 2,
        "searches": [
            searched("metaschedule", 0, (10.0, 8, "a"), (40.0, 64, "b"), (50.0, 70, "c")),
            searched("draft-verify/moa", 0, (2.0, 1, "d"), (4.0, 6, "e")),
            searched("draft-verify/moa", 1, (3.0, 2, "d")),
            searched("random/random", 0),
        ],
        # ``c`` looked better than ``b`` once, but is not.
        "again": {"a": 4e-3, "b": 2e-3, "c": 2.1e-3, "d": 3e-3, "e": 1.9e-3},
    }


def test_a_curve_keeps_what_is_better_the_second_time(row) -> None:
    reference = search_table.reference(row)
    assert search_table.curve(row, reference) == [(10.0, 8, 4e-3), (40.0, 64, 2e-3)]
    assert search_table.reached(row, reference) == (40.0, 64)


def test_sooner_is_a_ratio_of_times_and_never_is_the_end(row) -> None:
    fast, slow = search_table.others(row)["draft-verify/moa"]
    assert search_table.reached(row, fast) == (4.0, 6)
    assert search_table.sooner(row, fast) == pytest.approx(10.0)
    assert search_table.reached(row, slow) is None
    assert search_table.sooner(row, slow) == pytest.approx(40 / 60)


def test_where_the_reference_had_more_trials_everyone_is_told_after_so_many(row) -> None:
    rows = {"conv": row | {"searches": row["searches"][:3]}}
    machine = timing.machine() | {"commit": "older"}
    page = search_table.render({"rows": rows, "machine": machine}, "d")
    table = page[page.index("of so many") :].splitlines()
    # The reference after 64 of its 70 trials; ours after one (3 ms and nothing), and after ten.
    assert [c.strip() for c in table[4].split("|")[1:-1]] == [
        "metaschedule", "", "0.50 (0.50)", "0.50 (0.50)", "0.50 (0.50)", "1.00 (1.00)",
        "",
    ]  # fmt: skip
    assert table[5].split("|")[2].strip() == "0.67 (0.00)"
    equal = row["searches"][0] | {"trials": 6}
    rows = {"conv": row | {"searches": [equal, *row["searches"][1:3]]}}
    assert "of so many" not in search_table.render({"rows": rows, "machine": machine}, "d")


def test_the_summary_counts_who_never_got_there(row) -> None:
    of = search_table.summary([row], "draft-verify/moa")
    assert (of["runs"], of["reached"]) == (2, 1)
    assert of["sooner"] == pytest.approx(math.sqrt(10 * 40 / 60))
    assert of["fewer trials"] == pytest.approx(math.sqrt(64 / 6 * 64 / 70))
    assert of["at equal time"] == pytest.approx(math.sqrt(2 / 1.9 * 2 / 3))
    assert of["worst at equal time"] == pytest.approx(2 / 3)
    assert of["overhead"] == pytest.approx(3 / 20)


def test_a_search_without_a_result_is_infinitely_slow(row) -> None:
    (empty,) = search_table.others(row)["random/random"]
    assert search_table.latency(row, empty) == math.inf
    of = search_table.summary([row], "random/random")
    assert (of["reached"], of["at equal time"]) == (0, None)
    assert of["sooner"] == pytest.approx(40 / 60)


def test_the_untouched_reference_has_a_table_of_its_own(row) -> None:
    """Ours has its 2.1 ms after 4 s, which takes it 100."""
    row["searches"].append(searched("tune_tir", 0, (50.0, 64, "a"), (100.0, 128, "c")))
    assert search_table.summary([row], "draft-verify/moa", "tune_tir")["reached"] == 1
    fast, _ = search_table.others(row)["draft-verify/moa"]
    assert search_table.sooner(row, fast, "tune_tir") == pytest.approx(25.0)
    machine = {
        "cpu": "a CPU", "gpu": None, "cores": 2, "threads": 2, "versions": {"torch": "2"},
        "commit": "abc", "date": "today",
    }  # fmt: skip
    text = search_table.render({"rows": {"conv": row}, "machine": machine}, "data.json")
    before, after = text.split("The same against `tune_tir`")
    assert "| tune_tir | 1 | 0 |" in before
    assert "| metaschedule | 1 | 1 |" in after
    assert "| draft-verify/moa | 2 | 1 |" in after


def test_the_page_names_every_run_and_every_failure(row) -> None:
    machine = {
        "cpu": "a CPU", "gpu": None, "cores": 2, "threads": 2, "versions": {"torch": "2"},
        "commit": "abc", "date": "today",
    }  # fmt: skip
    failed = {"status": "timeout", "error": "after 10 s", "name": "other", "commit": "abc"}
    content = {"rows": {"conv": row, "other": failed}, "machine": machine}
    text = search_table.render(content, "data.json", "docs/search.png")
    assert "![Latency over time](./search.png)" in text
    assert text.count("| conv |") == 4
    assert "never" in text
    assert "other: timeout: after 10 s" in text
    assert "| draft-verify/moa | 2 | 1 | 2.58x | 3.12x |" in text
    assert "(rows of older kept)" in text
    assert "| draft-verify/moa | 5.0 % | 5.0 % | 25.0 % | 60.0 % | 5.0 % | 15.0 % |" in text


def test_rows_of_several_processors_are_summed_up_apart(row) -> None:
    machine = {
        "cpu": "a CPU", "gpu": None, "cores": 2, "threads": 2, "versions": {"torch": "2"},
        "commit": "abc", "date": "today",
    }  # fmt: skip
    here = {**row, "name": "pool", "commit": "abc", "cpu": "a CPU"}
    content = {"rows": {"conv": {**row, "cpu": "other CPU"}, "pool": here}, "machine": machine}
    text = search_table.render(content, "data.json")
    assert "(rows of older on other CPU kept)" in text
    assert "| draft-verify/moa | 4 | 2 |" in text
    assert "| on a CPU | 2 | 1 |" in text
    assert "| on other CPU | 2 | 1 |" in text


def test_what_is_rendered_are_rows_of_the_present_code(row, tmp_path, monkeypatch, capsys) -> None:
    from benchmarks import search

    monkeypatch.setattr(search, "code_identity", lambda parts: f"now {len(parts)}")
    data, page = tmp_path / "search.json", tmp_path / "search.md"
    machine = {
        "cpu": "a CPU", "gpu": None, "cores": 2, "threads": 2, "versions": {"torch": "2"},
        "commit": "abc", "date": "today",
    }  # fmt: skip
    old = {**row, "name": "pool", "code": "before"}
    now = f"now {len(search.parts_of(row['settings']['searches']))}"
    content = {"machine": machine, "rows": {"conv": {**row, "code": now}, "pool": old}}
    data.write_text(json.dumps(content))
    assert search.main(["--render", "--data", str(data), "--out", str(page)]) == 0
    assert "| conv |" in page.read_text()
    assert "| pool |" not in page.read_text()
    assert "1 rows of other code are left out" in capsys.readouterr().out


def test_a_search_names_the_code_that_it_runs() -> None:
    from benchmarks import search
    from benchmarks.timing import ROOT

    own, learned = search.parts_of(["draft-verify/moa"]), search.parts_of(["draft-verify/pacm"])
    assert "torch_pruner/tuner/cost_model" in learned
    assert "torch_pruner/tuner/cost_model/residual.py" in own
    assert "torch_pruner/tuner/cost_model" not in own
    assert "torch_pruner/tuner/cost_model/residual.py" not in search.parts_of(["tune_tir"])
    assert all((ROOT / part).exists() for part in {*own, *learned})


def test_the_generators_file_is_for_tlm_alone() -> None:
    alone = search.SearchJob("", "w", 2, ("draft-verify/moa",), (0,), (0,), 8, "weights")
    beside = replace(alone, searches=("tlm", "draft-verify/moa"))
    assert alone.weights_of("draft-verify/moa") == "weights"
    assert beside.weights_of("tlm") == "weights"
    assert beside.weights_of("draft-verify/moa") == ""


def test_weights_are_told_apart_by_what_is_in_them(tmp_path) -> None:
    """A row made with others is made again, wherever the file lies; rows without say nothing."""
    from benchmarks import search
    from torch_pruner.compiler.remembered.learned import SHIPPED
    from torch_pruner.tuner.cost_model.moa import MomentumModel

    job = search.SearchJob("tasks", "w", 2, ("draft-verify/moa",), (0,), (0,), 8)
    without = search.Plan("conv", job, 1.0).settings
    assert "weights" not in without
    file = SHIPPED / "llvm.safetensors"
    shipped = search.Plan("conv", replace(job, weights=str(file)), 1.0).settings
    copied = tmp_path / "copy"
    copied.write_bytes(file.read_bytes())
    assert search.Plan("conv", replace(job, weights=str(copied)), 1.0).settings == shipped
    copied.write_bytes(b"others")
    others = search.Plan("conv", replace(job, weights=str(copied)), 1.0).settings
    assert others["weights"] != shipped["weights"]
    assert set(shipped) - set(without) == {"weights"}
    assert "torch_pruner/tuner/cost_model" in search.parts_of(job.searches, shipped["weights"])
    assert isinstance(
        search.strategy_for("draft-verify/moa", fakes.make_task(8), 0, str(file)).cost_model,
        MomentumModel,
    )


def test_without_drafts_a_cost_model_ranks_points_drawn_at_random() -> None:
    from benchmarks import search
    from torch_pruner.tuner.cost_model.random_model import RandomModel
    from torch_pruner.tuner.cost_model.residual import ResidualModel

    strategy = search.strategy_for("undrafted/residual", fakes.make_task(8), 1)
    assert isinstance(strategy.draft_model, RandomModel)
    assert isinstance(strategy.cost_model, ResidualModel)
    drafted = search.strategy_for("draft-verify/residual", fakes.make_task(8), 1)
    assert drafted.draft_model is drafted.cost_model


@pytest.mark.parametrize(
    ("name", "strategy", "model"),
    [
        ("felix", "FelixSearch", "ResidualModel"),
        ("felix/analytic", "FelixSearch", "AnalyticModel"),
        ("adatune", "AdatuneSearch", "ForestModel"),
        ("ansor/tlp", "AnsorSearch", "TLPModel"),
        ("undrafted/tlp", "DraftThenVerify", "TLPModel"),
    ],
)
def test_other_papers_searches_have_the_model_of_their_paper_or_a_named_one(
    name, strategy, model
) -> None:
    from benchmarks import search

    made = search.strategy_for(name, fakes.make_task(8), 1)
    assert (type(made).__name__, type(made.cost_model).__name__) == (strategy, model)


def test_ansors_model_is_trees() -> None:
    from benchmarks import search

    assert search.model_of("ansor") == "trees"
    assert search.model_of("draft-verify") == search.model_of("metaschedule") == ""
    assert "torch_pruner/tuner/cost_model" in search.parts_of(["ansor"])
    assert "torch_pruner/tuner/cost_model/residual.py" in search.parts_of(["felix"])


def test_of_a_search_the_best_candidate_is_kept(row) -> None:
    kept = [
        [e["digest"] for e in search.with_winner(s, row["again"])["events"] if "candidate" in e]
        for s in row["searches"]
    ]
    assert kept == [["b"], ["e"], ["d"], []]
    slim = {**row, "searches": [search.with_winner(s, row["again"]) for s in row["searches"]]}
    reference = search_table.reference(slim)
    assert search_table.curve(slim, reference) == search_table.curve(row, reference)
