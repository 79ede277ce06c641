"""The tables of the GPU's benchmarks from made-up rows."""

from __future__ import annotations

from types import SimpleNamespace

from benchmarks.gpu import kernels, networks, stock, timeline
from torch_pruner.cards import CARDS
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task


def kernel(**fields):
    known = {"name": "k", "calls": 2, "ours_s": 1e-5, "ours_search_s": 2.0, "source": "tuned"}
    return known | fields


def test_a_kernel_that_stock_could_not_make_is_a_line_too() -> None:
    rows = [
        kernel(stock_s=2e-5, stock_search_s=20.0, failed=3, trials=64),
        kernel(stock_s=8e-5, stock_search_s=5.0, failed=0, trials=64),
        kernel(stock_s=None, stock_search_s=9.0, failed=64, trials=64),
        kernel(reason="TVMError: no"),
    ]
    content = {"rows": {"net/float16": {"kernels": rows, "error": ""}, "b": {"error": "crash"}}}
    text = stock.render(content)
    assert text.count("net/float16: k") == 4
    assert "TVMError: no" in text
    mean = next(line for line in text.splitlines() if "net/float16: in the mean" in line)
    assert "4.00" in mean  # of 2 and 8
    assert "5.00 times ours" in mean  # of 10 and 2.5
    assert "crash" in text.splitlines()[-1]


def test_the_costliest_kernels_are_compared() -> None:
    tasks = [("a", 1, 5e-3), ("b", 10, 1e-3), ("c", 2, 1e-3)]
    pairs = [
        (name, SimpleNamespace(weight=weight, latency_after_s=seconds))
        for name, weight, seconds in tasks
    ]
    assert [name for name, _ in stock.costliest(pairs, 2)] == ["b", "a"]


def test_a_contestant_that_is_not_installed_is_an_empty_cell() -> None:
    def timed(seconds):
        return {"latency": {"median_s": seconds}, "ready_s": 1.0}

    row = {
        "eager": timed(4e-3), "inductor-max-graphs": timed(2e-3), "pruner": timed(2e-3),
        "pruner-graphs": timed(1e-3), "tensorrt": {"reason": "ModuleNotFoundError"},
    }  # fmt: skip
    text = networks.render({"rows": {"net/float16/batch1": {"contestants": row, "error": ""}}})
    cells = [c.strip() for c in text.splitlines()[-1].strip("|").split("|")]
    header = [c.strip() for c in text.splitlines()[0].strip("|").split("|")]
    found = dict(zip(header, cells, strict=True))
    assert (found["vs eager"], found["vs inductor-max-graphs"]) == ("4.00", "2.00")
    assert found["tensorrt"] == found["vs tensorrt"] == ""


def test_kernels_beside_the_bound_and_the_vendor() -> None:
    drafts = [{"seconds": s} for s in (3e-6, 2e-6, None)]
    row = {"name": "k", "weight": 4, "bound_s": 1e-6, "vendor_s": None, "drafts": drafts}
    line = kernels.render([row]).splitlines()[-1]
    assert line == "| k | 4 | 1 us | 3 us | 2 us | 2 of 3 |  |"


def test_drafts_of_a_kernel_are_in_the_order_of_what_is_expected() -> None:
    b = GraphBuilder()
    x = b.input(0, (64, 128), "float32")
    spec = b.finish([b.reduce("sum", x, [1])])
    found = kernels.drafted(Task("t", spec, TargetSpec.cuda(CARDS["h100"]), 1), 2)
    assert found == sorted(found, key=lambda pair: pair[0])
    assert {c.sketch for _, c in found} >= {"gpu_rows"}


def test_a_timeline_tells_kernels_from_what_lies_between() -> None:
    ran = [timeline.Ran("a", 0, 4), timeline.Ran("b", 6, 8), timeline.Ran("a", 7, 10)]
    found = timeline.divided(ran)
    assert (found["kernels"], found["busy_us"], found["between_us"]) == (3, 8, 2)
    assert found["by_name"] == {"a": [2, 7], "b": [1, 2]}
    assert timeline.per_call([*ran, timeline.Ran("a", 20, 21)], 2) == [
        [ran[0], ran[1]],
        [ran[2], timeline.Ran("a", 20, 21)],
    ]
    text = timeline.render([{"contestant": "pruner", "median_us": 30.0, **found}])
    assert "| pruner | 30 us | 3 | 8 us | 2 us | 20 us |" in text
