"""Runs kernels of every family for processors that this one is not, under emulation.

    python -m tests.suites.emulated --out docs/emulation.md

Kernels are built to object files as for any graph, linked with a driver that stands in for TVM's
runtime (tests/emulation/driver.c), run by an emulator of the processor, and compared with the
reference. Needs qemu-user and the cross compilers of Debian's packages gcc-aarch64-linux-gnu and
gcc-riscv64-linux-gnu, and PyPI's bochscpu-python for what this processor lacks of x86; what is
missing is left out, and the page says so.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.emulation.cases import Kernel, kernels, names, searched
from tests.emulation.machines import MACHINES, THREADS, Machine
from tests.suites.isolated import Outcome, cell, command

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

POINTS = 6  # schedules of a kernel and a family, beside the draft
LIMIT_S = 600.0
NOT_FOR_IT = "not for it"


@dataclass(slots=True)
class Found:
    """What ran of a name. ``worst``: the largest difference, relative to the largest element.

    ``refused``: schedules that TVM did not compile, as a search would find out.
    """

    ran: int = 0
    refused: int = 0
    worst: float = 0.0
    wrong: list[str] = field(default_factory=list)


def check(name: str) -> Outcome:
    """All kernels of one name on one machine."""
    machine_name, _, case = name.partition("/")
    machine = MACHINES[machine_name]
    if problem := machine.problem():
        return Outcome(name, "left out", problem)
    found = Found()
    for kernel in kernels(case):
        run_kernel(machine, kernel, POINTS if case in searched() else 2, found)
    if found.wrong:
        return Outcome(name, "failed", f"{len(found.wrong)} of {found.ran}: {found.wrong[0]}"[:400])
    if not found.ran:
        return Outcome(name, "left out", NOT_FOR_IT)
    refused = f"; {found.refused} refused" if found.refused else ""
    return Outcome(name, "compiled", f"{found.ran}; {found.worst:.0e}{refused}")


def run_kernel(machine: Machine, kernel: Kernel, points: int, found: Found) -> None:
    """Schedules of a kernel, linked into one program and run one after another."""
    from torch_pruner.graph.reference import evaluate

    chosen = list(_schedules(machine, kernel, points))
    if not chosen:
        return
    with np.errstate(all="ignore"):
        expected = evaluate(kernel.spec, kernel.arrays)
    with tempfile.TemporaryDirectory() as folder:
        program, built = _build(machine, kernel, chosen, Path(folder), found)
        for entry, (candidate, signature) in enumerate(built):
            found.ran += 1
            try:
                outputs = _outputs(machine, program, entry, kernel, signature)
                found.worst = max(found.worst, difference(outputs, expected, kernel))
            except Exception as err:
                text = " ".join(str(err).split())
                found.wrong.append(f"{kernel.label} {candidate.sketch} {_said(candidate)}: {text}")


def _said(candidate: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in candidate.decisions)


def _schedules(machine: Machine, kernel: Kernel, points: int) -> Iterator[Any]:
    """The draft of each sketch, and random valid points."""
    from torch_pruner.families import sketches_for
    from torch_pruner.task import Candidate, Task

    rng = np.random.default_rng(0)
    for sketch in sketches_for(Task("kernel", kernel.spec, machine.spec(), THREADS)):
        if kernel.family not in ("", sketch.name):
            continue
        grid = np.stack([rng.choice(d, 4096) for d in sketch.domains], axis=1)
        grid = np.unique(grid[sketch.valid(grid)], axis=0)
        grid = grid[rng.permutation(len(grid))[:points]]
        for point in np.unique(np.concatenate([sketch.default()[None], grid]), axis=0):
            yield Candidate(sketch.name, tuple(sorted(sketch.named(point).items())))


def _build(
    machine: Machine, kernel: Kernel, chosen: Sequence[Any], folder: Path, found: Found
) -> tuple[Path, list[tuple[Any, Any]]]:
    """A program with an entry for each schedule, as ``compiler/building`` has them built."""
    from torch_pruner import families
    from torch_pruner.codegen.build.objects import write_entries, write_kernel
    from torch_pruner.exc import CompileError
    from torch_pruner.graph.memory import KernelCall, Place
    from torch_pruner.task import Scheduled

    target = machine.spec()
    parts, programs, objects, built = {}, {}, [], []
    slots = 0
    for k, candidate in enumerate(chosen):
        path, name = folder / f"{k}.o", f"k{k}"
        try:
            scheduled = Scheduled(kernel.spec, candidate, past_caches=bool(k % 2))
            parts[name] = write_kernel(name, scheduled, target, path)
        except CompileError:
            found.refused += 1
            continue
        signature = families.named(candidate.sketch).signature(
            kernel.spec, dict(candidate.decisions)
        )
        count = len((*signature.inputs, *signature.outputs, *signature.scratch))
        programs[f"run{k}"] = [KernelCall(name, tuple(Place(i) for i in range(count)))]
        slots = max(slots, count)
        objects.append(path)
        built.append((candidate, signature))
    entries = folder / "entries.o"
    write_entries(parts, programs, slots, THREADS, None, target, entries)
    return machine.link([*objects, entries], list(programs), folder), built


def _outputs(
    machine: Machine, program: Path, entry: int, kernel: Kernel, signature: Any
) -> list[Any]:
    """The outputs of a call, after checking that no input was written that is not updated."""
    from torch_pruner.graph.reference import evaluate
    from torch_pruner.graph.updates import before_updates

    given = [
        np.ascontiguousarray(array if pack is None else pack.pack(array))
        for array, pack in zip(kernel.arrays, signature.packs, strict=True)
    ]
    inputs = len(given)
    if (before := before_updates(kernel.spec)) is not None:  # results lie where inputs do
        given += [np.ascontiguousarray(a) for a in evaluate(before, kernel.arrays)]
    buffers = [*signature.inputs, *signature.outputs, *signature.scratch]
    after = machine.run(program, entry, buffers, given)
    for array, was in zip(after[:inputs], given, strict=False):
        assert array.tobytes() == was.tobytes(), "an input was written"
    return after[inputs : inputs + len(signature.outputs)]


def difference(got: Sequence[Any], wanted: Sequence[Any], kernel: Kernel) -> float:
    """The largest difference, relative to the largest element where sums are made, else to each.

    Raises ``AssertionError`` for one that is too large.
    """
    from torch_pruner.graph.ops import BINARY, UNARY

    halves = any(n.dtype in ("float16", "bfloat16") for n in kernel.spec.nodes)
    alone = all(n.op in {*UNARY, *BINARY, "input"} for n in kernel.spec.nodes)
    bound, worst = 2e-2 if halves else 1e-4, 0.0
    for a, b in zip(got, wanted, strict=True):
        if b.dtype.kind in "iub":
            np.testing.assert_array_equal(a, b)
            continue
        x, y = a.astype(np.float64), b.astype(np.float64)
        np.testing.assert_array_equal(np.isnan(x), np.isnan(y))
        finite = np.isfinite(y)
        with np.errstate(invalid="ignore"):
            off = np.where((x == y) | np.isnan(x), 0.0, np.abs(x - y))
        largest = np.abs(y[finite]).max(initial=1e-30)
        scale = np.where(finite, np.maximum(np.abs(y), 1e-30) if alone else largest, 1.0)
        worst = max(worst, float((off / scale).max(initial=0.0)))
        wrong = off > bound * (scale if alone else np.maximum(scale, 1.0))
        if wrong.any():
            at = int(np.argmax(wrong * off / scale))
            told = f"off by {(off / scale).flat[at]:.1e} at {at}"
            raise AssertionError(f"{told}: {x.flat[at]:g}, not {y.flat[at]:g}")
    return worst


def table(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The Markdown page."""
    by_name = {o.name: o for o in outcomes}
    machines = [m for m in MACHINES if any(n.startswith(f"{m}/") for n in by_name)]
    yield "# Kernels for other processors"
    yield ""
    yield (
        "Written by `python -m tests.suites.emulated`, which says how they are run. In each cell:"
        " how many schedules ran, drafts among them, and the largest difference from the reference,"
        " relative to the largest element (for single operators to each element, where numbers"
        " below 1e-30 count as that), and how many TVM refused to compile, as a search finds out by"
        f" itself. {NOT_FOR_IT.capitalize()}: the family has no kernels for that processor."
        " An empty cell: not run."
    )
    yield ""
    yield "| | " + " | ".join(machines) + " |"
    yield "| --- |" + " ---: |" * len(machines)
    for case in names():
        if not any(f"{m}/{case}" in by_name for m in machines):
            continue
        cells = []
        for machine in machines:
            outcome = by_name.get(f"{machine}/{case}")
            cells.append("" if outcome is None else _cell(outcome))
        yield f"| {case} | " + " | ".join(cells) + " |"
    if wrong := [o for o in outcomes if o.status == "failed"]:
        yield ""
        yield from (f"* {o.name}: {cell(o.reason)}" for o in wrong)


def _cell(outcome: Outcome) -> str:
    return "**fails**" if outcome.status == "failed" else cell(outcome.reason)


def every_name() -> list[str]:
    """Machines and what runs on them."""
    return [f"{machine}/{case}" for machine in MACHINES for case in names()]


def main(arguments: list[str] | None = None) -> int:
    name = "tests.suites.emulated"
    return command(name, __doc__, every_name, check, table, arguments, limit_s=LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
