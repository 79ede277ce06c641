"""The page that compares contestants: statistics over rows, and their tables in Markdown.

In: rows as ``peers`` produces them, plain values. Out: text. Knows neither torch nor the peers.
"""

from __future__ import annotations

import math
from itertools import groupby
from typing import TYPE_CHECKING, Any

from benchmarks import tables, timing
from benchmarks.models import NETWORKS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Row = dict[str, Any]

OURS = "pruner"
EFFORTS = {"pruner-quick": "quick", "pruner-none": "none"}
"""Contestants of ours beside the one asked for, by what they spend."""
BASELINE = "inductor"
PEAK_DRIFT = 0.1
"""Peaks of one row that lie further apart are marked: the machine was not quiet."""

GROUPS = (("language", "language models"), ("convolution", "convolution networks"))


def medians(row: Row) -> dict[str, float]:
    """Seconds per call of every contestant that was timed."""
    found = row.get("contestants", {})
    return {name: of["latency"]["median_s"] for name, of in found.items() if "latency" in of}


def best_peer(row: Row) -> str | None:
    """The fastest of all others, eager and inductor included."""
    peers = {name: s for name, s in medians(row).items() if name != OURS}
    return min(peers, key=lambda name: peers[name]) if peers else None


def faster_than(row: Row, name: str | None) -> float | None:
    """How many times faster ours is, by medians; None where one of the two was not timed."""
    of = medians(row)
    return of[name] / of[OURS] if name in of and OURS in of else None


def peak(row: Row) -> float | None:
    """The highest rate seen around the timing, FLOPs per second: shares are not flattered."""
    seen = row.get("peak_flops_per_s")
    return max(seen.values()) if seen else None


def drift(row: Row) -> float:
    """How far the peaks before, between and after lie apart, as a share of the highest."""
    seen = row["peak_flops_per_s"].values()
    return 1.0 - min(seen) / max(seen)


def share_of_peak(row: Row, name: str) -> float | None:
    """Of the FMA peak, for the whole network."""
    seconds, most = medians(row).get(name), peak(row)
    return row["flops"] / seconds / most if seconds and most else None


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def mean_ratio(rows: Iterable[Row], name: str | None = None) -> tuple[float | None, int]:
    """Geometric mean of ``faster_than`` over rows that have it, and how many those are.

    Without a name: over each row's best peer.
    """
    ratios = [faster_than(row, name or best_peer(row)) for row in rows]
    known = [ratio for ratio in ratios if ratio is not None]
    return geometric_mean(known), len(known)


def ordered(rows: Mapping[str, Row]) -> list[Row]:
    """By precision, effort, and then as the networks are listed."""

    def place(row: Row) -> tuple[str, str, int, int]:
        return (*_section(row), list(NETWORKS).index(row["network"]), row["batch"])

    return sorted(rows.values(), key=place)


def by_effort(rows: Mapping[str, Row]) -> dict[str, Row]:
    """Rows with one contestant of ours each: what those of other efforts did are rows of their own.

    They take the place of rows of the same question that were made alone.
    """
    found: dict[str, Row] = {}
    for key, row in rows.items():
        contestants = dict(row.get("contestants", {}))
        beside = {EFFORTS[n]: contestants.pop(n) for n in EFFORTS if n in contestants}
        if not beside:
            found.setdefault(key, row)
            continue
        found[key] = row | {"contestants": contestants}
        peers = {name: of for name, of in contestants.items() if name != OURS}
        for effort, ours in beside.items():
            alone = {"effort": effort, "contestants": peers | {OURS: ours}}
            found[f"{key.rpartition('/')[0]}/{effort}"] = row | alone
    return found


def render(content: Mapping[str, Any], data: str) -> str:
    """The page: one section for each precision and effort."""
    parts = [
        "# Peers",
        f"Written by `python -m benchmarks.peers`; all numbers are in `{data}`.",
        timing.machine_line(content["machine"]) + ".",
        LEGEND,
    ]
    for (precision, effort), group in groupby(ordered(by_effort(content["rows"])), key=_section):
        rows = list(group)
        commits = ", ".join(sorted({row["commit"] for row in rows if "commit" in row}))
        parts += [f"## {precision}, effort {effort}"]
        parts += [f"Commit {commits}.", *_tables(rows)] if commits else _tables(rows)
    return "\n\n".join(parts) + "\n"


LEGEND = """\
* Medians per call in one process, where the contestants take turns. Below: quartiles, difference, \
and the time until the first call was done (export, conversion, compilation, tuning). Inductor's \
variants share what they compile: the first pays for starting its workers and for common kernels.
* **inductor** is torch's default; **-freezing** has `freezing`, **-max** also `max_autotune`.
* **vs**: how many times faster pruner is. The best peer is the fastest of all others. All \
efforts of a network are contestants of one contest, with caches of their own.
* **of peak**: FLOPs of the network by torch's counter, over pruner's median, over the FMA peak of \
a register-only loop, the highest of before, between (in turns) and after. `~`: those lie more \
than a tenth apart.
* **difference**: largest `max|ours - reference| / max|reference|` over all outputs; the reference \
is eager in float64 (for bfloat16: float32) with the same weights. In brackets: how many times \
eager's own."""


def _section(row: Row) -> tuple[str, str]:
    return row["precision"], row["effort"]


def _names(rows: Sequence[Row]) -> list[str]:
    """Every contestant of some row, ours last."""
    names = dict.fromkeys(name for row in rows for name in row.get("contestants", {}))
    return [*(name for name in names if name != OURS), *([OURS] if OURS in names else [])]


def _tables(rows: Sequence[Row]) -> list[str]:
    names = _names(rows)
    header = ["network", *names, f"vs {BASELINE}", "vs best peer", "best peer", "of peak"]
    parts = [
        tables.markdown(header, [_latencies(row, names) for row in rows]),
        "Geometric means of how many times faster pruner is:",
        _means(rows, [n for n in names if n != OURS]),
        tables.markdown(DETAILS, [line for row in rows for line in _details(row)]),
    ]
    if reasons := list(_reasons(rows)):
        parts += ["Not in the tables:", "\n".join(f"* {line}" for line in reasons)]
    return parts


def _latencies(row: Row, names: Sequence[str]) -> list[str]:
    of, best, share = medians(row), best_peer(row), share_of_peak(row, OURS)
    mark = "~" if "peak_flops_per_s" in row and drift(row) > PEAK_DRIFT else ""
    return [
        row["title"],
        *(timing.duration(of[name]) if name in of else _absent(row, name) for name in names),
        _times(faster_than(row, BASELINE)),
        _times(faster_than(row, best)),
        best or "",
        f"{mark}{100 * share:.0f} %" if share else "",
    ]


def _absent(row: Row, name: str) -> str:
    """The kind of reason, in two words; the list below the tables has the whole."""
    found = row.get("contestants", {}).get(name)
    if found is None:
        return row["status"] if row["status"] != "ok" else ""
    why = found.get("reason", row["status"])
    for start, short in (
        ("ModuleNotFoundError", "not installed"),
        ("TookTooLong", "too slow"),
        ("crash", "crash"),
    ):
        if why.startswith(start):
            return short
    return "failed"


def _means(rows: Sequence[Row], peers: Sequence[str]) -> str:
    lines = []
    for kind, title in (*GROUPS, (None, "all")):
        chosen = [row for row in rows if kind in (None, NETWORKS[row["network"]].kind)]
        found = [mean_ratio(chosen), *(mean_ratio(chosen, name) for name in peers)]
        if found[0][1]:
            cells = [f"{_times(mean)} ({count})" if count else "" for mean, count in found]
            lines.append([title, *cells])
    return tables.markdown(["", "best peer", *peers], lines)


DETAILS = [
    "network", "contestant", "median", "quartiles", "min", "samples", "of peak", "difference",
    "ready after", "kernels",
]  # fmt: skip


def _details(row: Row) -> list[list[str]]:
    lines = []
    for name, of in row.get("contestants", {}).items():
        if "latency" not in of:
            continue
        t = timing.Timing(**of["latency"])
        share, report = share_of_peak(row, name), of.get("report")
        kernels = ", ".join(f"{n} {kind}" for kind, n in report["tasks"].items()) if report else ""
        lines.append(
            [
                row["title"],
                name,
                timing.duration(t.median_s),
                timing.spread(t),
                timing.duration(t.min_s),
                str(t.n),
                f"{100 * share:.0f} %" if share else "",
                _difference(row, of["difference"]),
                timing.duration(of["prepare_s"]),
                kernels,
            ]
        )
    return lines


def _difference(row: Row, of: float) -> str:
    own = row["contestants"].get("eager", {}).get("difference")
    return f"{of:.1e} ({of / own:.1f})" if own else f"{of:.1e}"


def _reasons(rows: Sequence[Row]) -> Iterable[str]:
    for row in rows:
        if row["status"] != "ok":
            yield f"{row['title']}: {row['status']}: {row['error']}"
        for name, of in row.get("contestants", {}).items():
            if "reason" in of:
                yield f"{row['title']}, {name}: {of['reason']}"
            for note in of.get("notes", ()):
                yield f"{row['title']}, {name}: {note}"


def _times(ratio: float | None) -> str:
    return f"{ratio:.2f}x" if ratio else ""
