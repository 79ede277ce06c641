"""Processes that build side by side: work is shared, what dies is replaced, nothing hangs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from torch_pruner import exc
from torch_pruner.codegen.build.kernel_object import Division, KernelObject
from torch_pruner.compiler import executors
from torch_pruner.compiler.building import jobs, library
from torch_pruner.compiler.building import pool as pools
from torch_pruner.compiler.building.pool import BuildPool
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.graph.phases import Turn
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, Scheduled

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICES = "tests.unit.compiler.building_services"


@pytest.fixture
def pool() -> Iterator[BuildPool]:
    pool = BuildPool(2, f"{SERVICES}:scripted")
    yield pool
    pool.close()


def test_answers_come_in_the_order_of_the_jobs(pool: BuildPool) -> None:
    pool.start()
    found = pool.build([{"cmd": "work"}] * 9)
    assert [reply["job"] for reply in found] == list(range(9))
    assert len({reply["pid"] for reply in found}) <= 2
    assert pool.build([]) == []


def test_processes_that_nobody_asked_stop_and_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What imports TVM for nothing would take the cores from the first seconds' calls."""
    monkeypatch.setattr(executors, "_running", {})
    executors.release_needless(2)  # none was begun
    make = executors.build_pool
    monkeypatch.setattr(pools.BuildPool.__init__, "__defaults__", (f"{SERVICES}:scripted",))
    idle = make(2)
    executors.release_needless(2)
    assert not idle._workers
    assert not executors._running
    busy = make(2)
    busy.build([{"cmd": "work"}])
    executors.release_needless(2)
    assert make(2) is busy
    assert busy._workers
    executors.close_all()


def test_a_job_whose_process_dies_is_done_by_another(pool: BuildPool, tmp_path: Path) -> None:
    work = [{"cmd": "work"}] * 3
    found = pool.build([*work, {"cmd": "work", "once": str(tmp_path / "once")}, *work])
    assert [reply["job"] for reply in found] == list(range(7))


def test_a_job_that_kills_is_given_up_and_the_next_build_works(pool: BuildPool) -> None:
    with pytest.raises(exc.WorkerDied):
        pool.build([{"cmd": "work"}, {"cmd": "die"}, {"cmd": "work"}])
    assert len(pool.build([{"cmd": "work"}] * 2)) == 2


def test_processes_that_cannot_begin_are_no_fault_of_the_job() -> None:
    with pytest.raises(OSError, match="worker"):
        BuildPool(2, f"{SERVICES}:broken").build([{"cmd": "work"}])


def test_a_library_is_built_here_where_no_process_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "build_pool", lambda _: BuildPool(1, f"{SERVICES}:broken"))
    monkeypatch.setattr(library, "answer", lambda job: {"ok": True, "parts": [], **job})
    monkeypatch.setattr(library, "FEW", 0)
    assert library._answers([{"cmd": "work"}], 1, beside=True)[0]["cmd"] == "work"


def test_a_kernel_that_kills_who_builds_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "build_pool", lambda _: BuildPool(1, f"{SERVICES}:scripted"))
    monkeypatch.setattr(library, "FEW", 0)
    with pytest.raises(exc.CompileError, match="died"):
        library._answers([{"cmd": "work"}, {"cmd": "die"}], 1, beside=True)


def test_what_cannot_be_built_says_why(tmp_path: Path) -> None:
    b = GraphBuilder()
    spec = b.finish([b.pointwise("exp", b.input(0, (4,), "float32"))])
    target = TargetSpec.detect(1)
    job = jobs.kernel_job(
        "kernel", Scheduled(spec, Candidate("nobody's")), target, tmp_path / "k.o"
    )
    with pytest.raises(exc.CompileError, match="nobody's"):
        jobs.parts_of(jobs.answer(job))


def test_calls_come_back_from_messages_as_they_were() -> None:
    calls = [
        KernelCall("a", (Place(0), Place(1, 64), Place(2, 0, 128)), Turn(3, more=1)),
        KernelCall("b", (Place(1),)),
    ]
    target = TargetSpec.detect(1)
    made = jobs.entries_job({"a": [Division(4)]}, {"main": calls}, 3, 2, None, target, Path("e.o"))
    assert jobs._calls(made["programs"]["main"]) == calls


@pytest.mark.parametrize("data", [b"", b"junk", KernelObject(b"code").to_bytes()[:25]])
def test_what_is_no_kernel_is_refused(data: bytes) -> None:
    made = KernelObject(b"code", (Division(), Division(7), Division(alone=True)))
    assert KernelObject.from_bytes(made.to_bytes()) == made
    with pytest.raises(ValueError, match="no kernel"):
        KernelObject.from_bytes(data)
