"""Which cached kernels a process may run."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from torch_pruner import exc
from torch_pruner.compiler import kernels, settling, vendor
from torch_pruner.compiler.context import Context
from torch_pruner.compiler.stores import store_for
from torch_pruner.config import Config
from torch_pruner.families import bf16_tiles
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.log import PhaseTimer
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureResult, MeasureStatus, Task
from torch_pruner.tuner.measure.base import EvaluatorSpec, MeasureExecutor
from torch_pruner.tuner.task_run import TaskOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch_pruner.task import MeasureInput


@pytest.mark.parametrize(
    ("sketch", "library", "allowed", "usable"),
    [
        ("contraction", False, False, True),
        ("library", True, False, True),
        ("library", False, True, False),
        ("bf16_tiles", True, True, True),
        ("bf16_tiles", True, False, False),
    ],
)
def test_what_the_process_may_not_run_is_a_miss(
    monkeypatch, sketch: str, library: bool, allowed: bool, usable: bool
) -> None:
    """Tile registers are refused by a system that the process that tuned did not run on."""
    monkeypatch.setattr(bf16_tiles, "tiles_allowed", lambda: allowed)
    config = Config.from_options(options={"library": library})
    assert kernels.usable(Candidate(sketch), config) is usable


@pytest.mark.parametrize(
    ("vendor_s", "ours_s", "threads", "wins"),
    [
        (1e-4, 2e-4, 1, True),
        (1e-4, 2e-4, 2, False),  # its idle workers would cost more than it saves
        (1e-3, 9e-3, 2, False),
        (1e-3, 20e-3, 2, True),
        (1e-3, 1.09e-3, 1, False),
    ],
)
def test_a_vendor_kernel_pays_for_its_thread_pool(
    vendor_s: float, ours_s: float, threads: int, wins: bool
) -> None:
    assert vendor.wins(vendor_s, ours_s, threads) is wins


@pytest.mark.parametrize(("ours_s", "asked"), [(9e-3, False), (20e-3, True)])
def test_the_vendor_is_timed_only_where_it_can_win(ours_s: float, asked: bool) -> None:
    class Vendor:
        calls = 0

        def latency_s(self, spec: object) -> float:
            self.calls += 1
            return 1.0

    b = GraphBuilder()
    x, w = b.input(0, (128, 512), "float32"), b.input(1, (512, 512), "float32", static=True)
    task = Task("matmul", b.finish([b.matmul(x, w)]), TargetSpec.detect(2), 2, 1)
    best = MeasureResult(Candidate("contraction"), MeasureStatus.OK, (ours_s,), "")
    found = TaskOutcome(task, best, None, ours_s, 1, 0, "")
    vendor = Vendor()
    choice = settling.settle(task, found, Config(), None, vendor)
    assert (choice.source, vendor.calls) == ("tuned", int(asked))


class LuckyThenRaced(MeasureExecutor):
    """Every batch is faster than the one before; in a race whoever came first is."""

    def __init__(self) -> None:
        self.evaluator, self.device = EvaluatorSpec(), DeviceFingerprint.detect()
        self._clock = itertools.count()
        self._met: list[Candidate] = []

    def measure(self, inputs: Sequence[MeasureInput]) -> list[MeasureResult]:
        self._met += [i.candidate for i in inputs]
        seconds = 1e-3 * 0.9 ** next(self._clock)
        return [MeasureResult(i.candidate, MeasureStatus.OK, (seconds,)) for i in inputs]

    def race(self, inputs: Sequence[MeasureInput]) -> list[MeasureResult]:
        order = [self._met.index(i.candidate) for i in inputs]
        return [
            MeasureResult(i.candidate, MeasureStatus.OK, (2e-3 + 1e-4 * at,))
            for i, at in zip(inputs, order, strict=True)
        ]


def test_the_next_process_finds_what_this_one_chose(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And not what was fastest at a lucky moment: its library would have to be built first."""
    executor = LuckyThenRaced()
    monkeypatch.setattr(kernels, "_import_ahead", lambda: None)
    config = Config.from_options(options={"cache_dir": str(tmp_path), "trials": 24})
    store, context = store_for(config), Context.make(config, 1)
    b = GraphBuilder()
    x, w = b.input(0, (64, 128), "float32"), b.input(1, (128, 96), "float32", static=True)
    task = Task("matmul", b.finish([b.matmul(x, w)]), context.target, 1, 1)
    found = kernels.choose(
        [task], config, store, context, None, PhaseTimer(), executor=lambda: executor
    )
    chosen = found[task.workload]
    assert chosen.source == "tuned"
    found = kernels.look_up([task], config, store, context)[task.workload]
    assert (found.candidate, found.latency_s) == (chosen.candidate, chosen.latency_s)
    assert chosen.latency_s >= 2e-3, "the race decided"


def test_what_may_not_be_tuned_is_a_miss(tmp_path: Path) -> None:
    config = Config.from_options(options={"cache_dir": str(tmp_path)})
    store, context = store_for(config), Context.make(config, 1)
    b = GraphBuilder()
    x = b.input(0, (64, 128), "float32")
    task = Task("relu", b.finish([b.pointwise("relu", x)]), context.target, 1, 1)
    with pytest.raises(exc.CacheMiss):
        kernels.choose([task], config, store, context, None, PhaseTimer(), may_tune=False)


class AsPoints(MeasureExecutor):
    """A pointwise kernel takes 5 us on one thread and 6.5 us on two; another takes 100 us."""

    def __init__(self) -> None:
        self.evaluator, self.device = EvaluatorSpec(), DeviceFingerprint.detect()
        self.measured: list[tuple[str, int]] = []

    def measure(self, inputs: Sequence[MeasureInput]) -> list[MeasureResult]:
        found = []
        for given in inputs:
            par = dict(given.candidate.decisions).get("par", 1)
            self.measured.append((given.task.name, par))
            seconds = (6.5e-6 if par else 5e-6) if given.task.name == "small" else 1e-4
            found.append(MeasureResult(given.candidate, MeasureStatus.OK, (seconds,)))
        return found

    race = measure


def test_a_search_knows_that_threads_are_there_already(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The schedule for all threads is measured, and chosen though it takes longer alone."""
    monkeypatch.setattr(kernels, "_import_ahead", lambda: None)
    config = Config.from_options(options={"cache_dir": str(tmp_path), "trials": 12, "threads": 2})
    store, context = store_for(config), Context.make(config, 2)
    b = GraphBuilder()
    small = b.pointwise("add", b.input(0, (26_000,), "float32"), b.input(1, (26_000,), "float32"))
    tasks = [Task("small", b.finish([small]), context.target, 2, 1)]
    b = GraphBuilder()
    x, w = b.input(0, (256, 256), "float32"), b.input(1, (256, 256), "float32", static=True)
    tasks.append(Task("large", b.finish([b.matmul(x, w)]), context.target, 2, 1))

    def chosen(some: list[Task], executor: AsPoints) -> int:
        own = (config, store, context, None, PhaseTimer())
        found = kernels.choose(some, *own, executor=lambda: executor)
        return found[tasks[0].workload].decisions["par"]

    executor = AsPoints()
    assert chosen(tasks, executor) == 1
    assert ("small", 1) in executor.measured
    store.drop_kernel(context.kernel_key(tasks[0].workload))
    assert chosen(tasks, AsPoints()) == 1, "beside a kernel that the cache has"
    store.drop_kernel(context.kernel_key(tasks[0].workload))
    assert chosen(tasks[:1], AsPoints()) == 0, "alone"
