"""Kernels for a card that this process loads once a worker has run them, on the pretended card."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

import torch_pruner as tp
from tests.compile.agreement import assert_equal
from tests.gpu import pretend_gpu
from tests.gpu.test_gpu_compile import Mixed, agree, inputs
from torch_pruner.compiler.executors import close_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Make = Callable[[str], pretend_gpu.PretendDevice]

pytestmark = pytest.mark.tvm
NAME = "tests.gpu.pretend_gpu:"


@pytest.fixture
def card_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """The card whose workers have a builder of that name."""
    with contextlib.ExitStack() as stack:

        def make(builder: str) -> pretend_gpu.PretendDevice:
            torch._dynamo.reset()
            card = pretend_gpu.instead_of_cpu(monkeypatch, builder=NAME + builder)
            return stack.enter_context(card)

        yield make
    close_all()


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm = nn.Linear(24, 40), nn.LayerNorm(40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x).relu())


@torch.no_grad()
def test_workers_run_every_kernel_first_and_once(cold, card_of, monkeypatch) -> None:
    card = card_of("PretendBuilder")
    asked: list[int] = []
    executor = card.executor
    monkeypatch.setattr(card, "executor", lambda *a: asked.append(1) or executor(*a))
    net, given = Mixed().eval(), inputs()
    agree(cold.compile(net)(*given), net(*given))
    report = tp.last_report()
    assert report is not None
    assert report.ops_compiled == report.ops_total
    assert {t.source for t in report.tasks} == {"untuned"}
    assert not report.notes
    assert asked
    for options in ({}, {"on_miss": "error"}):  # the captured program, and kernels alone
        torch._dynamo.reset()
        monkeypatch.setattr(card, "executor", lambda *_: pytest.fail("a worker was asked"))
        monkeypatch.setattr(
            "torch_pruner.devices.cuda.CudaToolchain.build", lambda *_: pytest.fail("built again")
        )
        agree(cold.compile(net, **options)(*given), net(*given))
        report = tp.last_report()
        assert report is not None
        assert {t.source for t in report.tasks} == {"cache"}


@pytest.mark.parametrize(
    ("builder", "why"), [("WrongProducts", "wrong_result: "), ("DeadlyProducts", "run_error: ")]
)
@torch.no_grad()
def test_a_kernel_that_fails_in_a_worker_is_never_loaded(cold, card_of, builder, why) -> None:
    """ATen's stands in for it, and nothing else changes."""
    card = card_of(builder)
    net, x = Perceptron().eval(), torch.randn(9, 24)
    for source in ("library", "cache"):
        torch._dynamo.reset()
        assert_equal(cold.compile(net)(x), net(x))
        report = tp.last_report()
        assert report is not None
        assert report.ops_compiled == report.ops_total
        assert {t.sketch for t in report.tasks} == {"library", "gpu_rows"}
        assert source in {t.source for t in report.tasks}
        assert card.driver.loaded == {"gpu_rows"}
        if source == "library":
            first, second = report.notes
            assert f"gpu_direct runs in place of gpu_product: {why}" in first
            assert f"library runs in place of gpu_direct: {why}" in second
    (graph,) = tp.explain(net, (x,), options=cold.options()).graphs
    assert {t.schedule: why in t.failed for t in graph.tasks} == {
        "library": True,
        "gpu_rows": False,
    }


@torch.no_grad()
def test_what_nothing_runs_is_eagers(cold, card_of) -> None:
    card = card_of("WrongProducts")
    net, x = nn.Linear(24, 40).eval(), torch.randn(9, 24)
    compiled = cold.compile(net, strict=False, library=False)
    assert_equal(compiled(x), net(x))
    report = tp.last_report()
    assert report is not None
    assert not report.ops_total
    assert "none of its kernels passed its check on this device" in report.notes[0]
    assert not card.driver.loaded


@torch.no_grad()
def test_where_no_worker_gets_the_device_eager_runs(cold, card_of, caplog) -> None:
    card = card_of("NoDevice")
    net, x = nn.Linear(24, 40).eval(), torch.randn(9, 24)
    with caplog.at_level(logging.WARNING, logger="torch_pruner"):
        assert_equal(cold.compile(net, strict=False)(x), net(x))
    (line,) = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert "runs in eager" in line
    assert "no measurement worker can run kernels" in line
    assert not card.driver.loaded


@torch.no_grad()
def test_a_search_checks_what_it_times(cold, card_of, monkeypatch) -> None:
    card_of("PretendBuilder")
    begun = []
    monkeypatch.setattr(
        "torch_pruner.compiler.checks.Checks._run", lambda *_: begun.append(1) or {}
    )
    net, x = nn.Linear(24, 40).eval(), torch.randn(9, 24)
    options = {"effort": "quick", "trials": 4, "time_budget_s": 900.0}
    assert_equal(cold.compile(net, **options)(x), net(x))
    report = tp.last_report()
    assert report is not None
    assert {t.source for t in report.tasks} <= {"tuned", "library"}
    assert not begun
