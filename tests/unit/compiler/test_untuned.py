"""What was not tuned does not count as tuned, wherever it is asked for."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.fakes import make_task
from torch_pruner import exc
from torch_pruner.cache import KernelEntry, KernelStore, TuningRecord
from torch_pruner.compiler import bundles, kernels
from torch_pruner.compiler.choice import report as choice_report
from torch_pruner.compiler.context import Context
from torch_pruner.compiler.remembered import history, seen
from torch_pruner.config import Config
from torch_pruner.log import PhaseTimer
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from pathlib import Path

CANDIDATE = Candidate("contraction", (("m", 4),))
# How a kernel was left in the cache -> whether quick, full, and serving take it.
STATES = [
    ({"source": "untuned", "latency_s": math.inf, "effort": ""}, (False, False, False)),
    ({"source": "untuned", "latency_s": math.inf, "effort": "quick"}, (False, False, False)),
    ({"source": "untuned", "latency_s": math.inf, "effort": "none"}, (False, False, False)),
    ({"source": "tuned", "effort": "", "trials": 4}, (False, False, False)),
    ({"source": "tuned", "effort": "quick", "trials": 32}, (True, False, True)),
    ({"source": "tuned", "effort": "full", "trials": 90}, (True, True, True)),
    # Of a search that ended nothing worked: it is not begun again, and does not serve.
    (
        {"source": "untuned", "latency_s": math.inf, "effort": "quick", "trials": 32},
        (True, False, False),
    ),
]


def stored(store: KernelStore, context: Context, **state: Any) -> KernelEntry:
    task = make_task()
    text = json.dumps(task.spec.to_json(), separators=(",", ":"))
    fields = {"latency_s": 1e-5, "task": task.name, "workload_text": text, **state}
    entry = KernelEntry(context.kernel_key(task.workload), CANDIDATE.to_json(), **fields)
    return store.put_kernel(entry)


@pytest.mark.parametrize(("state", "taken"), STATES, ids=lambda s: str(s)[:60])
def test_who_takes_it(tmp_path: Path, state: dict[str, Any], taken: tuple[bool, ...]) -> None:
    store, config = KernelStore.open(tmp_path), Config()
    context, task = Context.make(config, 1), make_task()
    stored(store, context, **state)
    asked = (config, config.replace(effort="full"), config.replace(on_miss="error"))
    found = [bool(kernels.look_up([task], c, store, context)) for c in asked]
    assert tuple(found) == taken
    if not taken[2]:
        with pytest.raises(exc.CacheMiss):
            kernels.choose([task], asked[2], store, context, None, PhaseTimer())
    full = config.replace(on_miss="error", effort="full")
    assert bool(kernels.look_up([task], full, store, context)) is (state["effort"] == "full")


def test_what_is_not_tuned_is_noted_left_out_of_bundles_and_shown(tmp_path: Path) -> None:
    store, context = KernelStore.open(tmp_path / "c"), Context.make(Config(), 1)
    entry = stored(store, context, source="untuned", latency_s=math.inf, effort="")
    assert [t.workload for t in seen.noted(store, context)] == [entry.key.workload]
    file = tmp_path / "kernels.tpb"
    made = bundles.save_bundle(file, cache_dir=tmp_path / "c")
    assert (made.kernels, made.left_out) == (0, (entry.task,))
    records = [
        TuningRecord(c.digest, c.to_json(), "ok", (1e-5,))
        for c in (Candidate("contraction", (("m", m),)) for m in (1, 2, 3))
    ]
    store.add_records(entry.key, [*records, *history.seeds_of([CANDIDATE])])
    assert history.progress(store, entry.key) == ("", 3)
    store.put_kernel(replace(entry, source="tuned", latency_s=1e-5, effort="quick", trials=3))
    assert history.progress(store, entry.key) == ("quick", 3)
    made = bundles.save_bundle(file, cache_dir=tmp_path / "c")
    assert (made.kernels, made.left_out) == (1, ())


def test_a_choice_says_with_what_it_was_tuned(tmp_path: Path) -> None:
    store, context = KernelStore.open(tmp_path), Context.make(Config(), torch.get_num_threads())
    stored(store, context, effort="quick", trials=32)
    task = make_task()
    choice = kernels.look_up([task], Config(), store, context)[task.workload]
    report = choice_report(task, choice)
    assert (report.source, report.effort, report.trials, report.tuned) == (
        "cache",
        "quick",
        32,
        True,
    )
