"""On which threads a library's kernels run: torch's where a team is whole, or else TVM's."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.tvm
PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
NUMBER = ctypes.CFUNCTYPE(ctypes.c_int)
TASKS = 64


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A linked library: its first entry writes ``3 * i`` to number i of an array, fails where the
    array begins with -1; and the entry that says on which threads."""
    from torch_pruner.codegen.build.addresses import Reads
    from torch_pruner.codegen.build.launch import write_launch
    from torch_pruner.codegen.build.link import link_objects
    from torch_pruner.codegen.build.load import load_entries
    from torch_pruner.codegen.build.lower import object_code
    from torch_pruner.codegen.tir.builders import PARALLEL as LOOP
    from torch_pruner.codegen.tir.builders import GlobalVar, IRModule, S, T, imm, seq, tvm
    from torch_pruner.codegen.tir.values import store
    from torch_pruner.graph.memory import LAUNCH
    from torch_pruner.target import TargetSpec

    folder, target = tmp_path_factory.mktemp("launch"), TargetSpec.detect(2)
    address, reads, i = T.Var("table", "int64"), Reads(), T.Var("i", "int32")
    array = reads.at(address, "int32", "array")
    kind, said = tvm.ir.StringImm("RuntimeError"), [tvm.ir.StringImm("it begins with -1")]
    good = S.AssertStmt(array[imm(0)] > T.const(-1, "int32"), kind, said)
    body = seq([good, store(array, i, i * 3)])
    whole = seq([*reads.stmts, S.For(i, 0, TASKS, LOOP, body)])
    function = T.PrimFunc([address], whole).with_attr({"global_symbol": "triple"})
    object_code(IRModule({GlobalVar("triple"): function}), target, folder / "triple.o")
    write_launch(target, folder / "launch.o")
    link_objects([folder / "triple.o", folder / "launch.o"], folder / "library.so")
    return load_entries(folder / "library.so", ["triple", LAUNCH])


class Watched:
    """An OpenMP that counts its teams, and may be told to be another than it is."""

    def __init__(self, real) -> None:
        self.teams, self.fewer, self.most, self.inside = 0, False, 2, 0
        parallel = PARALLEL(real.parallel)

        def team(task, given, count, flags) -> None:
            self.teams += 1
            parallel(task, given, 1 if self.fewer else count, flags)

        self._kept = (PARALLEL(team), NUMBER(lambda: self.most), NUMBER(lambda: self.inside))
        given = [ctypes.cast(function, ctypes.c_void_p).value for function in self._kept]
        self.functions = real._replace(
            parallel=given[0], max_threads=given[1], in_parallel=given[2]
        )


@pytest.fixture
def openmp(library, monkeypatch):
    from torch_pruner.codegen.build import load, team
    from torch_pruner.devices import openmp

    if (real := openmp.functions()) is None:
        pytest.skip("torch has no OpenMP that kernels can use")
    before = list(team._table)
    watched = Watched(real)
    load.set_threads(2, watched.functions)
    team.join(library[1])
    yield watched
    team._table[:] = before


def tripled(entry: Callable[[int], object]) -> bool:
    array = torch.zeros(TASKS, dtype=torch.int32)
    entry(array.data_ptr())
    return torch.equal(array, 3 * torch.arange(TASKS, dtype=torch.int32))


def test_a_launch_is_a_team_of_openmps_threads(library, openmp) -> None:
    assert tripled(library[0])
    assert tripled(library[0])
    assert openmp.teams == 2


@pytest.mark.parametrize(("most", "inside"), [(3, 0), (1, 0), (2, 1)])
def test_tvms_pool_has_it_where_a_team_would_not_be_whole(
    library, openmp, most: int, inside: int
) -> None:
    openmp.most, openmp.inside = most, inside
    assert tripled(library[0])
    assert openmp.teams == 0


def test_tvms_pool_has_it_where_a_team_was_not_whole(library, openmp) -> None:
    openmp.fewer = True
    assert tripled(library[0])
    assert openmp.teams == 1


def test_tvms_pool_has_it_where_nobody_shares(library, openmp) -> None:
    from torch_pruner.codegen.build import team

    team._table[-1] = 0
    assert tripled(library[0])
    assert openmp.teams == 0


def test_a_task_that_fails_raises(library, openmp) -> None:
    array = torch.full((TASKS,), -1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="a task of a kernel returned error"):
        library[0](array.data_ptr())
    assert tripled(library[0])


def test_threads_that_call_at_once_have_teams_of_their_own(library, openmp) -> None:
    right: list[bool] = []
    callers = [
        threading.Thread(target=lambda: right.extend(tripled(library[0]) for _ in range(50)))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert right == [True] * 200


def test_threads_that_share_a_core_stay_as_free_as_they_were(library, openmp) -> None:
    """One that finds itself on the caller's core moves away, and may come back; where it may be
    nowhere else it stays."""
    if not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is one core")
    assert tripled(library[0])
    threads = [int(thread) for thread in os.listdir("/proc/self/task")]
    before = {thread: os.sched_getaffinity(thread) for thread in threads}
    core = min(os.sched_getaffinity(0))
    try:
        for thread in threads:  # all of them, the caller too
            os.sched_setaffinity(thread, {core})
        assert all(tripled(library[0]) for _ in range(5))
        assert all(os.sched_getaffinity(thread) == {core} for thread in threads)
        for thread in threads:  # they still are there, and need not be
            os.sched_setaffinity(thread, before[thread])
        for _ in range(5):
            time.sleep(0.02)
            assert tripled(library[0])
        assert all(os.sched_getaffinity(thread) == before[thread] for thread in threads)
    finally:
        for thread, cores in before.items():
            os.sched_setaffinity(thread, cores)


def test_a_forked_childs_table_says_no() -> None:
    from torch_pruner.codegen.build import team

    before, forked = list(team._table), team._forked
    try:
        team.forked()
        team.share(team.OpenMP(1, 1, 1, 1, 1), 1, 2)
        assert team._table[-1] == 0
        assert not team.is_shared(2)
    finally:
        team._table[:], team._forked = before, forked


@pytest.mark.parametrize(
    ("triple", "mcpu"),
    [("aarch64-linux-gnu", "neoverse-n1"), ("x86_64-linux-gnu", "haswell"),
     ("riscv64-linux-gnu", "generic-rv64")],
)  # fmt: skip
def test_code_for_other_processors(tmp_path, triple: str, mcpu: str) -> None:
    from torch_pruner.codegen.build.launch import write_launch
    from torch_pruner.target import TargetSpec

    target = TargetSpec.from_dict({"kind": "llvm", "mtriple": triple, "mcpu": mcpu}, 2)
    write_launch(target, tmp_path / "launch.o")
    assert (tmp_path / "launch.o").read_bytes()[:4] == b"\x7fELF"


def test_threads_are_shared_once_a_library_has_joined(monkeypatch) -> None:
    """Kernels in memory, where there is no C compiler to link them, stay on TVM's pool."""
    from torch_pruner.codegen.build import team

    before, joined = list(team._table), []
    monkeypatch.setattr(team, "_forked", False)
    monkeypatch.setattr(team, "_joined", False)
    try:
        team.share(team.OpenMP(1, 1, 1, 1, 1), 1, 2)
        assert not team.is_shared(2)
        team.join(joined.append)
        assert team.is_shared(2)
        assert not team.is_shared(3)
        assert len(joined) == 1
    finally:
        team._table[:] = before
