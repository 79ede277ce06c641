"""The child process of ``LocalExecutor``: builds candidates, checks them, times them.

Started as ``python -m torch_pruner.tuner.measure.worker --builder module:factory``, or with
``--relay module:factory --argument TEXT`` for something else that handles its messages. They come
on standard input and leave on what was standard output; both are moved to other descriptors first,
so nothing that a kernel or a compiler prints can corrupt the stream. Exits when its input ends,
ignores Ctrl-C (its parent decides), may be killed at any moment. Any exception of a candidate is a
reply.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import math
import os
import queue
import resource
import signal
import sys
import threading
import time
import traceback
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, BinaryIO

from torch_pruner import families
from torch_pruner.graph.ir import Graph
from torch_pruner.graph.reference import evaluate
from torch_pruner.graph.updates import before_updates
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureStatus
from torch_pruner.tuner.measure import check
from torch_pruner.tuner.measure.base import EvaluatorSpec
from torch_pruner.tuner.measure.lean import without_torch
from torch_pruner.tuner.measure.meter import Meter, MeterSource, joules_per_call
from torch_pruner.tuner.measure.priority import give_way_as_parent
from torch_pruner.tuner.measure.protocol import Message, encode, read_frame
from torch_pruner.tuner.measure.timing import (
    AtTwoSizes,
    Call,
    CallContext,
    Reading,
    Stopwatch,
    time_together,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_pruner.tuner.measure.builder import Array, Builder, BuiltKernel, Pack

    Reply = Callable[[Message], None]

DATA_BYTES = 1 << 30  # of task inputs and references kept at once
MAX_COPIES = 128
MAX_ERROR = 4000


@dataclass(slots=True)
class WorkerTask:
    """A task with the data its candidates run on."""

    spec: Graph
    target: TargetSpec
    threads: int
    inputs: list[Array]
    reference: Sequence[Array]
    # By input, layout, number of copies, and which candidate's of those that share a layout.
    arrays: dict[tuple[int, Pack | None, int, int], list[Array]] = field(default_factory=dict)
    rings: Counter[tuple[int, Pack | None]] = field(default_factory=Counter)
    spare: dict[int, list[Array]] = field(default_factory=dict)
    expected: dict[tuple[float, float], list[check.Expectation]] = field(default_factory=dict)
    readings: dict[int, Reading] = field(default_factory=dict)  # of a part of the results

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (*self.inputs, *self.reference))


class Worker:
    """Executes commands; knows nothing of pipes."""

    def __init__(self, builder: Builder, clock: Callable[[], float] = time.perf_counter) -> None:
        self.builder = builder
        self.clock = clock
        self.sources: dict[str, tuple[Graph, TargetSpec, int, int]] = {}
        self.data: OrderedDict[str, WorkerTask] = OrderedDict()
        self.built: dict[int, tuple[str, BuiltKernel]] = {}
        self.best: dict[str, tuple[float, float]] = {}  # see ``AtTwoSizes``, by task
        self._meters: dict[MeterSource, Meter] = {}

    def task(self, message: Message) -> Message:
        """Define a task; its inputs and reference outputs are made now, once."""
        name = str(message["task"])
        self.sources[name] = (
            Graph.from_json(message["spec"]),
            TargetSpec.from_json(message["target"]),
            int(message["threads"]),
            int(message["seed"]),
        )
        self._data(name)
        return {"ok": True}

    def _data(self, name: str) -> WorkerTask:
        if name in self.data:
            self.data.move_to_end(name)
            return self.data[name]
        spec, target, threads, seed = self.sources[name]
        inputs = check.random_inputs(spec, seed)
        reference = evaluate(spec, inputs)
        self.data[name] = WorkerTask(spec, target, threads, inputs, reference)
        while len(self.data) > 1 and sum(t.nbytes for t in self.data.values()) > DATA_BYTES:
            self.data.popitem(last=False)
        return self.data[name]

    def build(self, task: str, job: int, candidate: Candidate) -> Message:
        spec, target, threads, _ = self.sources[task]
        begin = self.clock()
        try:
            kernel = self.builder.build(spec, target, threads, candidate)
        except Exception as err:
            return failure(MeasureStatus.BUILD_ERROR, err)
        self.built[job] = (task, kernel)
        return {"ok": True, "seconds": self.clock() - begin}

    def time(
        self,
        jobs: Sequence[int],
        best_s: float,
        evaluator: EvaluatorSpec,
        reply: Reply,
        anchor: int | None = None,
    ) -> None:
        """Time jobs of one task in turns, once each was called and its result checked.

        The ``anchor`` is one of them, and gets all its repeats however slow it is.
        """
        name = self.built[jobs[0]][0]
        watches: dict[int, Stopwatch | AtTwoSizes] = {}
        for job in jobs:
            try:
                task = self._data(name)
                self.builder.set_threads(task.threads)
                patient = job == anchor
                spec = replace(evaluator, early_out=0.0) if patient else evaluator
                limit = math.inf if patient else best_s
                watch, error = self._first_call(task, self.built[job][1], spec, limit)
            except Exception as err:
                reply({"job": job, **failure(MeasureStatus.RUN_ERROR, err)})
                continue
            if error:
                status = MeasureStatus.WRONG_RESULT
                reply({"job": job, "ok": False, "status": status, "error": error})
            else:
                watches[job] = watch
                reply({"job": job, "ok": True, "ran": True})
        try:
            time_together(list(watches.values()))
        except Exception as err:
            for job in watches:
                reply({"job": job, **failure(MeasureStatus.RUN_ERROR, err)})
            return
        self._compare_sizes(name, [w for w in watches.values() if isinstance(w, AtTwoSizes)])
        for job, watch in watches.items():
            reply({"job": job, "ok": True, "run_secs": list(watch.run_secs)})

    def energy(self, job: int, source: MeterSource, evaluator: EvaluatorSpec) -> Message:
        """Joules of a call of a job that was timed, or why they are not known."""
        name, kernel = self.built[job]
        try:
            task = self._data(name)
            self.builder.set_threads(task.threads)
            calls, _ = self._calls(task, kernel, evaluator.flush_bytes)
            if source not in self._meters:
                self._meters[source] = source.open()
            used = joules_per_call(partial(self._run, calls), self._meters[source], self.clock)
        except Exception as err:
            return failure(MeasureStatus.RUN_ERROR, err)
        return {"ok": True, "joules": used}

    def _run(self, calls: Sequence[Call], number: int) -> None:
        """So many calls, taken in turn, over when this returns."""
        if self.builder.seconds(calls, number) is None:
            for call in islice(cycle(calls), number):
                call()

    def _compare_sizes(self, name: str, watches: Sequence[AtTwoSizes]) -> None:
        """All candidates of a task are compared with the best of the first that were timed."""
        if watches and name not in self.best:
            most, less = zip(*(w.seconds for w in watches), strict=True)
            self.best[name] = min(most), min(less)
        for watch in watches:
            watch.best = self.best[name]

    def _first_call(
        self, task: WorkerTask, kernel: BuiltKernel, evaluator: EvaluatorSpec, best_s: float
    ) -> tuple[Stopwatch | AtTwoSizes, str]:
        """A stopwatch for the kernel, and what is wrong with its first result."""
        calls, (rows, outputs, scratch) = self._calls(task, kernel, evaluator.flush_bytes)
        calls[0]()
        kernel.fetch(outputs)
        key = (evaluator.rtol, evaluator.atol)
        if key not in task.expected:
            task.expected[key] = check.expectations(task.spec, task.reference, evaluator)
        error = check.mismatch(task.expected[key], outputs)

        def watch(calls: Sequence[Call], part: int, best_s: float) -> Stopwatch:
            context = self._context(task, outputs, part) if evaluator.renew else None
            own = (_preemptions, context, self.builder.seconds)
            return Stopwatch(calls, evaluator, best_s, self.clock, *own)

        # Kernels of a GPU compute all of a value, however much counts.
        fewer = check.fewer(task.spec) if task.target.kind == "llvm" else {}
        if error or not fewer:
            return watch(calls, 1, best_s), error
        rows = [[fewer.get(i, a) for i, a in zip(task.spec.inputs, r, strict=True)] for r in rows]
        less = [kernel.bind([*row, *outputs, *scratch]) for row in rows]
        return AtTwoSizes(watch(calls, 1, best_s), watch(less, check.LESS, math.inf)), ""

    def _calls(
        self, task: WorkerTask, kernel: BuiltKernel, flush_bytes: int
    ) -> tuple[list[Call], tuple[list[list[Array]], list[Array], list[Array]]]:
        """The calls that are made in turn, and their inputs, outputs and scratch."""
        outputs = [check.aligned(*spec) for spec in kernel.outputs]
        if (before := before_updates(task.spec)) is not None:
            for output, value in zip(outputs, evaluate(before, task.inputs), strict=True):
                output[...] = value
        scratch = [check.aligned(*spec) for spec in kernel.scratch]
        rows = self._rows(task, kernel, flush_bytes)
        calls: list[Call] = [kernel.bind([*row, *outputs, *scratch]) for row in rows]
        return calls, (rows, outputs, scratch)

    def _context(self, task: WorkerTask, outputs: Sequence[Array], part: int) -> CallContext | None:
        """Writes the inputs that another kernel would have written and reads the results.

        All candidates share the inputs, and one figure for what reading takes. Of results the first
        of so many parts counts.
        """
        if part > 1:
            outputs = [a.reshape(-1)[: -(-a.size // part)] for a in outputs]
        dynamic = [i for i, n in enumerate(task.spec.inputs) if not _static(task.spec, n)]
        arrays = [a for i in dynamic for a in task.arrays.get((i, None, 1, 0), ())]
        before = self.builder.renewal(task.target, arrays)
        after = self.builder.renewal(task.target, outputs)
        if before is None or after is None:
            return None
        return CallContext(before, after, task.readings.setdefault(part, Reading()))

    def _rows(self, task: WorkerTask, kernel: BuiltKernel, flush: int) -> list[list[Array]]:
        """The inputs of each of the calls that are timed in turn.

        Each candidate has copies of weights of its own. Where several had one layout's, the caches
        would hold for one what another has read: schedules whose layout more of the others want
        seemed up to a third faster.
        """
        static = [_static(task.spec, i) for i in task.spec.inputs]
        weights = sum(a.nbytes for a, s in zip(task.inputs, static, strict=True) if s)
        copies = min(MAX_COPIES, max(1, math.ceil(flush / weights))) if weights else 1
        columns = []
        for i, (value, pack) in enumerate(zip(task.inputs, kernel.packs, strict=True)):
            own = copies if static[i] else 1
            ring = task.rings[i, pack] if own > 1 else 0
            task.rings[i, pack] += 1
            key = (i, pack, own, ring)
            if key not in task.arrays:
                known = task.arrays.get((i, pack, own, 0))
                packed = known[0] if known else value if pack is None else pack.pack(value)
                task.arrays[key] = check.aligned_copies(packed, own, task.spare.setdefault(i, []))
            arrays = task.arrays[key]
            columns.append(arrays if own == copies else arrays * copies)
        return [[column[k] for column in columns] for k in range(copies)]

    def _tidy(self, name: str) -> None:
        """Keep the memory of a group's layouts for the next group: fresh pages cost."""
        task = self._data(name)
        task.spare = {}
        for (i, pack, _, _), arrays in task.arrays.items():
            if pack is not None:
                task.spare.setdefault(i, []).extend(arrays)
        task.arrays = {k: v for k, v in task.arrays.items() if k[1] is None}
        task.rings.clear()

    def handle(self, message: Message, reply: Reply) -> None:
        """Execute one command and send its replies."""
        command = message["cmd"]
        if command == "task":
            try:
                answer = self.task(message)
            except Exception as err:
                answer = failure(MeasureStatus.RUN_ERROR, err)
            reply({"task": message["task"], **answer})
        elif command == "build":
            for job in message["jobs"]:
                candidate = Candidate.from_json(job["candidate"])
                reply({"job": job["job"], **self.build(message["task"], job["job"], candidate)})
        elif command == "time":
            evaluator = EvaluatorSpec.from_json(message["evaluator"])
            best_s, anchor = message["best_s"] or math.inf, message.get("anchor")
            self.time(message["jobs"], best_s, evaluator, reply, anchor)
            self._tidy(self.built[message["jobs"][0]][0])
        elif command == "energy":
            evaluator, source = message["evaluator"], MeterSource(**message["meter"])
            answer = self.energy(message["job"], source, EvaluatorSpec.from_json(evaluator))
            reply({"job": message["job"], **answer})
            self._tidy(self.built[message["job"]][0])
        elif command == "drop":
            for number in message["jobs"]:
                self.built.pop(number, None)
        else:
            raise ValueError(f"unknown command {command!r}")


def _static(spec: Graph, node: int) -> bool:
    return bool(spec.nodes[node].attr("static"))


def _preemptions() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def failure(status: MeasureStatus, error: Exception) -> Message:
    """The answer for a job that failed."""
    text = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
    return {"ok": False, "status": status, "error": text[-MAX_ERROR:]}


def _read(stream: BinaryIO, messages: queue.SimpleQueue[Message]) -> None:
    """Feed the queue; end the process, whatever it is busy with, when the parent is gone."""
    try:
        while (message := read_frame(stream)) is not None:
            messages.put(message)
    finally:
        os._exit(0)


def main(argv: Sequence[str] | None = None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    give_way_as_parent()
    commands = os.fdopen(os.dup(0), "rb")
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    parser = argparse.ArgumentParser()
    parser.add_argument("--builder")
    parser.add_argument("--relay")
    parser.add_argument("--argument", default="")
    messages: queue.SimpleQueue[Message] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(commands, messages), daemon=True).start()

    def reply(message: Message) -> None:
        replies.write(encode(message))
        replies.flush()

    options = parser.parse_args(argv)
    module, _, factory = (options.relay or options.builder).partition(":")
    ours = module.startswith("torch_pruner.")
    with without_torch() if ours else contextlib.nullcontext():  # others may need it
        make = getattr(importlib.import_module(module), factory)
    worker = make(options.argument) if options.relay else Worker(make())
    reply({"hello": os.getpid(), **getattr(worker, "hello", {})})
    while True:
        message = messages.get()
        if message["cmd"] == "families":  # of the parent alone: a device of a fleet imports nothing
            use_families(message["families"])
        else:
            worker.handle(message, reply)


def use_families(given: Sequence[Mapping[str, str]]) -> None:
    """Use the parent's families; candidates of what cannot be imported fail to build."""
    try:
        families.use_sources(given)
    except Exception:
        traceback.print_exc()


if __name__ == "__main__":
    main()
