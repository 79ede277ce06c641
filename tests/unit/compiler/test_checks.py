"""Kernels that a worker runs first: what is asked for, remembered, and put in place of failures."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests import fakes
from tests.families import kernels as K
from torch_pruner import exc
from torch_pruner.cache import KernelStore
from torch_pruner.cards import CARDS
from torch_pruner.compiler import drafting
from torch_pruner.compiler.checks import Checks
from torch_pruner.compiler.choice import Choice
from torch_pruner.compiler.context import Context
from torch_pruner.config import Config
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.log import PhaseTimer
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureInput, MeasureResult, MeasureStatus, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

TARGET = TargetSpec.cuda(CARDS["a100"])
CONFIG = Config(effort="none")
S = MeasureStatus


class Library:
    def runs(self, spec: object) -> bool:
        return True

    def latency_s(self, spec: object) -> float | None:
        return None


@pytest.fixture
def store(tmp_path: Path) -> KernelStore:
    return KernelStore.open(tmp_path)


@pytest.fixture
def task() -> Task:
    return Task("linear", K.linear(512, 512, 512), TARGET, 1)


def context(card: str = "a100") -> Context:
    return Context.of(CONFIG, TARGET, DeviceFingerprint.of_card(CARDS[card]))


def drafted(task: Task) -> dict[str, Choice]:
    return {task.workload: Choice(drafting.draft(task), "untuned")}


def executor_where(**status: MeasureStatus) -> fakes.FakeExecutor:
    """Kernels of these sketches fail in these ways."""

    def measure(given: MeasureInput) -> MeasureResult:
        found = status.get(given.candidate.sketch, S.OK)
        if found is S.OK:
            return MeasureResult(given.candidate, found, (1e-5,))
        return MeasureResult(given.candidate, found, (), "it went wrong\nin many words")

    return fakes.FakeExecutor(measure)


def checks_of(
    store: KernelStore,
    executor: Any,
    vendor: Any = None,
    config: Config = CONFIG,
    where: Context | None = None,
) -> Checks:
    return Checks(config, store, where or context(), lambda: executor, vendor, PhaseTimer())


def loaded(checks: Checks, task: Task, choices: Mapping[str, Choice] | None = None) -> Choice:
    """The choice with which a program of the one task is loaded."""

    def link(chosen: Mapping[str, Choice], checked: Callable[[], None]) -> Choice:
        checked()
        return chosen[task.workload]

    return checks.linked([task], choices or drafted(task), link)


def test_a_draft_is_run_once(store, task) -> None:
    executor = executor_where()
    for _ in range(2):
        checks = checks_of(store, executor)
        assert loaded(checks, task) == drafted(task)[task.workload]
        assert not checks.notes
    assert executor.n_measured == 1


def test_what_was_timed_or_is_the_librarys_needs_no_check(store, task) -> None:
    executor = executor_where()
    timed = Choice(drafting.draft(task), "cache", 1e-5)
    for choice in (timed, Choice(Candidate("library"), "cache")):
        assert loaded(checks_of(store, executor), task, {task.workload: choice}) == choice
    assert not executor.batches


def test_a_check_on_another_device_or_of_another_version_does_not_count(
    store, task, monkeypatch
) -> None:
    executor = executor_where()
    loaded(checks_of(store, executor), task)
    loaded(checks_of(store, executor, where=context("h100")), task)
    assert executor.n_measured == 2
    monkeypatch.setattr("torch_pruner.compiler.context.CODEGEN_VERSION", -1)
    loaded(checks_of(store, executor), task)
    assert executor.n_measured == 3


@pytest.mark.parametrize("status", [S.WRONG_RESULT, S.RUN_ERROR, S.BUILD_ERROR, S.TIMEOUT])
def test_what_fails_gives_way_to_the_library(store, task, status) -> None:
    """Other drafts come before it where they are about as fast, and after it where not."""
    sketches = [candidate.sketch for _, candidate in drafting.drafts(task)]
    assert sketches == ["gpu_product", "gpu_direct"]
    executor = executor_where(gpu_product=status)
    checks = checks_of(store, executor, Library())
    assert loaded(checks, task).candidate == Candidate("library")
    (note,) = checks.notes
    assert note == f"linear: library runs in place of gpu_product: {status}: it went wrong"
    kept = store.get_kernel(context().kernel_key(task.workload))
    assert (kept.source, kept.candidate["sketch"]) == ("library", "library")
    assert loaded(checks_of(store, executor, Library()), task).source == "library"
    assert executor.n_measured == 1, "a failure is remembered, too"
    assert [r.status for r in checks.failures(task)] == [status]


def test_a_draft_that_is_about_as_fast_comes_before_the_library(store) -> None:
    task = Task("small", K.linear(40, 48, 64), TARGET, 1)
    executor = executor_where(gpu_product=S.WRONG_RESULT)
    assert loaded(checks_of(store, executor, Library()), task).sketch == "gpu_direct"
    assert [len(b) for b in executor.batches] == [1, 1]


@pytest.mark.parametrize("allowed", [False, True])
def test_without_a_library_any_draft_will_do(store, task, allowed) -> None:
    executor = executor_where(gpu_product=S.WRONG_RESULT)
    config = CONFIG.replace(library=allowed)
    checks = checks_of(store, executor, None if allowed else Library(), config)
    assert loaded(checks, task).sketch == "gpu_direct"


def test_a_kernel_that_nothing_runs_is_eagers(store, task) -> None:
    executor = executor_where(gpu_product=S.WRONG_RESULT, gpu_direct=S.RUN_ERROR)
    with pytest.raises(exc.CompileError, match=r"linear.*run_error: it went wrong"):
        loaded(checks_of(store, executor), task)


def test_the_program_is_built_meanwhile(store, task) -> None:
    """And neither it nor the kernels of it that failed are loaded."""
    built = threading.Event()

    def measure(given: MeasureInput) -> MeasureResult:
        assert built.wait(60), "nothing is built while the check runs"
        return MeasureResult(given.candidate, S.WRONG_RESULT, (), "wrong")

    found = []

    def link(chosen: Mapping[str, Choice], checked: Callable[[], None]) -> Choice:
        built.set()
        checked()
        found.append(chosen[task.workload])
        return found[-1]

    checks = checks_of(store, fakes.FakeExecutor(measure), Library())
    checks.linked([task], drafted(task), link)
    assert [choice.sketch for choice in found] == ["library"]


@pytest.mark.parametrize("status", [S.OK, S.BUILD_ERROR])
def test_a_program_that_cannot_be_built_is_built_of_other_kernels(store, task, status) -> None:
    """If one of them is to blame."""

    def link(chosen: Mapping[str, Choice], checked: Callable[[], None]) -> str:
        if chosen[task.workload].sketch == "gpu_product":
            raise exc.CompileError("linear", "no code")
        return chosen[task.workload].sketch

    checks = checks_of(store, executor_where(gpu_product=status), Library())
    if status is S.OK:
        with pytest.raises(exc.CompileError, match="no code"):
            checks.linked([task], drafted(task), link)
    else:
        assert checks.linked([task], drafted(task), link) == "library"


def test_where_no_worker_runs_nothing_is_loaded(store, task) -> None:
    def measure(_: MeasureInput) -> MeasureResult:
        raise exc.MeasureError("the device is somebody else's")

    with pytest.raises(exc.MeasureError, match="somebody else's"):
        loaded(checks_of(store, fakes.FakeExecutor(measure)), task)


def test_serving_takes_what_was_checked_alone(store, task) -> None:
    executor, config = executor_where(), CONFIG.replace(on_miss="error")
    with pytest.raises(exc.CacheMiss, match="linear, which was not run on this device"):
        loaded(checks_of(store, executor, config=config), task)
    assert not executor.batches
    loaded(checks_of(store, executor), task)
    assert loaded(checks_of(store, executor, config=config), task).source == "untuned"


def test_a_cache_that_cannot_be_written_is_no_obstacle(tmp_path, task) -> None:
    KernelStore.open(tmp_path).close()
    store = KernelStore.open(tmp_path, read_only=True)
    executor = executor_where(gpu_product=S.WRONG_RESULT)
    assert loaded(checks_of(store, executor), task).sketch == "gpu_direct"
    assert executor.n_measured == 2


def test_whoever_comes_second_finds_the_work_done(store, task) -> None:
    """Two processes that start at once: the executors take turns, and one has nothing to do."""
    executor = executor_where()
    asked = [MeasureInput(task, drafting.draft(task))]
    for _ in range(2):  # both looked before either had run anything
        assert checks_of(store, executor)._run(asked) == {}
    assert executor.n_measured == 1


def test_two_kernels_and_one_fails(store, task) -> None:
    other = replace(task, name="wide", spec=K.linear(512, 1024, 512))
    bad = task.workload

    def measure(given: MeasureInput) -> MeasureResult:
        wrong = given.task.workload == bad and given.candidate.sketch == "gpu_product"
        if wrong:
            return MeasureResult(given.candidate, S.WRONG_RESULT, (), "")
        return MeasureResult(given.candidate, S.OK, (1e-5,))

    executor = fakes.FakeExecutor(measure)
    checks = checks_of(store, executor, Library())
    choices = drafted(task) | drafted(other)
    found = checks.linked([task, other], choices, lambda chosen, checked: (checked(), chosen)[1])
    assert found[bad].source == "library"
    assert found[other.workload] == choices[other.workload]
    assert [len(b) for b in executor.batches] == [2]
