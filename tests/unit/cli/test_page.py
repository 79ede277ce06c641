"""``explain --html``: one page, which needs nothing else and shows what the text shows."""

from __future__ import annotations

from dataclasses import replace
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any

from torch_pruner.cli.page import render
from torch_pruner.dynamo.api import Explanation, GraphExplanation, TaskExplanation
from torch_pruner.report import OpFallback

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Run = Callable[..., tuple[int, str, str]]

LINEAR = TaskExplanation(
    "matmul_<3x2>", "a" * 64, "3x2", "float32", 12, 48e6, cached=True, differs={},
    schedule="contraction", latency_s=2e-4,
)  # fmt: skip
NORM = replace(
    LINEAR, name="norm", workload="b" * 64, weight=1, flops=1e3, schedule="rows", latency_s=6e-4
)
SORT = OpFallback("aten.sort.default (%sort)", "unsupported_op", "no kernel sorts & such")


class Reader(HTMLParser):
    """Checks that tags are closed in order, and keeps the text and what is referred to."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.references: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.references += [v for k, v in attrs if k in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)


def page(*tasks: TaskExplanation) -> Reader:
    steps = ("compiled: 5 operators in 2 kernel calls", "eager: aten.sort.default")
    graph = GraphExplanation("graph0", 6, 5, 100, 99, steps, tasks, (SORT,))
    return Reader(render(Explanation((graph,)), "net.py:make"))


def test_all_that_is_known_is_there() -> None:
    found = page(LINEAR, NORM)
    for text in (
        "net.py:make", "5 of 6", "99.0 %", "2 of 2", "matmul_<3x2>", "200 µs", "contraction",
        "compiled: 5 operators in 2 kernel calls", SORT.node, SORT.detail, "3 ms",
    ):  # fmt: skip
        assert text in found.text, text


def test_shares_are_of_the_time_where_all_kernels_are_timed() -> None:
    found = page(LINEAR, NORM)
    assert "share of the time" in found.text
    assert {"80.0 %", "20.0 %"} <= set(found.text)  # 12 calls of 200 µs, one of 600


def test_shares_are_of_the_flops_where_not() -> None:
    found = page(LINEAR, replace(NORM, cached=False, latency_s=None, schedule=""))
    assert "share of the FLOPs" in found.text
    assert "100.0 %" in found.text
    assert "none yet" in found.text
    assert "in kernels, per call" not in found.text


def test_the_page_refers_to_nothing() -> None:
    assert page(LINEAR).references == []


def test_nothing_was_captured() -> None:
    assert "Nothing was captured." in Reader(render(Explanation(()), "empty")).text


def test_the_command_writes_it(run: Run, fake_api: Any, tmp_path: Path) -> None:
    target = tmp_path / "new" / "page.html"
    status, out, _ = run("explain", "net.py:make", "--html", str(target))
    assert status == 0
    assert "matmul_3x2" in out
    assert "matmul_3x2" in Reader(target.read_text(encoding="utf-8")).text
