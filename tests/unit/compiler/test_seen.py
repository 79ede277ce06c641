"""What ran untuned, as the cache has noted it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from torch_pruner.compiler import kernels
from torch_pruner.compiler.choice import Choice
from torch_pruner.compiler.context import Context
from torch_pruner.compiler.remembered import seen
from torch_pruner.compiler.stores import store_for
from torch_pruner.config import Config
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.log import PhaseTimer
from torch_pruner.task import Candidate, Task


@pytest.fixture
def config(tmp_path):
    return Config(cache_dir=str(tmp_path), on_miss="fallback")


@pytest.fixture
def store(config):
    return store_for(config)


@pytest.fixture
def context(config):
    return Context.make(config, 2)


def product(context, rows):
    b = GraphBuilder()
    x, w = b.input(0, (rows, 16), "float32"), b.input(1, (16, 8), "float32", static=True)
    return Task(f"matmul_{rows}", b.finish([b.matmul(x, w)]), context.target, 2, 1)


def run_untuned(tasks, config, store, context):
    return kernels.choose(tasks, config, store, context, None, PhaseTimer())


def test_what_ran_untuned_is_noted(config, store, context) -> None:
    tasks = [product(context, rows) for rows in (3, 5)]
    run_untuned(tasks, config, store, context)
    assert {t.name: t.workload for t in seen.noted(store, context)} == {
        t.name: t.workload for t in tasks
    }


def test_a_note_answers_nobody(config, store, context) -> None:
    """Else a drafted kernel would count as tuned under ``on_miss="error"``."""
    tasks = [product(context, 3)]
    run_untuned(tasks, config, store, context)
    assert kernels.look_up(tasks, config, store, context) == {}
    assert run_untuned(tasks, config, store, context)[tasks[0].workload].source == "untuned"


def test_what_was_asked_to_run_as_drafted_is_no_note(config, store, context) -> None:
    drafted = config.replace(on_miss="tune", effort="none")
    run_untuned([product(context, 3)], drafted, store, context)
    assert seen.noted(store, context) == []


def test_what_was_tuned_since_is_noted_no_more(config, store, context) -> None:
    task = product(context, 3)
    run_untuned([task], config, store, context)
    tuned = Choice(Candidate("contraction"), "tuned", 1e-5)
    kernels.publish(task, tuned, store, context, effort="quick", chosen=True)
    assert seen.noted(store, context) == []


def test_notes_of_other_threads_are_not_ours(config, store, context) -> None:
    run_untuned([product(context, 3)], config, store, context)
    assert seen.noted(store, Context.make(config, 1)) == []


@pytest.mark.parametrize("damage", ["", "{", "[]", "another graph"])
def test_a_note_without_its_graph_is_left_out(config, store, context, damage, caplog) -> None:
    task, other = product(context, 3), product(context, 5)
    run_untuned([task], config, store, context)
    (listed,) = store.ls()
    store.drop_kernel(listed.entry.key)
    text = json.dumps(other.spec.to_json()) if damage == "another graph" else damage
    store.put_kernel(replace(listed.entry, workload_text=text))
    with caplog.at_level(logging.WARNING, "torch_pruner"):
        assert seen.noted(store, context) == []
    assert "noted without its graph" in caplog.text
