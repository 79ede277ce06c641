"""Tuning records: what was measured for a kernel, one row per candidate.

In: measurements. Out: the same, in the order they came, so that a tuning run that was killed goes
on where it stopped and measures nothing twice; and all of them as JSON lines, from which a cost
model can be trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch_pruner.cache.key import KernelKey, canonical_json, is_number, parse_object

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Mapping, Sequence

    from torch_pruner.cache.row_checksum import RowChecksums
    from torch_pruner.pareto import Finalist


@dataclass(frozen=True, slots=True)
class TuningRecord:
    """One measured candidate.

    Attributes:
        digest: the candidate's digest; at most one record per kernel has it.
        candidate: the candidate (``Candidate.to_json()``).
        status: "ok", or how it failed.
        run_secs: seconds per call, one per repeat; empty unless ok.
        error: what the failure said.
        time: when, in seconds since the epoch.
        provenance: JSON facts: evaluator, versions.
    """

    digest: str
    candidate: Mapping[str, Any]
    status: str
    run_secs: tuple[float, ...] = ()
    error: str = ""
    time: float = 0.0
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "digest": self.digest,
            "candidate": dict(self.candidate),
            "status": self.status,
            "run_secs": list(self.run_secs),
            "error": self.error,
            "time": self.time,
            "provenance": dict(self.provenance),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> TuningRecord:
        """The inverse of ``to_json``. Damage raises ValueError."""
        kinds = {"digest": str, "candidate": dict, "status": str, "run_secs": list, "error": str}
        for name, kind in (kinds | {"time": float | int, "provenance": dict}).items():
            if not isinstance(data.get(name), kind):
                raise ValueError(f"record field {name!r} is {data.get(name)!r}")  # noqa: TRY004
        run_secs = tuple(data["run_secs"])
        if not all(is_number(s) and s > 0 for s in run_secs):
            raise ValueError(f"run_secs are not positive seconds: {run_secs!r}")
        if not is_number(data["time"]):
            raise ValueError(f"time is no number of seconds: {data['time']!r}")
        return TuningRecord(
            digest=data["digest"],
            candidate=data["candidate"],
            status=data["status"],
            run_secs=tuple(float(s) for s in run_secs),
            error=data["error"],
            time=float(data["time"]),
            provenance=data["provenance"],
        )


def sound(record: TuningRecord) -> TuningRecord:
    """``record`` as it will be read back. Raises ValueError if it could not be."""
    return TuningRecord.from_json(parse_object(canonical_json(record.to_json())))


def insert(
    conn: sqlite3.Connection,
    checksums: RowChecksums,
    key: KernelKey,
    records: Sequence[TuningRecord],
    *,
    now: float,
) -> None:
    """Append records of ``key``. A known candidate keeps its record, unless only the new is ok."""
    task, text = key.digest(), canonical_json(key.to_json())
    checksum = checksums.compute("tasks", task, text)
    conn.execute("INSERT OR REPLACE INTO tasks VALUES (?, ?, ?, ?)", (task, text, checksum, now))
    rows = ((record, canonical_json(record.to_json())) for record in records)
    conn.executemany(
        """INSERT INTO records (task, candidate, status, entry, checksum) VALUES (?, ?, ?, ?, ?)
           ON CONFLICT (task, candidate) DO UPDATE
           SET status = excluded.status, entry = excluded.entry, checksum = excluded.checksum
           WHERE records.status != 'ok' AND excluded.status = 'ok'""",
        ((task, r.digest, r.status, t, checksums.compute("records", task, t)) for r, t in rows),
    )


def select(
    conn: sqlite3.Connection, checksums: RowChecksums, task: str
) -> tuple[list[TuningRecord], int]:
    """The records of one kernel in the order they were added, and how many could not be used."""
    rows = conn.execute("SELECT entry, checksum FROM records WHERE task = ? ORDER BY id", (task,))
    found, damaged = [], 0
    for text, checksum in rows.fetchall():
        try:
            plain = checksums.verify("records", task, text, checksum)
            found.append(TuningRecord.from_json(parse_object(plain)))
        except ValueError:
            damaged += 1
    return found, damaged


def tasks(conn: sqlite3.Connection, checksums: RowChecksums) -> Iterator[tuple[str, KernelKey]]:
    """Digest and key of every kernel that has records and whose key is legible."""
    rows = conn.execute("SELECT digest, entry, checksum FROM tasks ORDER BY digest")
    for digest, text, checksum in rows.fetchall():
        try:
            plain = checksums.verify("tasks", digest, text, checksum)
            key = KernelKey.from_json(parse_object(plain))
        except ValueError:
            continue
        yield digest, key


def as_json_lines(
    key: KernelKey,
    workload_text: str,
    records: Sequence[TuningRecord],
    finalists: Sequence[Finalist] = (),
) -> Iterator[str]:
    """One line for the kernel, then one for each record, which names the kernel by its digest."""
    digest = key.digest()
    header = {"kind": "kernel", "digest": digest, "key": key.to_json()}
    told = {"finalists": [f.to_json() for f in finalists]} if finalists else {}
    yield canonical_json(header | {"workload_text": workload_text} | told)
    for record in records:
        yield canonical_json({"kind": "record", "kernel": digest, "record": record.to_json()})
