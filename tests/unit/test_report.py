"""Reports: sums over graphs, JSON that is complete, and text that fits a terminal."""

from __future__ import annotations

import json
from dataclasses import replace
from types import MappingProxyType

import pytest

from torch_pruner import text_tables
from torch_pruner.log import PHASES
from torch_pruner.report import GraphReport, OpFallback, Report, TaskReport

MATMUL = TaskReport(
    name="matmul_add_relu_4x128", workload="a" * 64, weight=2, flops=66560.0, source="tuned",
    latency_before_s=1.2e-3, latency_after_s=4e-4, trials=32, digest="d" * 64, sketch="rows",
)  # fmt: skip
SOFTMAX = TaskReport(
    name="max_sum_sub_exp_4x128", workload="b" * 64, weight=1, flops=1024.0, source="cache",
    latency_before_s=None, latency_after_s=4.5e-6, trials=0, digest="e" * 64,
)  # fmt: skip
SORT = OpFallback("aten.sort.default (%sort)", "unsupported_op", "no kernel sorts")
FIRST = GraphReport(
    name="graph0", ops_total=14, ops_compiled=12, flops_total=1000, flops_compiled=999, regions=2,
    ops_fallback=(SORT, replace(SORT, node="aten.sort.default (%sort_1)")),
    tasks=(MATMUL, SOFTMAX), seconds={"capture": 0.5, "build": 1.25},
    trials=32, notes=("a note",), weight_bytes=1 << 20, workspace_bytes=2048, barriers=7,
)  # fmt: skip
SECOND = GraphReport(
    name="graph1", ops_total=3, ops_compiled=3, flops_total=10, flops_compiled=10, regions=1,
    tasks=(replace(MATMUL, source="cache", weight=5),), seconds={"capture": 0.25},
)  # fmt: skip
BOTH = Report((FIRST, SECOND))


def test_numbers_are_sums_over_the_graphs() -> None:
    assert (BOTH.ops_total, BOTH.ops_compiled) == (17, 15)
    assert (BOTH.flops_total, BOTH.flops_compiled) == (1010, 1009)
    assert (BOTH.trials, BOTH.weight_bytes, BOTH.workspace_bytes) == (32, 1 << 20, 2048)
    assert BOTH.barriers == 7
    assert len(BOTH.ops_fallback) == 2
    assert BOTH.notes == ("a note",)


def test_every_phase_is_present_whatever_was_timed() -> None:
    assert tuple(Report().seconds) == PHASES
    assert tuple(BOTH.seconds) == PHASES
    assert BOTH.seconds["capture"] == 0.75
    assert BOTH.seconds["build"] == 1.25
    assert BOTH.seconds["train"] == 0.0


def test_a_kernel_of_two_graphs_is_one_task_with_both_weights() -> None:
    matmul, softmax = BOTH.tasks
    assert matmul.weight == 7
    assert matmul.source == "tuned"
    assert matmul.trials == 32
    assert softmax == SOFTMAX
    assert BOTH.sources == {"tuned": 1, "library": 0, "cache": 1, "untuned": 0}


def test_merging_keeps_the_latencies_that_one_of_the_graphs_knows() -> None:
    untimed = replace(MATMUL, source="untuned", latency_before_s=None, latency_after_s=None)
    for one, other in ((untimed, MATMUL), (MATMUL, untimed)):
        merged = one.merge(other)
        assert (merged.source, merged.latency_after_s) == ("tuned", 4e-4)
        assert merged.gain == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("graph", "complete"),
    [
        (SECOND, True),
        (FIRST, False),
        (replace(SECOND, tasks=(replace(MATMUL, source="untuned"),)), False),
        (replace(SECOND, tasks=(replace(MATMUL, source="library"),)), True),
        (replace(SECOND, tasks=(replace(MATMUL, source="cache", effort="quick"),)), True),
        (replace(SECOND, tasks=(replace(MATMUL, source="cache", effort="none"),)), False),
        (GraphReport("graph2", 0, 0, 0, 0, 0, notes=("not compiled: ValueError",)), False),
    ],
)
def test_complete_means_compiled_and_tuned(graph: GraphReport, complete: bool) -> None:
    assert Report((graph,)).complete is complete


def test_nothing_is_not_complete() -> None:
    assert not Report().complete


def test_json_has_the_contract_s_names_and_survives_a_round_trip() -> None:
    data = json.loads(json.dumps(BOTH.to_json(), allow_nan=False))
    wanted = {"graphs", "ops_total", "ops_compiled", "ops_fallback", "tasks", "seconds", "trials"}
    assert wanted <= set(data)
    assert data["tasks"][0] == {
        "name": "matmul_add_relu_4x128", "workload": "a" * 64, "weight": 7, "flops": 66560.0,
        "source": "tuned", "latency_before_s": 1.2e-3, "latency_after_s": 4e-4, "trials": 32,
        "digest": "d" * 64, "sketch": "rows", "effort": "",
    }  # fmt: skip
    assert data["ops_fallback"][0] == {
        "node": "aten.sort.default (%sort)", "kind": "unsupported_op", "detail": "no kernel sorts",
    }  # fmt: skip
    assert [g["name"] for g in data["graphs"]] == ["graph0", "graph1"]
    assert set(data["graphs"][1]["seconds"]) == set(PHASES)


def test_a_read_only_mapping_of_seconds_is_fine() -> None:
    graph = replace(SECOND, seconds=MappingProxyType({"other": 1.0}))
    assert graph.to_json()["seconds"]["other"] == 1.0


def test_the_summary_is_one_line_with_every_count_and_phase() -> None:
    text = BOTH.summary()
    assert text.startswith(
        "15 of 17 operators compiled, 2 left to the fallback; kernels: 1 tuned, 1 from cache,"
        " 0 from the library, 0 untuned; 32 trials; 2.00 s (capture 0.75, "
    )
    assert all(f"{phase} " in text for phase in PHASES)
    assert "\n" not in text


def test_the_text_for_people() -> None:
    assert str(BOTH).splitlines() == [
        "graph   operators  compiled  FLOPs  compiled  regions  kernels",
        "graph0         14    85.7 %  1.0 k    99.9 %        2        2",
        "graph1          3     100 %     10     100 %        1        1",
        "",
        "kernel                 source  weight   FLOPs   before     after   gain  trials  schedule",
        "matmul_add_relu_4x128  tuned        7  66.6 k  1.20 ms  400.0 us  3.00x      32  rows",
        "max_sum_sub_exp_4x128  cache        1   1.0 k        -    4.5 us      -       0  eeeeeeee",
        "",
        "left to the fallback: 2 operators",
        "  aten.sort.default (%sort) and 1 more: unsupported_op: no kernel sorts",
        "",
        "note: a note",
        "",
        "kernels: 1 tuned, 0 library, 1 cache, 0 untuned; 32 trials",
        "kernels timed before and after, by weight: 8.40 ms -> 2.80 ms (3.00x)",
        "seconds: 2.00 (capture 0.75, build 1.25)",
        "memory: 1.0 MiB in packed copies of weights, 2.0 KiB workspace",
    ]


def test_what_dynamo_took_stands_beside_what_we_took() -> None:
    beside = replace(BOTH, dynamo_s=1.5)
    assert "seconds: 2.00 (capture 0.75, build 1.25); torch's Dynamo beside it: 1.50" in str(beside)
    assert beside.to_json()["dynamo_s"] == 1.5
    assert BOTH.to_json()["dynamo_s"] is None


def test_text_is_ascii_and_fits_a_terminal_whatever_names_are_like() -> None:
    long = replace(MATMUL, name="matmul_" * 40, sketch="contraction_with_a_long_name")
    refused = OpFallback("aten." + "x" * 120, "unsupported_op", "line one\nline two " * 20)
    graph = replace(FIRST, name="g" * 150, tasks=(long,), ops_fallback=(refused,))
    text = str(Report((graph,)))
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()) <= text_tables.COLUMNS


def test_reasons_are_shown_in_full() -> None:
    refused = OpFallback(
        "aten.sort.default (%sort)", "unsupported_op", "why " * 40 + "and what next"
    )
    text = str(Report((replace(FIRST, ops_fallback=(refused,)),)))
    assert "and what next" in text


def test_many_reasons_are_counted_and_not_all_shown() -> None:
    refused = tuple(OpFallback(f"node{i}", "dtype", f"reason {i}") for i in range(30))
    text = str(Report((replace(FIRST, ops_fallback=refused),)))
    assert "left to the fallback: 30 operators" in text
    assert "and 10 other reasons" in text


def test_an_empty_report_says_so() -> None:
    assert str(Report()).startswith("nothing was compiled")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "-"), (5e-7, "0.5 us"), (1.2346e-4, "123.5 us"), (0.0021, "2.10 ms"), (3.0, "3.00 s")],
)
def test_times(seconds: float | None, text: str) -> None:
    assert text_tables.time_text(seconds) == text


def test_quantities() -> None:
    assert text_tables.flops_text(12) == "12"
    assert text_tables.flops_text(4.2e9) == "4.2 G"
    assert text_tables.bytes_text(1536) == "1.5 KiB"
    assert text_tables.bytes_text(0) == "0 B"


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 0, "-"), (0, 9, "0 %"), (9, 9, "100 %"), (99_999, 100_000, "99.9 %"), (1, 9999, "0.1 %")],
)
def test_only_the_whole_is_100_percent(part: int, whole: int, text: str) -> None:
    assert text_tables.percent(part, whole) == text


def test_what_runs_and_what_is_pending_is_told_where_it_may_change() -> None:
    assert "pending" not in str(BOTH)
    waits = Report((replace(FIRST, runs="eager", pending="drafted"), SECOND))
    graph = next(line for line in str(waits).splitlines() if line.startswith("graph0"))
    assert graph.split()[-2:] == ["eager", "drafted"]
    assert waits.to_json()["graphs"][0]["pending"] == "drafted"


def test_a_notebook_shows_tables_and_text_from_elsewhere_is_escaped() -> None:
    odd = replace(FIRST, name="<script>", runs="drafted", pending="tuned")
    shown = Report((odd, SECOND))._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "<td>drafted</td><td>tuned</td>" in shown
    assert shown.count("<table>") == shown.count("</table>") == 2
    assert Report()._repr_html_().startswith("<p>")
