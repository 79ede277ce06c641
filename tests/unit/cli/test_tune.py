"""``tune`` and ``explain``: what they ask the api for, what they print, and how they end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from torch_pruner.report import GraphReport, Report
from torch_pruner.report import TaskReport as Task

if TYPE_CHECKING:
    from collections.abc import Callable

    Run = Callable[..., tuple[int, str, str]]

SORT = "aten.sort.default (%sort)"


def tuned(fake_api: Any) -> Task:
    return fake_api.report.tasks[0]


def with_tasks(fake_api: Any, *tasks: Task) -> Report:
    return Report((replace(fake_api.report.graphs[0], tasks=tasks),))


def test_everything_tuned_is_status_0(run: Run, fake_api: Any) -> None:
    status, out, _ = run("tune", "net.py:make")
    assert status == 0
    assert "matmul_3x2  tuned        1     48  2.0 us  1.0 us  2.00x       8  contraction" in out
    assert out.endswith("complete: every operator is compiled, every kernel is in the cache\n")


def test_json_is_the_report_and_nothing_else(run: Run, fake_api: Any) -> None:
    status, out, err = run("tune", "net.py:make", "--json")
    assert status == 0
    assert json.loads(out) == json.loads(json.dumps(fake_api.report.to_json()))
    assert "the user's code prints" in err


def test_untuned_kernels_are_listed_and_status_1(run: Run, fake_api: Any) -> None:
    untuned = replace(tuned(fake_api), source="untuned", latency_after_s=None, trials=0)
    many = [replace(untuned, name=f"kernel{i}", workload=str(i)) for i in range(7)]
    fake_api.report = with_tasks(fake_api, *many)
    status, out, _ = run("tune", "net.py:make")
    assert status == 1
    assert (
        "incomplete: kernels not tuned: 7 (kernel0, kernel1, kernel2, kernel3, kernel4, ...)" in out
    )
    assert run("tune", "net.py:make", "--json")[0] == 1


def test_operators_that_fell_back_are_listed_and_status_1(run: Run, fake_api: Any) -> None:
    from torch_pruner.report import OpFallback

    fallback = (OpFallback(SORT, "unsupported_op", "no kernel sorts"),)
    fake_api.report = Report((replace(fake_api.report.graphs[0], ops_fallback=fallback),))
    status, out, _ = run("tune", "net.py:make")
    assert status == 1
    assert f"  {SORT}: unsupported_op: no kernel sorts" in out
    assert "incomplete: operators left to the fallback: 1" in out


def test_a_graph_that_was_not_compiled_is_status_1(run: Run, fake_api: Any) -> None:
    note = "not compiled: ValueError: oops"
    fake_api.report = Report((GraphReport("graph3", 0, 0, 0, 0, 0, notes=(note,)),))
    status, out, _ = run("tune", "net.py:make")
    assert status == 1
    assert f"note: {note}" in out
    assert "incomplete: not compiled at all: graph3" in out
    fake_api.report = Report()
    assert run("tune", "net.py:make")[0] == 1


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_ctrl_c_says_what_is_kept_and_shows_it(run: Run, fake_api: Any, flags: list[str]) -> None:
    fake_api.error = KeyboardInterrupt()
    status, out, err = run("tune", "net.py:make", *flags)
    assert status == 130
    assert err.splitlines()[-1].startswith("torch-pruner: interrupted; the best kernels found")
    assert "matmul_3x2" in out
    if flags:
        json.loads(out)


def test_ctrl_c_before_anything_was_compiled(
    run: Run, fake_api: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch_pruner.dynamo.api.last_report", lambda: None)
    fake_api.error = KeyboardInterrupt()
    assert run("tune", "net.py:make", "--json")[:2] == (130, "")


def test_flags_are_options(run: Run, fake_api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    argv = "--effort full --time-budget 1.5 --trials 3 --threads 1 --cache-dir kernels --seed 4"
    settings = "--set library=0 --set tracker=none --set threads=7 --set on_miss=error"
    status, _, err = run("tune", "net.py:make", *argv.split(), *settings.split())
    assert status == 0, err
    options = fake_api.calls[0]["options"]
    assert options.pop("cache_dir").endswith("/kernels")
    assert options == {
        "effort": "full", "time_budget_s": 1.5, "trials": 3, "threads": 1, "seed": 4,
        "library": False, "tracker": None, "on_miss": "error",
    }  # fmt: skip
    assert threads == [1]


def test_no_flags_are_no_options(run: Run, fake_api: Any) -> None:
    run("tune", "net.py:make")
    assert fake_api.calls[0]["options"] == {}


def test_the_rpc_executor_is_reachable(run: Run, fake_api: Any) -> None:
    run("tune", "net.py:make", "--executor", "rpc", "--tracker", "host:9190/board")
    assert fake_api.calls[0]["options"] == {"executor": "rpc", "tracker": "host:9190/board"}


def test_a_dry_run_lists_each_kernel_once_and_stops(run: Run, fake_api: Any) -> None:
    graph = fake_api.explanation.graphs[0]
    task = graph.tasks[0]
    other = replace(task, name="softmax_3x2", workload="b" * 64, weight=3, flops=5e6, cached=True)
    again = replace(graph, tasks=(replace(task, weight=4),))
    both = (replace(graph, tasks=(task, other)), again)
    fake_api.explanation = replace(fake_api.explanation, graphs=both)
    status, out, _ = run("tune", "net.py:make", "--dry-run")
    assert status == 0
    assert out.splitlines()[1:] == [
        "kernel       shape  weight  FLOPs  cached",
        "matmul_3x2   3x2         5     48      no",
        "softmax_3x2  3x2         3  5.0 M     yes",
        "",
        "kernels: 2; cached: 1; to tune: 1",
    ]
    assert [c["name"] for c in fake_api.calls] == ["explain"]


def test_a_dry_run_as_json(run: Run, fake_api: Any) -> None:
    status, out, _ = run("tune", "net.py:make", "--dry-run", "--json")
    assert status == 0
    (task,) = json.loads(out)["tasks"]
    wanted = {"name", "workload", "shape", "weight", "flops", "cached"}
    assert wanted <= set(task)
    assert (task["weight"], task["cached"]) == (1, False)


def test_explain_prints_the_explanation(run: Run, fake_api: Any) -> None:
    status, out, _ = run("explain", "net.py:make", "--effort", "full")
    assert status == 0
    assert str(fake_api.explanation) in out
    assert fake_api.calls[0]["options"] == {"effort": "full"}
    status, out, _ = run("explain", "net.py:make", "--json")
    assert json.loads(out) == fake_api.explanation.to_json()


def test_what_was_seen_is_tuned_without_a_model(run: Run, fake_api: Any) -> None:
    status, out, _ = run("tune", "--seen", "--effort", "full")
    assert status == 0
    assert fake_api.seen == [{"effort": "full"}]
    assert out.endswith("complete: every operator is compiled, every kernel is in the cache\n")


def test_nothing_was_seen(run: Run, fake_api: Any) -> None:
    fake_api.report = Report()
    status, _, err = run("tune", "--seen")
    assert status == 0
    assert "nothing is noted" in err


@pytest.mark.parametrize(
    "words", [(), ("net.py:make", "--seen"), ("--seen", "--dry-run"), ("--seen", "--train")]
)
def test_a_model_or_what_was_seen(run: Run, fake_api: Any, words: tuple[str, ...]) -> None:
    status, _, err = run("tune", *words)
    assert status == 2
    assert "--seen" in err


def test_nothing_is_tuned_into_a_directory_that_cannot_be_used(fake_api: Any, run: Run) -> None:
    """It was tuned into memory, which ended with the process."""
    status, out, err = run("tune", "net.py:make", "--cache-dir", "/proc/nope")
    assert (status, out) == (2, "")
    assert err.startswith("torch-pruner: cannot use the cache directory /proc/nope: ")
    assert not fake_api.calls
