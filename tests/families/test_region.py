"""Programs of many kernels in one launch: order between threads, parts of one, odd kernels."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.emitting import schedule
from tests.families import kernels as K
from torch_pruner.codegen.build.load import set_threads
from torch_pruner.codegen.build.lower import aligned, compile_module, program_module
from torch_pruner.codegen.build.region import parts_of
from torch_pruner.codegen.parts.kernel import ScheduledKernel
from torch_pruner.codegen.tir.builders import PARALLEL, SERIAL, S, T, loop, seq, stepped
from torch_pruner.graph.ir import GraphBuilder
from torch_pruner.graph.memory import KernelCall, Place
from torch_pruner.graph.phases import Turn
from torch_pruner.graph.signature import BufferSpec
from torch_pruner.target import TargetSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.codegen.tir.builders import Stmt

pytestmark = pytest.mark.tvm

N = 4096


def reversing(tasks: int) -> ScheduledKernel:
    """``out[i] = in[N - 1 - i] + 1``: every thread reads what another one has written."""
    b = GraphBuilder()
    x = b.append("flip", (b.input(0, (N,), "float32"),), (N,), "float32", dims=(0,))
    spec = b.finish([b.pointwise("add", x, b.const(1.0, "float32"))])
    return schedule(spec, "elementwise", {"chunk": N // 16 // tasks, "par": tasks > 1, "vl": 16})


def made(body: Callable[..., Stmt]) -> ScheduledKernel:
    """A kernel of one buffer that it reads and writes."""
    spec = BufferSpec((N,), "float32")
    buf = T.decl_buffer((N,), "float32", "x")
    func = T.PrimFunc([buf], body(buf)).with_attr({"global_symbol": "kernel"})
    return ScheduledKernel(func, (), (spec,), (), ())


def increment(kind: object) -> Callable[..., Stmt]:
    def body(buf: object) -> Stmt:
        return loop(N, lambda i: S.BufferStore(buf, buf[i] + 1.0, [i]), kind, "p")

    return body


def program(
    kernels: dict[str, ScheduledKernel], calls: Sequence[KernelCall], arrays: Sequence[np.ndarray]
) -> Callable[[], None]:
    target = TargetSpec.detect(2)
    library = compile_module(program_module(kernels, {"main": calls}, len(arrays), 2), target)
    table = (ctypes.c_int64 * len(arrays))(*(a.ctypes.data for a in arrays))

    def run(_keep: object = library) -> None:
        library["main"](ctypes.addressof(table))

    return run


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_kernels_see_what_the_ones_before_wrote(threads: int) -> None:
    """Hundreds of kernels in a row, parallel and serial ones, on more threads than cores."""
    kernels = {"many": reversing(4), "one": reversing(1)}
    names = ["many", "many", "one", "one", "many"] * 40
    calls = [KernelCall(n, (Place(i % 2), Place((i + 1) % 2))) for i, n in enumerate(names)]
    arrays = [aligned((N,), "float32") for _ in range(2)]
    run = program(kernels, calls, arrays)
    set_threads(threads)
    try:
        for _ in range(20):
            arrays[0][...] = np.arange(N)
            run()
            np.testing.assert_array_equal(arrays[0], np.arange(N) + len(names))
    finally:
        set_threads(2)


@pytest.mark.parametrize("kinds", [(SERIAL,), (PARALLEL, SERIAL), (SERIAL, SERIAL, PARALLEL)])
def test_every_part_runs_once(kinds: tuple[object, ...]) -> None:
    """Kernels that change their input in place would show a part that two threads ran."""
    kernels = {f"k{i}": made(increment(kind)) for i, kind in enumerate(kinds)}
    (array,) = [aligned((N,), "float32")]
    array[...] = 0
    calls = [KernelCall(name, (Place(0),)) for name in kernels] * 3
    program(kernels, calls, [array])()
    assert (array == 3 * len(kinds)).all()


def test_a_kernel_is_divided_at_its_parallel_loops() -> None:
    both = made(lambda b: seq([increment(SERIAL)(b), increment(PARALLEL)(b)]))
    assert [(p.tasks, p.alone) for _, p in parts_of(both)] == [(None, False), (N, False)]
    ((_, plain),) = parts_of(made(increment(SERIAL)))
    assert (plain.tasks, plain.alone) == (None, False)


def test_a_kernel_with_a_parallel_loop_deeper_launches_by_itself() -> None:
    def nested(buf: object) -> Stmt:
        both = seq([increment(PARALLEL)(buf), increment(PARALLEL)(buf)])
        return S.For(T.Var("i", "int32"), 0, 1, SERIAL, both)

    odd = made(nested)
    assert [p.alone for _, p in parts_of(odd)] == [True]
    array = aligned((N,), "float32")
    array[...] = 0
    kernels = {"odd": odd, "plain": made(increment(PARALLEL))}
    program(kernels, [KernelCall(n, (Place(0),)) for n in ("plain", "odd", "plain")], [array])()
    assert (array == 4).all()


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_threads_meet_after_each_step(threads: int) -> None:
    """Each step reads what all tasks of the one before wrote, from the other end."""

    def body(buf: object) -> Stmt:
        half = N // 2

        def element(t: object, i: object) -> Stmt:
            odd = T.truncmod(t, T.const(2, "int32"))
            return S.BufferStore(
                buf, buf[odd * half + (half - 1 - i)] + 1.0, [(1 - odd) * half + i]
            )

        return stepped(41, lambda t: loop(half, lambda i: element(t, i), PARALLEL, "p"))

    kernel = made(body)
    assert [(p.tasks, p.steps) for _, p in parts_of(kernel)] == [(N // 2, 41)]
    array = aligned((N,), "float32")
    kernels = {"steps": kernel, "plain": made(increment(PARALLEL))}
    run = program(kernels, [KernelCall(n, (Place(0),)) for n in ("steps", "plain")], [array])
    set_threads(threads)
    try:
        for _ in range(20):
            array[...] = np.arange(N)
            run()
            np.testing.assert_array_equal(array[N // 2 :], np.arange(N // 2)[::-1] + 42)
    finally:
        set_threads(2)


def test_definitions_before_a_parallel_loop_stay_with_it() -> None:
    def body(buf: object) -> Stmt:
        step = T.Var("step", "float32")
        define = S.Bind(step, buf[0] * 0.0 + 1.0)
        fill = loop(N, lambda i: S.BufferStore(buf, buf[i] + step, [i]), PARALLEL, "p")
        return seq([define, fill])

    kernel = made(body)
    assert [p.alone for _, p in parts_of(kernel)] == [True]
    array = aligned((N,), "float32")
    array[...] = 0
    program({"k": kernel}, [KernelCall("k", (Place(0),))], [array])()
    assert (array == 1).all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("kind", [SERIAL, PARALLEL])
def test_the_first_and_the_last_part_may_be_repeated(threads: int, kind: object) -> None:
    """Doubled by a first part, which the second turns over; as the last part of one kernel, too."""
    size = N * 4

    def stage(tasks: int, number: int) -> Callable[..., Stmt]:
        def body(of: object, made: object) -> Stmt:
            def element(i: object) -> Stmt:
                at = N - 1 - i if number else i
                return S.BufferStore(made, of[at] * 2.0, [i])

            return loop(tasks, element, kind if tasks == N else PARALLEL, "p")

        return body

    def kernel() -> ScheduledKernel:
        given, scratch, out = (T.decl_buffer((N,), "float32", n) for n in ("x", "s", "y"))
        both = seq([stage(N, 0)(given, scratch), stage(N, 1)(scratch, out)])
        func = T.PrimFunc([given, out, scratch], both).with_attr({"global_symbol": "kernel"})
        spec = BufferSpec((N,), "float32")
        return ScheduledKernel(func, (spec,), (spec,), (spec,), (None,))

    arrays = [aligned((N,), "float32"), aligned((9 * N,), "float32")]
    one, two, three, four = (Place(1, k * 2 * size) for k in range(4))
    apart = [Place(p.slot, p.offset, size) for p in (one, two, three, four)]
    last = Place(1, 8 * size)
    calls = [  # the scratch of the first and the outputs of the second have copies
        KernelCall("k", (Place(0), two, apart[0]), Turn(0, prologue=True)),
        KernelCall("k", (two, apart[2], one), Turn(2, epilogue=True)),
        KernelCall("k", (apart[2], last, apart[3]), Turn(2, prologue=True)),
    ]
    run = program({"k": kernel()}, calls, arrays)
    set_threads(threads)
    try:
        for _ in range(5):
            arrays[0][...] = np.arange(N)
            arrays[1][...] = np.nan
            run()
            np.testing.assert_array_equal(arrays[1][8 * N :], 64 * np.arange(N)[::-1])
    finally:
        set_threads(2)


@pytest.mark.parametrize("pack", [0, 1])
def test_copies_before_a_kernel_are_parts_of_it(pack: int) -> None:
    """A padded input and a packed operand are made by all threads before the tiles read them."""
    spec = K.conv(24, 9, 24, 5, 1, 2)
    taken = {"vl": 16, "tm": 3, "nv": 1, "mc": 2, "order": 1, "ku": 1, "pack": 1, "par": 1}
    kernel = schedule(spec, "contraction", taken | {"ahead": pack, "kb": 1})
    assert len(parts_of(kernel)) == 2
    outputs, expected, _ = K.run(spec, "contraction", taken | {"ahead": pack, "kb": 1})
    assert K.error(outputs, expected) < 1e-5
