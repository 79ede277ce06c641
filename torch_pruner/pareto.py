"""What decides among kernels that are as fast as each other: values, and the choice among them.

In: the finalists of one task with what each costs. Out: those that nothing beats in everything, and
the one that an objective takes. Measures nothing, builds nothing.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    Cost = Callable[["Finalist"], float]

TIE = 1.03  # times the fastest: what takes less than this is as fast
MOST = 8  # finalists that are kept for a task


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that one kernel needs beside its inputs and outputs.

    ``packed_bytes`` are copies of constant operands, ``constant_bytes`` these and the constant
    operands that are read where they lie: what stays in memory where originals are freed that only
    copies are read of. ``scratch_bytes`` are needed while the kernel runs.
    """

    packed_bytes: int
    constant_bytes: int
    scratch_bytes: int

    @property
    def nbytes(self) -> int:
        """Of one call: copies and scratch."""
        return self.packed_bytes + self.scratch_bytes

    def held(self, calls: int, *, freed: bool) -> int:
        """Bytes for a graph that calls the kernel so often, each time with other constants.

        Calls share their scratch, one after the other. ``freed``: originals are freed.
        """
        return calls * (self.constant_bytes if freed else self.packed_bytes) + self.scratch_bytes


@dataclass(frozen=True, slots=True)
class Finalist:
    """One schedule of a task and what it costs a call.

    ``latency_s`` is in seconds, predicted for what runs untuned, and infinite where nothing says
    how fast it is; ``joules`` is None where no meter was read.
    """

    candidate: Candidate
    latency_s: float
    footprint: Footprint
    joules: float | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "candidate": self.candidate.to_json(),
            "latency_s": self.latency_s if math.isfinite(self.latency_s) else None,
            "packed_bytes": self.footprint.packed_bytes,
            "constant_bytes": self.footprint.constant_bytes,
            "scratch_bytes": self.footprint.scratch_bytes,
            "joules": self.joules,
        }

    @staticmethod
    def from_json(data: object) -> Finalist:
        """The inverse of ``to_json``. Damage raises ValueError."""
        if not isinstance(data, dict):
            raise ValueError(f"a finalist is a JSON object, not {data!r}")  # noqa: TRY004
        latency_s = _positive(data, "latency_s")
        sizes = (_count(data, f"{name}_bytes") for name in ("packed", "constant", "scratch"))
        return Finalist(
            _candidate(data.get("candidate")),
            math.inf if latency_s is None else latency_s,
            Footprint(*sizes),
            _positive(data, "joules"),
        )


@dataclass(frozen=True, slots=True)
class Objective:
    """The option ``objective``. ``freed``: constants that only copies are read of are freed."""

    name: str = "latency"
    freed: bool = False

    @property
    def metered(self) -> bool:
        """Whether a meter has to be read."""
        return self.name == "energy"

    def cost(self, finalist: Finalist, calls: int = 1) -> float:
        """What is to be small, in a graph that calls the kernel so often: seconds, bytes, joules.

        Infinite where it is not known.
        """
        if self.name == "memory":
            return finalist.footprint.held(calls, freed=self.freed)
        if self.name == "energy":
            return math.inf if finalist.joules is None else finalist.joules
        return finalist.latency_s

    def decides(self, finalists: Sequence[Finalist]) -> bool:
        """Whether enough is known of ``finalists`` to choose one of them."""
        near = as_fast(finalists)
        alone = len(near) == 1
        return bool(near) and (alone or any(math.isfinite(self.cost(f)) for f in near))

    def choose(self, finalists: Sequence[Finalist], calls: int = 1) -> Finalist:
        """Of those that are as fast as the fastest the one of least cost; of these the fastest."""
        return min(as_fast(finalists), key=lambda f: (self.cost(f, calls), f.latency_s))


LATENCY = Objective()


def as_fast(finalists: Sequence[Finalist]) -> list[Finalist]:
    """Those within ``TIE`` of the fastest."""
    limit = TIE * min((f.latency_s for f in finalists), default=math.inf)
    return [f for f in finalists if f.latency_s <= limit]


def non_dominated(finalists: Iterable[Finalist]) -> tuple[Finalist, ...]:
    """Those of which no other is as good in everything and better in something, the fastest first.

    At most ``MOST``: of more, the fastest, and the least in each other cost of those as fast as it.
    An unknown cost is worse than any that is known.
    """
    found: list[Finalist] = []
    for new in sorted(finalists, key=lambda f: tuple(cost(f) for cost in _COSTS)):
        if not any(_as_good(known, new) for known in found):
            found.append(new)
    if len(found) <= MOST:
        return tuple(found)
    near = as_fast(found)
    first = [min(near, key=cost) for cost in (*_COSTS, *_SUMS)]
    kept = list(dict.fromkeys([*first, *found]))[:MOST]
    return tuple(sorted(kept, key=lambda f: f.latency_s))


_COSTS: tuple[Cost, ...] = (
    lambda f: f.latency_s,
    lambda f: f.footprint.packed_bytes,
    lambda f: f.footprint.constant_bytes,
    lambda f: f.footprint.scratch_bytes,
    lambda f: math.inf if f.joules is None else f.joules,
)
_SUMS: tuple[Cost, ...] = (
    lambda f: f.footprint.held(1, freed=False),
    lambda f: f.footprint.held(1, freed=True),
)


def _as_good(one: Finalist, other: Finalist) -> bool:
    return all(cost(one) <= cost(other) for cost in _COSTS)


def _candidate(data: object) -> Candidate:
    if not isinstance(data, dict) or not isinstance(data.get("decisions"), dict):
        raise ValueError(f"not a candidate: {data!r}")  # noqa: TRY004
    try:
        return Candidate.from_json(data)
    except (KeyError, TypeError) as err:
        raise ValueError(f"not a candidate: {data!r}") from err


def _count(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is not a count: {value!r}")
    return value


def _positive(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= sys.float_info.max:
        raise ValueError(f"{name} is not a positive number: {value!r}")
    return float(value)
