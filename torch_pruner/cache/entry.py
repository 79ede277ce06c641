"""The entries of the cache: of a kernel, its best schedule; of a graph, what is kept of it.

Values only. ``from_text`` raises ValueError for anything that ``to_text`` could not have written,
so damage is found where it is read and not where it is used.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, cast

from torch_pruner.cache.key import (
    GraphKey,
    KernelKey,
    canonical_json,
    is_digest,
    is_number,
    parse_object,
)
from torch_pruner.pareto import MOST, Finalist

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

Source = Literal["tuned", "library", "untuned"]
SOURCES = ("tuned", "library", "untuned")
EFFORTS = ("", "none", "quick", "full")


@dataclass(frozen=True, slots=True)
class KernelEntry:
    """The best known way to run one kernel.

    Attributes:
        key: what this is the answer for.
        candidate: the schedule (``Candidate.to_json()``); for ``source="library"``, whatever names
            the vendor kernel.
        latency_s: median seconds per call; infinite for a schedule that was never timed.
        baseline_s: the same for what it replaces, or None if that was never timed.
        source: where the candidate comes from.
        trials: how many candidates were measured for this key.
        effort: the highest effort for which tuning *completed*; "" while it is in progress.
        task: the kernel's name, for people.
        workload_text: the kernel graph as text, for ``explain`` and bug reports.
        provenance: JSON facts about the measurement: when, versions, evaluator, ``run_secs``.
        finalists: schedules with what they cost, of which no other is better in everything;
            ``candidate`` is the best by latency, objectives choose among these. At most
            ``pareto.MOST``; none in what an earlier version wrote.
    """

    key: KernelKey
    candidate: Mapping[str, Any]
    latency_s: float
    baseline_s: float | None = None
    source: Source = "tuned"
    trials: int = 0
    effort: str = ""
    task: str = ""
    workload_text: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    finalists: tuple[Finalist, ...] = ()

    @property
    def shippable(self) -> bool:
        """Whether it is what was asked for when it was made: tuned, or a draft by effort none."""
        return bool(self.effort) and (self.source != "untuned" or self.effort == "none")

    def to_text(self) -> str:
        told = [finalist.to_json() for finalist in self.finalists]
        return canonical_json(
            {
                **({"finalists": told} if told else {}),
                "key": self.key.to_json(),
                "candidate": dict(self.candidate),
                "latency_s": _finite_or_none(self.latency_s),
                "baseline_s": _finite_or_none(self.baseline_s),
                "source": self.source,
                "trials": self.trials,
                "effort": self.effort,
                "task": self.task,
                "workload_text": self.workload_text,
                "provenance": dict(self.provenance),
            }
        )

    @staticmethod
    def from_text(text: str) -> KernelEntry:
        data = parse_object(text)
        latency_s = _seconds(data, "latency_s")
        return KernelEntry(
            key=KernelKey.from_json(data.get("key")),
            candidate=_object(data, "candidate"),
            latency_s=math.inf if latency_s is None else latency_s,
            baseline_s=_seconds(data, "baseline_s"),
            source=cast("Source", _choice(data, "source", SOURCES)),
            trials=_count(data, "trials"),
            effort=_choice(data, "effort", EFFORTS),
            task=_text(data, "task"),
            workload_text=_text(data, "workload_text"),
            provenance=_object(data, "provenance"),
            finalists=_finalists(data),
        )


class ArtifactKind(StrEnum):
    """The kinds of artifacts that the store keeps of a graph."""

    LIBRARY = "library"  # the machine code of its kernels, linked
    KERNEL = "kernel"  # the machine code of one kernel, which other graphs may have as well
    CAPTURED = "captured"  # the program that capturing it gave, as text
    VERDICT = "verdict"  # that it gave eager's results; there are no bytes to it
    CUTS = "cuts"  # where it is cut into kernels otherwise than rules say, as text


@dataclass(frozen=True, slots=True)
class Artifact:
    """Something to be kept of a graph.

    Attributes:
        kind: what it is.
        key: of which graph, with which kernels.
        data: its bytes, or the path of a file that has them.
        meta: JSON facts for people; nothing is decided by them.
    """

    kind: ArtifactKind
    key: GraphKey
    data: bytes | os.PathLike[str] = b""
    meta: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ArtifactEntry:
    """An artifact that is stored: ``blob`` is the sha256 of its bytes."""

    kind: ArtifactKind
    key: GraphKey
    blob: str
    meta: Mapping[str, Any] = field(default_factory=dict)

    def digest(self) -> str:
        """The name of its row, see ``artifact_digest``."""
        return artifact_digest(self.kind, self.key)

    def to_text(self) -> str:
        return canonical_json(
            {
                "kind": self.kind,
                "key": self.key.to_json(),
                "blob": self.blob,
                "meta": dict(self.meta),
            }
        )

    @staticmethod
    def from_text(text: str) -> ArtifactEntry:
        data = parse_object(text)
        kind = ArtifactKind(_choice(data, "kind", tuple(ArtifactKind)))
        blob = _text(data, "blob")
        if not is_digest(blob):
            raise ValueError(f"blob is not a sha256: {blob!r}")
        key = GraphKey.from_json(data.get("key"))
        return ArtifactEntry(kind, key, blob, _object(data, "meta"))


def artifact_digest(kind: ArtifactKind, key: GraphKey) -> str:
    """The sha256 of a kind and a key: artifacts of two kinds may have one key."""
    text = canonical_json({"kind": kind, "key": key.to_json()})
    return hashlib.sha256(text.encode()).hexdigest()


def keep_best(old: KernelEntry | None, new: KernelEntry, *, chosen: bool = False) -> KernelEntry:
    """The entry to store when ``new`` meets ``old``: the better schedule, and all that both know.

    What a search has ``chosen`` is better than what it met on its way, which was timed at one
    moment, perhaps a lucky one, and the choice in a race. So it replaces what is there, and what
    is not complete replaces nothing that is. Otherwise the lower latency is better; a tie keeps the
    old one, unless neither was timed. Completed effort and trials never decrease; finalists are
    those of the better schedule, if it has any.
    """
    if old is None:
        return new
    untimed = math.isinf(old.latency_s) and math.isinf(new.latency_s)
    best, other = (new, old) if new.latency_s < old.latency_s or untimed else (old, new)
    alike = math.isinf(old.latency_s) == math.isinf(new.latency_s)  # predictions are no times
    passing = not best.effort and other.effort and math.isfinite(other.latency_s)
    if passing or (chosen and best is not new and math.isfinite(new.latency_s)):
        best, other = other, best
    return replace(
        best,
        baseline_s=other.baseline_s if best.baseline_s is None else best.baseline_s,
        trials=max(old.trials, new.trials),
        effort=max(old.effort, new.effort, key=EFFORTS.index),
        task=best.task or other.task,
        workload_text=best.workload_text or other.workload_text,
        finalists=best.finalists or (other.finalists if alike else ()),
    )


def _finite_or_none(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else seconds


def _finalists(data: Mapping[str, Any]) -> tuple[Finalist, ...]:
    """None where an earlier version wrote the entry."""
    value = data.get("finalists", [])
    if not isinstance(value, list) or len(value) > MOST:
        raise ValueError(f"not a list of at most {MOST} finalists: {str(value)[:80]}")
    return tuple(Finalist.from_json(item) for item in value)


def _object(data: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = data.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{name} is not a JSON object: {value!r}")  # noqa: TRY004
    return value


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is not a string: {value!r}")  # noqa: TRY004
    return value


def _choice(data: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
    value = _text(data, name)
    if value not in known:
        raise ValueError(f"{name} is none of {known}: {value!r}")
    return value


def _count(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is not a count: {value!r}")
    return value


def _seconds(data: Mapping[str, Any], name: str) -> float | None:
    value = data.get(name)
    if value is None:
        return None
    if not is_number(value) or not value > 0:
        raise ValueError(f"{name} is not a positive number of seconds: {value!r}")
    return float(value)
