"""How close products of few rows come to the memory: decoding reads every weight once.

    python -m benchmarks.few_rows [--rows 1,4] [--dtypes float32,int8] [--shapes llama] [--points 8]

Each kernel runs over many copies of its weights, one launch for some of them as in a network, so
that weights come from memory. A streaming read of as many bytes takes its turns with it, and a loop
that multiplies and adds in registers: the first share is of the read, the one in brackets of
whichever of the two the kernel needs longer for. The first schedule is the choice without tuning;
with ``--families`` that of each family follows, with ``--points`` the fastest of so many others.
"""

from __future__ import annotations

import argparse
import ctypes
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import machine_peak, tables, timing
from benchmarks.arguments import write_json

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch_pruner.codegen.parts.kernel import ScheduledKernel
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.packing import PackLayout
    from torch_pruner.task import Candidate, Task

SHAPES = {  # columns and depth of the layers of a decoder
    "llama": [(768, 768), (3072, 768), (768, 3072), (32000, 768)],
    "tinyllama": [(2048, 2048), (5632, 2048), (2048, 5632)],
    "qwen": [(896, 896), (4864, 896), (896, 4864), (151936, 896)],
}
DTYPES = "float32,bfloat16,coded,float16,int8,int4"
COPIES_BYTES = 256 << 20
"""Weights of one kernel take this much: more than caches hold."""

CALLS = 24
"""Kernels of one launch at most."""


@dataclass(frozen=True, slots=True)
class Case:
    """A product: float32 rows by a weight of ``dtype``, along the reduction or across it."""

    rows: int
    columns: int
    depth: int
    dtype: str
    along: bool = True

    def graph(self) -> Graph:
        """int8 is scaled after the sum, as a rounded weight is; int4 has scales of groups of 64;
        what is coded is bfloat16 that twelve bits are enough for."""
        from torch_pruner.graph.ir import GraphBuilder

        b = GraphBuilder()
        x = b.input(0, (self.rows, self.depth), "float32")
        if self.dtype == "int4":
            words = b.input(1, (-(-self.depth // 8), self.columns), "int32", static=True)
            groups = (-(-self.depth // 64), self.columns)
            given = (x, words, b.input(2, groups, "bfloat16", static=True))
            attrs, shape = {"bits": 4, "group": 64}, (self.rows, self.columns)
            return b.finish([b.append("matmul_grouped", given, shape, "float32", **attrs)])
        shape = (self.columns, self.depth) if self.along else (self.depth, self.columns)
        coded = self.dtype == "coded"
        w = b.input(1, shape, "bfloat16" if coded else self.dtype, static=True, coded=coded)
        second = b.permute(w, (1, 0)) if self.along else w
        y = b.append("matmul", (x, second), (self.rows, self.columns), "float32")
        if self.dtype == "int8":
            scale = b.input(2, (self.columns,), "float32", static=True)
            y = b.pointwise("mul", y, scale)
        return b.finish([y])


@dataclass(slots=True)
class Copies:
    """A kernel bound to many copies of its weights; calling it runs over all of them."""

    run: Callable[[], None]
    nbytes: int
    count: int = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """What kernels are measured by, in turns with them."""

    read: Copies
    peak: Callable[[], None]
    peak_flops: float

    @classmethod
    def of(cls, threads: int) -> Machine:
        read = Copies(*machine_peak.read_loop(threads, COPIES_BYTES))
        return cls(read, *machine_peak.fma_loop(threads))


class Weights:
    """Memory that the copies of all kernels share, with numbers of every dtype."""

    def __init__(self, nbytes: int) -> None:
        from torch_pruner.codegen.build.lower import aligned

        self._bytes, self._dtype = aligned((nbytes,), "int8"), ""
        self._packed: Any = None
        self._tile = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)

    def of(self, nbytes: int, dtype: str) -> list[Any]:
        """Places of as many operands as there is room for, at least one."""
        from torch_pruner.codegen.build.lower import aligned, numpy_dtype

        each = -(-nbytes // 64) * 64
        if each > self._bytes.nbytes:
            self._bytes, self._dtype = aligned((each,), "int8"), ""
        if dtype != self._dtype:
            tile = (self._tile * 50 if dtype == "int8" else self._tile).astype(numpy_dtype(dtype))
            whole = self._bytes[: self._bytes.nbytes // tile.nbytes * tile.nbytes].view(tile.dtype)
            whole.reshape(-1, tile.size)[...] = tile
            self._dtype = dtype
        return _places(self._bytes, each)

    def packed(self, pack: PackLayout, dtype: str) -> list[Any]:
        """The same of an operand that is more than its numbers, in memory of its own."""
        from torch_pruner.codegen.build.lower import aligned, numpy_dtype

        node = pack.view.nodes[pack.view.inputs[0]]
        numbers = np.resize(self._tile, node.numel).astype(numpy_dtype(dtype)).reshape(node.shape)
        packed = pack.pack(numbers).reshape(-1).view(np.int8)
        each = -(-packed.nbytes // 64) * 64
        if self._packed is None or each > self._packed.nbytes:
            self._packed = aligned((max(each, self._bytes.nbytes),), "int8")
        places = _places(self._packed, each)
        for place in places:
            place[: packed.nbytes] = packed
        return places


def _places(memory: Any, each: int) -> list[Any]:
    return [memory[i * each :] for i in range(memory.nbytes // each)]


def bound(case: Case, candidate: Candidate, weights: Weights, threads: int) -> Copies:
    """The kernel of a candidate over copies of the weight."""
    from torch_pruner import families
    from torch_pruner.codegen.build.lower import aligned, compile_module, program_module
    from torch_pruner.families.coded_rows import form as coded_rows
    from torch_pruner.graph.memory import KernelCall as Call
    from torch_pruner.graph.memory import Place
    from torch_pruner.graph.ops import ITEMSIZE
    from torch_pruner.target import TargetSpec

    target = TargetSpec.detect(threads)
    kernel = families.named(candidate.sketch).schedule(case.graph(), candidate, target)
    pack, given = kernel.packs[1], kernel.inputs[1]
    coded = pack is not None and pack.code > 0
    places = weights.packed(pack, given.dtype) if coded else weights.of(given.nbytes, given.dtype)
    calls = min(CALLS, len(places))
    others = [s for k, s in enumerate(_buffers(kernel)) if k != 1]
    shared = [aligned(s.shape, s.dtype) for s in others]
    for array in shared:
        array[...] = 1

    def arguments(call: int) -> tuple[Place, ...]:
        slots = [calls + k for k in range(len(shared))]
        return tuple(Place(s) for s in (slots[0], call, *slots[1:]))

    slots = calls + len(shared)
    program = {"main": [Call("kernel", arguments(i)) for i in range(calls)]}
    library = compile_module(program_module({"kernel": kernel}, program, slots), target)
    entry, launches = library["main"], []
    for first in range(0, len(places) - calls + 1, calls):
        arrays = [*places[first : first + calls], *shared]
        launches.append((ctypes.c_int64 * slots)(*(a.ctypes.data for a in arrays)))
    addresses = [ctypes.addressof(table) for table in launches]

    def run(_keep: object = (library, weights, shared, launches)) -> None:
        for address in addresses:
            entry(address)

    weight = case.graph().nodes[case.graph().inputs[1]]
    count = len(launches) * calls
    each = coded_rows.BYTES if coded else ITEMSIZE[weight.dtype]
    return Copies(run, int(count * weight.numel * each), count)


def _buffers(kernel: ScheduledKernel) -> list[Any]:
    return [*kernel.inputs, *kernel.outputs, *kernel.scratch]


def others(task: Task, count: int, seed: int = 0) -> list[Candidate]:
    """``count`` schedules of each family: half of them of the best predicted, half of any."""
    from torch_pruner.families import sketches_for
    from torch_pruner.task import Candidate

    rng, found = np.random.default_rng(seed), []
    for sketch in sketches_for(task):
        grid = np.stack(np.meshgrid(*sketch.domains, indexing="ij"), axis=-1)
        grid = grid.reshape(-1, len(sketch.names))
        grid = grid[rng.permutation(len(grid))[:20_000]]
        grid = grid[sketch.valid(grid)]
        seconds = sketch.symbols(grid).latency_s
        best = np.argsort(seconds, kind="stable")[: count // 2]
        near = np.flatnonzero(seconds < 2 * seconds.min())
        chosen = [*best, *rng.permutation(near)[: count - len(best)]]
        found += [
            Candidate(sketch.name, tuple(sketch.named(grid[i]).items()))
            for i in dict.fromkeys(chosen)
        ]
    return found


def measure(case: Case, options: argparse.Namespace, weights: Weights, machine: Machine) -> Any:
    """Seconds of the draft and of the fastest of other schedules, over those of the read."""
    from torch_pruner.compiler.drafting import draft
    from torch_pruner.families import sketches_for
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Candidate, Task

    task = Task("few rows", case.graph(), TargetSpec.detect(options.threads), options.threads)
    candidates = {"draft": draft(task)}
    for sketch in sketches_for(task) if options.families else []:
        point = sketch.named(sketch.default())
        candidates[sketch.name] = Candidate(sketch.name, tuple(sorted(point.items())))
    trials = []
    for candidate in others(task, options.points) if options.points else []:
        copies = bound(case, candidate, weights, options.threads)
        copies.run()
        once = timing.interleave({"kernel": copies.run}, warmup=1, rounds=2)["kernel"]
        trials.append((once.min_s, candidate))
    if trials:
        candidates["tuned"] = min(trials, key=lambda t: t[0])[1]
    built = {n: bound(case, c, weights, options.threads) for n, c in candidates.items()}
    beside = {"read": machine.read.run, "peak": machine.peak}
    times = timing.interleave({n: c.run for n, c in built.items()} | beside, rounds=options.rounds)
    rate = machine.read.nbytes / times["read"].median_s
    peak = machine.peak_flops / times["peak"].median_s

    def of(name: str) -> dict[str, Any]:
        size, seconds = built[name].nbytes, times[name].median_s
        flops = 2.0 * built[name].count * case.rows * case.columns * case.depth
        least = max(size / rate, flops / peak)
        return {
            "share": size / seconds / rate,
            "of_limit": least / seconds,
            "candidate": candidates[name].to_json(),
            "timing": times[name].to_json(),
        }

    return {
        "case": [case.rows, case.columns, case.depth, case.dtype, case.along],
        "read_bytes_per_s": rate,
        "peak_flops_per_s": peak,
        **{name: of(name) for name in candidates},
    }


def cases(options: argparse.Namespace) -> list[Case]:
    """Every shape with every number of rows and dtype."""
    names = options.shapes.split(",")
    return [
        Case(int(rows), columns, depth, dtype, options.along)
        for name in names
        for columns, depth in SHAPES.get(name) or [tuple(map(int, name.split("x")))]
        for dtype in options.dtypes.split(",")
        for rows in options.rows.split(",")
    ]


def line(result: dict[str, Any]) -> list[str]:
    """A row of the table."""
    rows, columns, depth, dtype, _ = result["case"]
    shown = [f"{rows}", f"{columns}x{depth}", dtype, f"{result['read_bytes_per_s'] / 1e9:.1f}"]
    for of in (of for of in result.values() if isinstance(of, dict)):
        decided = " ".join(f"{k}={v}" for k, v in sorted(of["candidate"]["decisions"].items()))
        shares = f"{100 * of['share']:.0f} ({100 * of['of_limit']:.0f}) %"
        shown += [shares, f"{of['candidate']['sketch']} {decided}"]
    return shown


def main(arguments: list[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.few_rows", description=__doc__)
    parser.add_argument("--rows", default="1,2,4,8,16")
    parser.add_argument("--shapes", default=",".join(SHAPES), help="names, or COLUMNSxDEPTH")
    parser.add_argument("--dtypes", default=DTYPES)
    parser.add_argument("--across", dest="along", action="store_false", help="as Conv1D has them")
    parser.add_argument("--points", type=int, default=0, help="other schedules of each family")
    parser.add_argument("--families", action="store_true", help="the draft of each family, too")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", help="write JSON there")
    options = parser.parse_args(arguments)
    from torch_pruner.codegen.build.load import set_threads

    set_threads(options.threads)
    weights = Weights(COPIES_BYTES)
    machine = Machine.of(options.threads)
    results = []
    for case in cases(options):
        results.append(measure(case, options, weights, machine))
        print("  ".join(line(results[-1])), flush=True)
    header = ["rows", "weight", "dtype", "GB/s", "draft", "schedule", "others", "schedule"]
    width = min(len(header), *(len(line(r)) for r in results))
    print(tables.plain(header[:width], [line(r)[:width] for r in results]))
    write_json(options.out, {"machine": timing.machine(), "results": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
