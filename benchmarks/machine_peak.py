"""What the machine can do at most: multiply-adds per second from registers, bytes read per second.

Both loops come from this project's code generator and run on its thread pool, so they are what a
kernel could reach; they are measured in the run whose figures they judge.

    python -m benchmarks.machine_peak [--threads N]
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import tables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.target import TargetSpec

ACCUMULATORS = 12
"""Two FMA units of four to five cycles want ten; with two operands they fit 16 registers."""

FMA_STEPS = 200_000
"""Trips of the loop: a millisecond or two in all."""

STREAMS = 8
"""Accumulators of the reading loop, so that additions do not hold up the loads."""

CACHES = 2.0
LEAST_READ_BYTES, MOST_READ_BYTES = 256 << 20, 1 << 30
"""By default this many times the last cache is read, within these bounds."""

REPEATS = 9


def fma_loop(threads: int) -> tuple[Callable[[], None], float]:
    """A call that multiplies and adds float32 in registers, and how many FLOPs it does."""
    from torch_pruner.codegen.tir.builders import UNROLLED, VECTORIZED, buffer, loop, seq, stack
    from torch_pruner.codegen.tir.values import store

    target = _target(threads)
    lanes = target.lanes("float32")
    tile = ACCUMULATORS * lanes
    seeds, factors = buffer(tile, "float32", "seeds"), buffer(2 * lanes, "float32", "factors")
    out = buffer(threads * tile, "float32", "out")
    acc = buffer(tile, "float32", "acc", scope="local")

    def each(body: Callable[[Any, Any], Any]) -> Any:
        def row(i: Any) -> Any:
            return loop(lanes, lambda v: body(i * lanes + v, v), VECTORIZED, "v")

        return loop(ACCUMULATORS, row, UNROLLED, "i")

    def multiply_add(at: Any, v: Any) -> Any:
        return store(acc, at, acc[at] * factors[v] + factors[lanes + v])

    def task(p: Any) -> Any:
        # The seeds differ: LLVM would make one accumulator of all that start alike.
        return seq(
            [
                stack(acc),
                each(lambda at, _: store(acc, at, seeds[at])),
                loop(FMA_STEPS, lambda _: each(multiply_add), name="k"),
                each(lambda at, _: store(out, p * tile + at, acc[at])),
            ]
        )

    arrays = [
        np.linspace(0.0, 1.0, tile, dtype=np.float32),
        np.repeat(np.float32([0.999, 0.001]), lanes),
        np.zeros(threads * tile, np.float32),
    ]
    call = _built(task, threads, ([seeds, factors], [out]), arrays, target)
    return call, 2.0 * threads * tile * FMA_STEPS


def read_loop(threads: int, nbytes: int) -> tuple[Callable[[], None], float]:
    """A call that adds up ``nbytes`` of float32, each thread a part, and the bytes it reads."""
    from torch_pruner.codegen.tir.builders import UNROLLED, VECTORIZED, T, buffer, loop, seq, stack
    from torch_pruner.codegen.tir.values import store

    target = _target(threads)
    lanes = target.lanes("float32")
    tile = STREAMS * lanes
    steps = max(1, nbytes // (4 * tile * threads))
    memory = buffer(threads * steps * tile, "float32", "memory")
    out = buffer(threads * tile, "float32", "out")
    acc = buffer(tile, "float32", "acc", scope="local")

    def each(body: Callable[[Any], Any]) -> Any:
        def row(i: Any) -> Any:
            return loop(lanes, lambda v: body(i * lanes + v), VECTORIZED, "v")

        return loop(STREAMS, row, UNROLLED, "i")

    def task(p: Any) -> Any:
        def add(k: Any) -> Any:
            return each(lambda at: store(acc, at, acc[at] + memory[(p * steps + k) * tile + at]))

        return seq(
            [
                stack(acc),
                each(lambda at: store(acc, at, T.const(0, "float32"))),
                loop(steps, add, name="k"),
                each(lambda at: store(out, p * tile + at, acc[at])),
            ]
        )

    arrays = [
        np.ones(threads * steps * tile, np.float32),
        np.zeros(threads * tile, np.float32),
    ]
    call = _built(task, threads, ([memory], [out]), arrays, target)
    return call, 4.0 * threads * steps * tile


def _target(threads: int) -> TargetSpec:
    from torch_pruner.target import TargetSpec

    return TargetSpec.detect(threads)


def _built(
    task: Callable[[Any], Any],
    threads: int,
    buffers: tuple[list[Any], list[Any]],
    arrays: Sequence[np.ndarray[Any, Any]],
    target: TargetSpec,
) -> Callable[[], None]:
    """One task per thread as a kernel, compiled and bound to copies of ``arrays``."""
    from torch_pruner.codegen.build.load import set_threads
    from torch_pruner.codegen.build.lower import aligned, compile_kernel
    from torch_pruner.codegen.parts.kernel import ScheduledKernel
    from torch_pruner.codegen.tir.builders import PARALLEL, SERIAL, T, loop
    from torch_pruner.graph.signature import BufferSpec

    set_threads(threads)
    inputs, outputs = buffers
    body = loop(threads, task, PARALLEL if threads > 1 else SERIAL, "p")
    func = T.PrimFunc([*inputs, *outputs], body).with_attr(
        {"global_symbol": "kernel", "tirx.noalias": True}
    )
    specs = [BufferSpec(tuple(a.shape), "float32") for a in arrays]
    kernel = ScheduledKernel(
        func, tuple(specs[: len(inputs)]), tuple(specs[len(inputs) :]), (), (None,) * len(inputs)
    )
    memory = [aligned(a.shape, "float32") for a in arrays]
    for place, values in zip(memory, arrays, strict=True):
        place[...] = values
    return compile_kernel(kernel, target).bind(memory)


def samples(
    call: Callable[[], None],
    amount: float,
    *,
    repeats: int = REPEATS,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Amount per second of each of ``repeats`` calls, after two that wake threads and caches."""
    call()
    call()
    rates = []
    for _ in range(repeats):
        start = clock()
        call()
        rates.append(amount / (clock() - start))
    return rates


def read_bytes() -> int:
    """How much memory to read so that no cache holds it."""
    from torch_pruner.target import CpuProbe

    wanted = int(CACHES * CpuProbe.read().l3_bytes)
    return min(max(wanted, LEAST_READ_BYTES), MOST_READ_BYTES)


def measure(threads: int) -> dict[str, Any]:
    """The best of some repeats by number of threads: a neighbour on the machine only takes away.

    ``flops_per_s`` for one to ``threads`` threads, ``bytes_per_s`` for one and ``threads``.
    """
    from torch_pruner.codegen.build.load import set_threads

    set_threads(threads)  # a pool never grows beyond what it was made with
    flops = {str(n): max(samples(*fma_loop(n))) for n in range(1, threads + 1)}
    size = read_bytes()
    counts = sorted({1, threads})
    reads = {str(n): max(samples(*read_loop(n, size), repeats=3)) for n in counts}
    return {"flops_per_s": flops, "bytes_per_s": reads, "bytes_read": size}


def describe(of: dict[str, Any]) -> str:
    """A table of what ``measure`` found."""
    lines = [
        [
            count,
            f"{rate / 1e9:.1f}",
            f"{of['bytes_per_s'][count] / 1e9:.1f}" if count in of["bytes_per_s"] else "",
        ]
        for count, rate in of["flops_per_s"].items()
    ]
    return tables.plain(["threads", "float32 FMA peak, GFLOP/s", "streaming read, GB/s"], lines)


def main(arguments: list[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.machine_peak", description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    print(describe(measure(parser.parse_args(arguments).threads)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
