"""The page of ``search``: when each search reached the reference's latency, and what it cost.

In: rows as ``search`` produces them, plain values. Out: text, and a picture. Knows no tuner.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from benchmarks import tables, timing
from benchmarks.references import KEPT, REFERENCE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

Row = dict[str, Any]
Search = dict[str, Any]

UNTOUCHED = "tune_tir"  # the same, driven by its own code
PHASES = ("draft", "verify", "build", "measure", "train")
OWN_WORK = ("draft", "verify", "train")
COUNTS = (1, 10, 16, 32, 64, 1000)  # of trials, as TLM's table has them


def curve(row: Row, search: Search) -> list[tuple[float, int, float]]:
    """(seconds, trials, latency) of each improvement, by the second, common timing.

    What was better only by the first timing is no step.
    """
    again, best, steps = row["again"], math.inf, []
    for event in search["events"]:
        seconds = again.get(event["digest"], math.inf)
        if seconds < best:
            best = seconds
            steps.append((event["seconds"], event["trial"], best))
    return steps


def latency(row: Row, search: Search, within_s: float = math.inf) -> float:
    """The least of a search, within so many seconds."""
    return min((s for at, _, s in curve(row, search) if at <= within_s), default=math.inf)


def latency_of(row: Row, search: Search, trials: int) -> float:
    """The least of a search in its first trials."""
    return min((s for _, trial, s in curve(row, search) if trial <= trials), default=math.inf)


def reference(row: Row, name: str = REFERENCE) -> Search:
    """Of several seeds, the one with the least latency."""
    own = [s for s in row["searches"] if s["search"] == name]
    return min(own, key=lambda s: latency(row, s))


def reached(row: Row, search: Search, against: str = REFERENCE) -> tuple[float, int] | None:
    """(seconds, trials) until a search had the reference's least latency; None if it never did."""
    goal = latency(row, reference(row, against))
    return next(((at, trial) for at, trial, s in curve(row, search) if s <= goal), None)


def others(row: Row, against: str = REFERENCE) -> dict[str, list[Search]]:
    """The searches that are compared with the reference, all seeds of each."""
    found: dict[str, list[Search]] = {}
    for search in row["searches"]:
        if search["search"] != against:
            found.setdefault(search["search"], []).append(search)
    return found


def sooner(row: Row, search: Search, against: str = REFERENCE) -> float | None:
    """How many times sooner than the reference itself; one that never got there counts as if it had
    at the end of the reference's time. None if there is nothing to compare with.
    """
    best = reference(row, against)
    at, own = reached(row, search, against), reached(row, best, against)
    seconds = at[0] if at else best["seconds"]
    return own[0] / seconds if own and seconds > 0 else None


def fewer(row: Row, search: Search, against: str = REFERENCE) -> float | None:
    """The same by trials: those of the reference over those of the search."""
    best = reference(row, against)
    at, own = reached(row, search, against), reached(row, best, against)
    return own[1] / (at[1] if at else best["trials"]) if own else None


def geometric(values: Sequence[float]) -> float | None:
    return math.exp(statistics.fmean(map(math.log, values))) if values else None


def overhead(searches: Sequence[Search]) -> float | None:
    """Share of the time that drafting, verifying and training took."""
    return share(searches, OWN_WORK)


def share(searches: Sequence[Search], phases: Sequence[str]) -> float | None:
    """Share of the time that some phases took."""
    total = sum(sum(s["phases"].values()) for s in searches)
    return sum(s["phases"][p] for s in searches for p in phases) / total if total else None


def summary(rows: Sequence[Row], name: str, against: str = REFERENCE) -> dict[str, Any]:
    """Of one search over all tasks and seeds."""
    pairs = [(row, s) for row in rows for s in others(row, against).get(name, ())]
    times = [sooner(row, s, against) for row, s in pairs]
    same_time = [
        latency(row, best) / latency(row, s, best["seconds"])
        for row, s in pairs
        for best in [reference(row, against)]
    ]
    known = [t for t in times if t is not None]
    by_trials = [t for row, s in pairs if (t := fewer(row, s, against)) is not None]
    return {
        "runs": len(pairs),
        "reached": sum(reached(row, s, against) is not None for row, s in pairs),
        "sooner": geometric(known),
        "fewer trials": geometric(by_trials),
        "at equal time": geometric([r for r in same_time if r > 0]),
        "worst at equal time": min(same_time, default=None),
        "overhead": overhead([s for _, s in pairs]),
    }


def render(content: Mapping[str, Any], data: str, picture: str | None = None) -> str:
    """The Markdown page."""
    rows = [r for r in content["rows"].values() if r["status"] == "ok"]
    names = list(dict.fromkeys(name for row in rows for name in others(row)))
    lines = [
        "# Search",
        "",
        f"Written by `python -m benchmarks.search`; all numbers are in `{data}`.",
        "",
        timing.machine_line(content["machine"]) + _commits(content) + ".",
        "",
        "* **sooner**: when MetaSchedule had the best of its trials, over when the search had one",
        "  as fast; geometric mean over tasks and seeds. What never got there counts as if it had",
        "  at the end of MetaSchedule's time.",
        "* **fewer trials**: the same, counted in trials.",
        "* **at equal time**: MetaSchedule's best over the search's, after MetaSchedule's time.",
        "* All latencies are from one last timing of everything that once was best, in turns.",
        "",
    ]
    if picture:
        lines += [f"![Latency over time](./{picture.rpartition('/')[2]})", ""]
    header = ["search", "runs", "got there", "sooner", "fewer trials", "at equal time", "worst"]
    lines += [tables.markdown(header, list(_summaries(rows, names, REFERENCE))), ""]
    untouched = [r for r in rows if any(s["search"] == UNTOUCHED for s in r["searches"])]
    if untouched:
        names_there = [REFERENCE, *(n for n in names if n != UNTOUCHED)]
        table = tables.markdown(header, list(_summaries(untouched, names_there, UNTOUCHED)))
        lines += [
            f"The same against `{UNTOUCHED}`, MetaSchedule driven by its own code:",
            "",
            table,
        ]
        lines += [""]
    lines += [*_by_trials(rows, names), *_kept(rows)]
    header = ["of the time", *PHASES, "draft, verify and train"]
    lines += [tables.markdown(header, [_shares(rows, n) for n in (REFERENCE, *names)]), ""]
    header = ["task", "search", "seed", "trials", "took", "best", "reached after", "trials then"]
    lines += [tables.markdown(header, [c for row in rows for c in _task_lines(row)]), ""]
    failed = [(k, r) for k, r in content["rows"].items() if r["status"] != "ok"]
    lines += [f"* {key}: {row['status']}: {row['error']}" for key, row in failed]
    return "\n".join(lines).rstrip() + "\n"


def _commits(content: Mapping[str, Any]) -> str:
    """Rows that were kept from commits before, at which the code that searches was the same."""
    machine = content["machine"]
    kept = {}
    for row in content["rows"].values():
        if row["commit"] != machine["commit"]:
            cpu = row.get("cpu", machine["cpu"])
            kept[row["commit"] + (f" on {cpu}" if cpu != machine["cpu"] else "")] = None
    return f" (rows of {', '.join(kept)} kept)" if kept else ""


def _summaries(rows: Sequence[Row], names: Sequence[str], against: str) -> Iterator[list[str]]:
    """A line of each search; where rows are of several processors, one of each of them too."""
    for name in names:
        yield _summary_line(rows, name, name, against)
        cpus = dict.fromkeys(row.get("cpu", "") for row in rows)
        for cpu in cpus if len(cpus) > 1 else ():
            own = [r for r in rows if r.get("cpu", "") == cpu]
            yield _summary_line(own, name, f"on {cpu}", against)


def _summary_line(rows: Sequence[Row], name: str, title: str, against: str) -> list[str]:
    of = summary(rows, name, against)
    return [
        title,
        str(of["runs"]),
        str(of["reached"]),
        _times(of["sooner"]),
        _times(of["fewer trials"]),
        _times(of["at equal time"]),
        _times(of["worst at equal time"]),
    ]


def _shares(rows: Sequence[Row], name: str) -> list[str]:
    searches = [s for row in rows for s in row["searches"] if s["search"] == name]
    found = [share(searches, parts) for parts in (*((p,) for p in PHASES), OWN_WORK)]
    return [name, *(f"{100 * s:.1f} %" if s is not None else "" for s in found)]


def _by_trials(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """Where MetaSchedule had more trials: its best of all over everyone's of so many, and the
    worst task of each."""
    own = [r for r in rows if all(reference(r)["trials"] > s["trials"] for s in _compared(r))]
    if not own:
        return []
    lines = []
    for name in (REFERENCE, *names):
        cells = []
        for count in COUNTS:
            runs = [(r, s) for r in own for s in r["searches"] if s["search"] == name]
            runs = [(r, s) for r, s in runs if KEPT not in s or count >= s["trials"]]
            found = [latency(r, reference(r)) / latency_of(r, s, count) for r, s in runs]
            some = any(s["trials"] >= count for _, s in runs)  # a space may end before
            mean = geometric([f for f in found if f > 0]) if some else None
            cells.append(f"{mean:.2f} ({min(found):.2f})" if mean is not None else "")
        lines.append([name, *cells])
    header = ["search", *(str(count) for count in COUNTS)]
    text = "MetaSchedule's best of all its trials over the best of so many, geometric mean (worst):"
    return [text, "", tables.markdown(header, lines), ""]


def _kept(rows: Sequence[Row]) -> list[str]:
    """Searches of MetaSchedule's that were not run again: their seconds are of another run."""
    commits = dict.fromkeys(s[KEPT] for row in rows for s in row["searches"] if KEPT in s)
    if not commits:
        return []
    text = "MetaSchedule searched at {}; what it found was timed again, beside the others' results."
    return [text.format(", ".join(commits)) + " How soon anything came can't be compared.", ""]


def _compared(row: Row) -> list[Search]:
    return [s for own in others(row).values() for s in own if s["search"] != UNTOUCHED]


def _times(value: float | None) -> str:
    return f"{value:.2f}x" if value is not None else ""


def _task_lines(row: Row) -> list[list[str]]:
    lines = []
    for search in row["searches"]:
        at = reached(row, search)
        lines.append(
            [
                row["name"],
                search["search"],
                str(search["seed"]),
                str(search["trials"]),
                timing.duration(search["seconds"]),
                timing.duration(latency(row, search)) if curve(row, search) else "",
                timing.duration(at[0]) if at else "never",
                str(at[1]) if at else "",
            ]
        )
    return lines


def draw(content: Mapping[str, Any], path: Path) -> None:
    """Latency of the best so far over seconds, over all tasks in geometric mean.

    Relative to the reference's last; a search counts as it stood, and from when it has something
    for all of them.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    rows = [r for r in content["rows"].values() if r["status"] == "ok"]
    names = [REFERENCE, *dict.fromkeys(name for row in rows for name in others(row))]
    end = max((s["seconds"] for row in rows for s in row["searches"]), default=1.0)
    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name in names:
        runs = [(row, s) for row in rows for s in row["searches"] if s["search"] == name]
        moments = sorted({at for row, s in runs for at, *_ in curve(row, s)})
        points = [(at, _relative(runs, at)) for at in moments]
        known = [(at, value) for at, value in points if value is not None]
        if known:
            known.append((end, known[-1][1]))  # what was found stays
            axes.step(*zip(*known, strict=True), where="post", label=name)
    axes.axhline(1.0, color="grey", linewidth=0.5)
    axes.set(xscale="log", xlabel="seconds of a task", ylabel="latency / MetaSchedule's last")
    axes.set_ylim(bottom=0.0)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _relative(runs: Sequence[tuple[Row, Search]], at: float) -> float | None:
    now = [latency(row, s, at) / latency(row, reference(row)) for row, s in runs]
    return geometric(now) if all(map(math.isfinite, now)) else None
