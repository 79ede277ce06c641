"""Stand-ins with known answers: an executor, a sketch, a builder whose candidates misbehave."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections import namedtuple
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from torch_pruner.exc import MeterError
from torch_pruner.families.space import Sketch
from torch_pruner.fingerprint import DeviceFingerprint
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.reference import evaluate
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate, MeasureInput, MeasureResult, MeasureStatus, Task
from torch_pruner.tuner.cost_model.base import CostModel
from torch_pruner.tuner.measure.base import EvaluatorSpec, MeasureExecutor
from torch_pruner.tuner.measure.builder import BuiltKernel
from torch_pruner.tuner.measure.meter import Meter
from torch_pruner.tuner.measure.worker_executor import UNUSABLE

Latency = Callable[[np.ndarray], np.ndarray]  # (n, d) decisions -> (n,) seconds


def linear_spec(rows: int = 8, depth: int = 16, columns: int = 8) -> Graph:
    """A small linear layer with relu: weight static."""
    b = GraphBuilder()
    x = b.input(0, (rows, depth), "float32")
    w = b.input(1, (depth, columns), "float32", static=True)
    out = b.matmul(x, w)
    return b.finish([b.pointwise("relu", out)])


def make_task(rows: int = 8, *, threads: int = 1, weight: int = 1) -> Task:
    return Task(f"linear{rows}", linear_spec(rows), TargetSpec.detect(), threads, weight)


@dataclass(frozen=True)
class FakeSymbols:
    latency_s: np.ndarray
    footprint: np.ndarray


class FakeSketch(Sketch):
    """Powers of two; the best is at ``optimum`` and the draft model sees it at ``believed``."""

    def __init__(
        self,
        name: str = "fake",
        sizes: Sequence[int] = (6, 6, 6, 4),
        optimum: Sequence[int] = (4, 1, 3, 2),
        believed: Sequence[int] = (3, 2, 3, 1),
        scale_s: float = 1e-4,
    ) -> None:
        self.name = name
        self.names = tuple(f"t{i}" for i in range(len(sizes)))
        self.decisions = namedtuple("FakeDecisions", self.names)  # noqa: PYI024  as many as asked
        self._domains = tuple(2 ** np.arange(s, dtype=np.int64) for s in sizes)
        self._optimum, self._believed, self._scale_s = optimum, believed, scale_s

    @property
    def domains(self) -> tuple[np.ndarray, ...]:
        return self._domains

    def valid(self, decisions: np.ndarray) -> np.ndarray:
        return np.log2(decisions).sum(axis=1) < sum(len(d) for d in self.domains) * 0.75

    def default(self) -> np.ndarray:
        return np.array([d[0] for d in self.domains], dtype=np.int64)

    def symbols(self, decisions: np.ndarray) -> FakeSymbols:
        return FakeSymbols(
            self._bowl(decisions, self._believed, 0.3), decisions.prod(axis=1).astype(np.float64)
        )

    def latency_s(self, decisions: np.ndarray) -> np.ndarray:
        """What measuring gives: a bowl, and a ripple that the draft model does not know."""
        steps = np.log2(decisions)
        ripple = 1 + 0.1 * np.sin(3.0 * steps.sum(axis=1))
        return self._bowl(decisions, self._optimum, 0.35) * ripple

    def _bowl(self, decisions: np.ndarray, centre: Sequence[int], slope: float) -> np.ndarray:
        away = np.abs(np.log2(decisions) - np.array(centre, dtype=np.float64)).sum(axis=1)
        return self._scale_s * np.exp(slope * away)

    def best_s(self) -> float:
        grid = np.stack(np.meshgrid(*self.domains, indexing="ij"), axis=-1).reshape(
            -1, len(self.names)
        )
        return float(self.latency_s(grid[self.valid(grid)]).min())

    def row(self, candidate: Candidate) -> np.ndarray:
        taken = dict(candidate.decisions)
        return np.array([[taken[n] for n in self.names]], dtype=np.int64)


def invented(sketches: Iterable[FakeSketch], candidate: Candidate) -> MeasureResult:
    """The result of measuring a candidate of one of ``sketches``."""
    sketch = next(s for s in sketches if s.name == candidate.sketch)
    seconds = float(sketch.latency_s(sketch.row(candidate))[0])
    return MeasureResult(candidate, MeasureStatus.OK, (seconds,))


class FakeExecutor(MeasureExecutor):
    """Measures by a function; remembers every batch."""

    def __init__(self, measure_one: Callable[[MeasureInput], MeasureResult]) -> None:
        self.evaluator = EvaluatorSpec()
        self.device = DeviceFingerprint.detect()
        self.batches: list[list[MeasureInput]] = []
        self.races: list[list[MeasureInput]] = []
        self.n_closed = 0
        self._measure_one = measure_one

    @property
    def n_measured(self) -> int:
        return sum(len(b) for b in self.batches)

    def measure(self, inputs: Sequence[MeasureInput]) -> list[MeasureResult]:
        self.batches.append(list(inputs))
        return [self._measure_one(i) for i in inputs]

    def race(self, inputs: Sequence[MeasureInput]) -> list[MeasureResult]:
        self.races.append(list(inputs))
        return [self._measure_one(i) for i in inputs]

    def close(self) -> None:
        self.n_closed += 1


class FakeMeter(Meter):
    """Twenty watts, whatever runs. Or from its second reading on it raises, stands still, or takes
    its process down."""

    name, period_s = "a fake", 0.0

    def __init__(self, argument: str = "steady") -> None:
        if argument == "absent":
            raise MeterError(self.name, "nobody has made one", "wait")
        self._argument, self._readings = argument, 0

    def joules(self) -> float:
        self._readings += 1
        if self._argument == "dies" and self._readings > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._argument == "raises" and self._readings > 1:
            raise MeterError(self.name, "it came unplugged")
        return 0.0 if self._argument == "still" else 20.0 * time.perf_counter()


class ConstantModel(CostModel):
    """Every candidate is worth the same."""

    def predict(self, task: Task, sketch: object, decisions: np.ndarray) -> np.ndarray:
        return np.zeros(len(decisions))


# What a candidate of FakeBuilder does, by its decision "mode".
GOOD, BUILD_RAISES, BUILD_HANGS, BUILD_CRASHES, RUN_RAISES, RUN_HANGS, RUN_CRASHES = range(7)
WRONG, JUNK, UNPRINTABLE, EXITS, DIES_LATER, CRASHES_LATER, HANGS_LATER = range(7, 14)
CANNOT_RUN = 14


class UnprintableError(Exception):
    def __str__(self) -> str:
        return "lone surrogate \ud800 and " + "x" * 100_000


class FakeBuilder:
    """A ``Builder`` without a compiler: the reference interpreter, or one of the misdeeds above."""

    def build(
        self, spec: Graph, target: TargetSpec, threads: int, candidate: Candidate
    ) -> BuiltKernel:
        mode = dict(candidate.decisions).get("mode", GOOD)
        n_inputs = len(spec.inputs)
        if mode == BUILD_RAISES:
            raise ValueError("this schedule cannot be")
        if mode == UNPRINTABLE:
            raise UnprintableError
        if mode == BUILD_HANGS:
            time.sleep(3600)
        if mode == BUILD_CRASHES:
            os.kill(os.getpid(), signal.SIGSEGV)
        if mode == JUNK:
            print("junk " * 10_000, flush=True)
            os.write(1, b"\x00\x00\x00\x05junk!")

        def bind(arrays: Sequence[np.ndarray]) -> Callable[[], None]:
            called = 0

            def call() -> None:
                nonlocal called
                called += 1
                if mode == CRASHES_LATER and called > 1:
                    os.kill(os.getpid(), signal.SIGSEGV)
                if mode == HANGS_LATER and called > 1:
                    time.sleep(3600)
                if mode == RUN_RAISES:
                    raise RuntimeError("device on fire")
                if mode == RUN_HANGS:
                    time.sleep(3600)
                if mode == RUN_CRASHES:
                    os.kill(os.getpid(), signal.SIGSEGV)
                if mode == EXITS:
                    os._exit(3)
                if mode == CANNOT_RUN:
                    sys.stderr.write("the device is somebody else's")
                    sys.stderr.flush()
                    os._exit(UNUSABLE)
                if mode == JUNK:
                    print("more junk", flush=True)
                for out, value in zip(
                    arrays[n_inputs:], evaluate(spec, arrays[:n_inputs]), strict=True
                ):
                    out[...] = value + 1 if mode == WRONG else value

            return call

        outputs = [(spec.nodes[i].shape, spec.nodes[i].dtype) for i in spec.outputs]
        return BuiltKernel(bind, [None] * n_inputs, outputs, [])

    def seconds(self, calls: Sequence[Callable[[], object]], number: int) -> float | None:
        return None

    def set_threads(self, threads: int) -> None:
        pass

    def renewal(self, target: TargetSpec, arrays: Sequence[np.ndarray]) -> None:
        return None


class BrokenBuilder:
    """A builder whose worker never starts."""

    def __init__(self) -> None:
        print("the compiler is not installed", file=sys.stderr)
        raise SystemExit(1)


def candidate(mode: int = GOOD, tag: int = 0) -> Candidate:
    return Candidate("fake", (("mode", mode), ("tag", tag)))


def regret(best_s: float, results: Sequence[MeasureResult]) -> float:
    """How much slower than the best the fastest of ``results`` is: 0 is the optimum."""
    return min((r.latency_s for r in results), default=math.inf) / best_s - 1.0
