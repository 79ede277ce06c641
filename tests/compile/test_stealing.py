"""Threads that are done take others' tasks: each is done once, by whoever is free."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.tvm
TASKS = 64
ASLEEP_US = 500_000
ROUNDS = 5


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Callable[[str], Callable[[torch.Tensor], torch.Tensor]]:
    """Entries of a linked library, each a function of an array of ``ROUNDS + 1`` rows of tasks.

    ``passed``: in round k task i writes into row k + 1 what the other end's task wrote into row k,
    plus one. ``stepped`` does that in steps of one part. ``asleep``: task 0 sleeps, and every task
    writes its thread into row 1. ``alone``: one thread adds up row 0 for all tasks of the next.
    """
    from torch_pruner.codegen.build.kernel_object import Division, function_name
    from torch_pruner.codegen.build.launch import write_launch
    from torch_pruner.codegen.build.link import link_objects
    from torch_pruner.codegen.build.load import load_entries, set_threads
    from torch_pruner.codegen.build.lower import object_code
    from torch_pruner.codegen.build.objects import write_entries
    from torch_pruner.codegen.tir.builders import GlobalVar, IRModule, S, T, pointer, seq, tvm, when
    from torch_pruner.codegen.tir.values import store
    from torch_pruner.graph.memory import STEALING_BYTES, KernelCall, Place
    from torch_pruner.target import TargetSpec

    folder, target, threads = tmp_path_factory.mktemp("stealing"), TargetSpec.detect(2), 2
    set_threads(threads, None)

    def function(
        name: str, part: int, body: Callable[..., list[S.Stmt]], numbers: int = 1
    ) -> tuple[GlobalVar, T.PrimFunc]:
        given = pointer("row_ptr", "int64")
        taken = [T.Var(f"number{k}", "int32") for k in range(numbers)]
        row = T.decl_buffer(((ROUNDS + 1) * TASKS,), "int64", "row", data=given)
        done = S.Return(T.const(0, "int32"))
        whole = seq([S.DeclBuffer(row, data=given), *body(row, *taken), done])
        made = T.PrimFunc([given, *taken], whole, ret_type=tvm.ir.PrimType("int32"))
        symbol = function_name(name, part)
        return GlobalVar(symbol), made.with_attr({"global_symbol": symbol, "calling_conv": 1})

    def passed(row: T.Buffer, task: T.Var) -> list[S.Stmt]:
        return stepped(row, task, T.const(0, "int32"))

    def stepped(row: T.Buffer, task: T.Var, step: T.Var) -> list[S.Stmt]:
        begin, other = step * TASKS, T.const(TASKS - 1, "int32") - task
        return [store(row, begin + TASKS + task, row[begin + other] + T.const(1, "int64"))]

    def added(row: T.Buffer) -> list[S.Stmt]:
        k, at = T.Var("k", "int32"), T.const(TASKS, "int32")
        sum_ = S.For(k, 0, TASKS, S.ForKind.SERIAL, store(row, at, row[at] + row[k]))
        return [store(row, at, T.const(0, "int64")), sum_]

    def copied(row: T.Buffer, task: T.Var) -> list[S.Stmt]:
        return [store(row, task + 2 * TASKS, row[T.const(TASKS, "int32")])]

    def asleep(row: T.Buffer, task: T.Var) -> list[S.Stmt]:
        slept = S.Evaluate(T.call_extern("int32", "usleep", T.const(ASLEEP_US, "int32")))
        late = when(T.EQ(task, T.const(0, "int32")), slept)
        return [late, store(row, task + TASKS, T.call_extern("int64", "pthread_self"))]

    bodies = [("passed", 0, passed), ("asleep", 0, asleep), ("alone", 1, copied)]
    functions = dict(function(*of) for of in bodies)
    functions |= [function("stepped", 0, stepped, 2), function("alone", 0, added, 0)]
    object_code(IRModule(functions), target, folder / "kernels.o")
    calls = {
        "passed": [KernelCall("passed", (Place(0, 8 * TASKS * k),)) for k in range(ROUNDS)],
        **{name: [KernelCall(name, (Place(0),))] for name in ("asleep", "stepped", "alone")},
    }
    tasks = Division(TASKS)
    parts = {"passed": [tasks], "asleep": [tasks], "stepped": [Division(TASKS, steps=ROUNDS)]}
    parts["alone"] = [Division(), tasks]
    lines = Place(1)
    write_entries(parts, calls, 2, threads, lines, target, folder / "entries.o")
    write_launch(target, folder / "launch.o")
    link_objects([folder / f"{n}.o" for n in ("kernels", "entries", "launch")], folder / "all.so")
    entries = dict(zip(calls, load_entries(folder / "all.so", [*calls]), strict=True))

    def entry(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def call(rows: torch.Tensor) -> torch.Tensor:
            words = torch.full(((threads + 1) * STEALING_BYTES // 8,), -1)  # what a workspace holds
            table = torch.tensor([rows.data_ptr(), words.data_ptr()])
            entries[name](table.data_ptr())
            return rows

        return call

    return entry


@pytest.mark.parametrize("entry", ["passed", "stepped"])
def test_every_task_is_done_once_and_after_the_round_before(library, entry: str) -> None:
    begin = torch.arange(TASKS)
    for _ in range(500):
        rows = library(entry)(torch.cat([begin, torch.full((ROUNDS * TASKS,), -9)]))
        for k, row in enumerate(rows.view(ROUNDS + 1, TASKS)):
            assert torch.equal(row, (begin if k % 2 == 0 else begin.flip(0)) + k)


def test_what_one_thread_does_is_a_task_of_whoever_is_first(library) -> None:
    for k in range(500):
        rows = torch.arange((ROUNDS + 1) * TASKS) + k
        expected = rows[:TASKS].sum()
        assert (library("alone")(rows)[2 * TASKS : 3 * TASKS] == expected).all()


def test_others_do_what_a_late_thread_has_not_begun(library) -> None:
    for _ in range(20):  # on a busy machine another thread may get no core in time
        rows = library("asleep")(torch.zeros(2 * TASKS, dtype=torch.int64))
        late, *others = rows[TASKS:].tolist()
        if set(others) - {late}:
            break
    assert set(others) - {late}, "another thread ran"
    assert others.count(late) < TASKS // 2 - 1, "half of the tasks are the late thread's share"


def test_calls_at_once_do_not_mix(library) -> None:
    wrong: list[int] = []

    def caller(number: int) -> None:
        begin = torch.arange(TASKS) + 1000 * number
        for _ in range(50):
            rows = library("passed")(torch.cat([begin, torch.zeros(ROUNDS * TASKS).long()]))
            end = rows[ROUNDS * TASKS :]
            if not torch.equal(end, (begin.flip(0) if ROUNDS % 2 else begin) + ROUNDS):
                wrong.append(number)

    callers = [threading.Thread(target=caller, args=(k,)) for k in range(4)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert not wrong


@pytest.mark.parametrize(
    "triple", ["aarch64-linux-gnu", "riscv64-unknown-linux-gnu", "x86_64-linux-gnu"]
)
def test_it_is_code_for_every_processor(triple: str, tmp_path) -> None:
    from torch_pruner.codegen.build.kernel_object import Division
    from torch_pruner.codegen.build.objects import write_entries
    from torch_pruner.graph.memory import KernelCall, Place
    from torch_pruner.target import TargetSpec

    target = TargetSpec.from_dict({"kind": "llvm", "mtriple": triple}, 4)
    calls = {"main": [KernelCall("k", (Place(0),))] * 2}
    path = tmp_path / "entries.o"
    write_entries({"k": [Division(9)]}, calls, 2, 4, Place(1), target, path)
    assert path.stat().st_size


def test_rounds_that_a_word_has_no_room_for_are_not_taken() -> None:
    from torch_pruner.codegen.build.stealing import MOST_ROUNDS, MOST_TASKS, Stealing
    from torch_pruner.codegen.tir.builders import T
    from torch_pruner.target import TargetSpec

    stealing = Stealing(T.decl_buffer((24,), "int64", "lines"), 2, TargetSpec.detect(2))
    assert stealing.takes(MOST_TASKS, MOST_ROUNDS)
    assert not stealing.takes(MOST_TASKS + 1)
    stealing.passed(3, MOST_ROUNDS - 4)
    assert stealing.takes(1, 4)
    assert not stealing.takes(1, 5), "rounds add up over a call"
