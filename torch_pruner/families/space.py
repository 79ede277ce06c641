"""The sketch seam: schedules of one task as integers, with a closed-form estimate of each."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple

import numpy as np
import numpy.typing as npt
from typing_extensions import TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch_pruner.families.flow import FlowStep
    from torch_pruner.task import Task

Decisions = npt.NDArray[np.int64]
Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

# Columns of a family's decisions. ``Sketch`` alone stands for any of them.
C = TypeVar("C", default=Any)

_ROUNDS = 12  # of the search for a default; it ends in fewer
_KEPT = 32  # moves of so many spaces, tens of kilobytes each: tasks of a network share them
_SWITCH, _WORTH = 3, 1.5  # values of a switch; how much slower a start may be than the best


@dataclass(frozen=True, slots=True)
class Symbols:
    """The symbols of Pruner (ASPLOS 2025, section 4.1) read for the CPU, one value per point.

    Level 0 is the register file, level 1 a core with its caches, level 2 the chip with its memory.
    ``latency_s`` is the draft model's estimate in seconds, built from the symbols and the target's
    constants.

    Example:
        points = sketch.default()[None]
        print(sketch.symbols(points).s5_traffic_bytes, sketch.symbols(points).latency_s)
    """

    s1_registers: Array  # L0MemAlloc: vector registers a tile needs
    s2_tile_ops: Array  # L0CompCount: vector operations of one tile
    s3_cache_bytes: Array  # L1MemAlloc: bytes a tile keeps re-reading
    s4_tasks: Array  # L1ParaInfo: parallel tasks
    s5_traffic_bytes: Array  # L2MemFootprint: bytes moved below the level-1 cache
    s6_rounds: Array  # L2ParaInfo: tasks that the busiest core gets
    s7_contiguous_bytes: Array  # L2TransDim: length of one contiguous read
    s8_ops: Array  # L2CompCount: floating-point operations, padding included
    latency_s: Array


class Sketch(ABC, Generic[C]):
    """A schedule template of one task with open decisions.

    Contract: ``domains[j]`` holds the options of decision ``names[j]``; a point is a row of values,
    one per decision. ``valid`` and ``symbols`` are vectorised, build nothing and agree on the order
    of rows; ``default`` is valid. ``Family.emit`` writes down every valid point.

    ``C`` is ``decisions`` with a column per field: ``class Own(Sketch[OwnDecisions[Array]])``.

    Example:
        for sketch in sketches_for(task):
            point = sketch.default()
            seconds = sketch.symbols(point[None]).latency_s[0]
            print(sketch.name, sketch.named(point), seconds)
    """

    name: ClassVar[str]
    decisions: ClassVar[Any]
    """The ``NamedTuple`` of the decisions, the same as that of the family."""
    names: ClassVar[tuple[str, ...]]
    """The names of the decisions in order. Derived from ``decisions``."""
    version: ClassVar[int] = 1
    packs: ClassVar[bool] = True
    """Whether kernels may want packed copies of constant operands. Of kernels that are as fast as
    each other, tuning takes one that wants none."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if (own := vars(cls).get("decisions")) is not None:
            cls.names = own._fields

    def __init__(self, task: Task) -> None:
        self.task = task

    @property
    @abstractmethod
    def domains(self) -> tuple[Decisions, ...]: ...

    @abstractmethod
    def symbols(self, decisions: Decisions) -> Symbols: ...

    @staticmethod
    def fits(task: Task) -> bool:
        """Whether the sketch is for ``task``. Default: it is."""
        return True

    def valid(self, decisions: Decisions) -> Mask:
        """Which rows can be emitted. Default: all."""
        return np.ones(len(decisions), dtype=bool)

    def flow(self, decisions: Decisions) -> Sequence[FlowStep] | None:
        """The data flow of the points, for learned models. Default: derived from the symbols."""
        return None

    @abstractmethod
    def default(self) -> Decisions:
        """One valid point (d,), sensible without any measurement."""

    def named(self, point: Decisions) -> Mapping[str, int]:
        return dict(zip(self.names, (int(v) for v in point), strict=True))

    def columns(self, decisions: Decisions) -> C:
        """The decisions of all points, each a float column."""
        columns: C = self.decisions(*decisions.astype(np.float64).T)
        return columns

    def best_predicted(self, limit: int = 4096) -> Decisions:
        """The valid point of least predicted latency that a short search finds.

        It begins at the best of (at most ``limit``, spread) points, and at the best of those with
        each other value of a decision that has few; from each it goes on to better ones that
        differ in up to two decisions. What packing an operand allows, say, is a wider tile with
        fewer rows: three decisions at once, which no step of two comes to.
        """
        count = math.prod(len(d) for d in self.domains)
        points = _spread(self.domains, min(count, limit))
        points = points[self.valid(points)]
        seconds = self.symbols(points).latency_s
        if count <= limit:
            least: Decisions = points[np.argmin(seconds)]
            return least
        starts = self._starts(points, seconds)
        return self._descend([(points[at], float(seconds[at])) for at in starts])

    def _starts(self, points: Decisions, seconds: Array) -> list[int]:
        """Where to begin: the best point, and the best of each other value of a switch."""
        starts = [int(np.argmin(seconds))]
        best = points[starts[0]]
        for k, domain in enumerate(self.domains):
            for value in domain if len(domain) <= _SWITCH else ():
                if value != best[k] and (points[:, k] == value).any():
                    at = int(np.argmin(np.where(points[:, k] == value, seconds, np.inf)))
                    if seconds[at] < _WORTH * seconds[starts[0]] and at not in starts:
                        starts.append(at)
        return starts

    def _descend(self, ways: list[tuple[Decisions, float]]) -> Decisions:
        """The best of where ways end that go from these points, with their seconds, to better ones.

        Each step is to the best point a move away. All ways take theirs at once: it is the number
        of arrays that costs time, not their lengths. Ways that meet go on as one.
        """
        moves, passed = _pairs(tuple(tuple(d.tolist()) for d in self.domains)), set[bytes]()
        ends: list[tuple[Decisions, float]] = []
        for _ in range(_ROUNDS):
            ways = list(
                {key: way for way in ways if (key := way[0].tobytes()) not in passed}.values()
            )
            passed.update(point.tobytes() for point, _ in ways)
            if not ways:
                break
            steps = self._least_of([moves.of(point) for point, _ in ways])
            pairs = list(zip(ways, steps, strict=True))
            ends += [way for way, step in pairs if step[1] >= way[1]]
            ways = [step for way, step in pairs if step[1] < way[1]]
        return min([*ends, *ways], key=lambda end: end[1])[0]

    def best_within(
        self, allowed: Callable[[Decisions], Mask], limit: int = 4096
    ) -> Decisions | None:
        """The best of (at most ``limit``, spread) valid points that are ``allowed``, if any is.

        ``allowed`` gets points as rows, as ``valid`` does, and says which.
        """
        grid = _product(self.domains)
        grid = grid[allowed(grid) & self.valid(grid)]
        if not len(grid):
            return None
        spread = np.linspace(0, len(grid) - 1, min(limit, len(grid))).astype(int)
        return self._least(grid[spread])[0]

    def _least(self, points: Decisions) -> tuple[Decisions, float]:
        """The valid point of least predicted latency, and that latency in seconds."""
        return self._least_of([points])[0]

    def _least_of(self, groups: Sequence[Decisions]) -> list[tuple[Decisions, float]]:
        """What ``_least`` says of each group."""
        points = np.concatenate(groups)
        good = self.valid(points)
        seconds = self.symbols(points[good]).latency_s
        stops = np.cumsum([0, *(len(g) for g in groups)])
        counts = np.concatenate([[0], np.cumsum(good)])[stops]
        points = points[good]
        found = []
        for begin, end in itertools.pairwise(counts):
            at = int(begin + np.argmin(seconds[begin:end]))
            found.append((points[at], float(seconds[at])))
        return found


def _spread(domains: Sequence[Decisions], count: int) -> Decisions:
    """So many of all combinations of the options, evenly spread, as rows."""
    lengths = tuple(len(d) for d in domains)
    at = np.linspace(0, math.prod(lengths) - 1, count).astype(np.int64)
    return np.stack(
        [d[i] for d, i in zip(domains, np.unravel_index(at, lengths), strict=True)], axis=-1
    )


class _Moves(NamedTuple):
    """For all values of every two decisions a row: which decisions these are, and the values."""

    first: Decisions  # (n,), a decision of the pair
    second: Decisions  # (n,), the other, which comes later
    values: Decisions  # (n, 2)

    def of(self, point: Decisions) -> Decisions:
        """The points that differ from ``point`` in up to two decisions, and itself, each once.

        Of those that several pairs give the first one counts.
        """
        changed = self.values != np.stack([point[self.first], point[self.second]], axis=1)
        base, with_first = self.second == 1, self.first == 0
        once = (changed[:, 1] | (base & with_first)) & (changed[:, 0] | with_first)
        first, second, values = self.first[once], self.second[once], self.values[once]
        points = np.repeat(point[None], len(values), axis=0)
        rows = np.arange(len(values))
        points[rows, first], points[rows, second] = values[:, 0], values[:, 1]
        return points


@lru_cache(_KEPT)
def _pairs(domains: tuple[tuple[int, ...], ...]) -> _Moves:
    """The moves between points of these domains."""
    options = [np.array(d, dtype=np.int64) for d in domains]
    first, second, values = [], [], []
    for i, j in itertools.combinations(range(len(options)), 2):
        a, b = options[i], options[j]
        values.append(np.stack([np.repeat(a, len(b)), np.tile(b, len(a))], axis=1))
        first.append(np.full(len(a) * len(b), i))
        second.append(np.full(len(a) * len(b), j))
    return _Moves(np.concatenate(first), np.concatenate(second), np.concatenate(values))


def _product(domains: Sequence[Decisions]) -> Decisions:
    """All combinations of the options as rows."""
    return np.stack(np.meshgrid(*domains, indexing="ij"), axis=-1).reshape(-1, len(domains))
