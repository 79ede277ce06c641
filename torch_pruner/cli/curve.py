"""``torch-pruner curve REPORT.json``: the best latency against time and against trials."""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_pruner import exc

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

MAX_BYTES = 64 << 20

Point = tuple[float, int, float]  # seconds, trials, latency in seconds


@dataclass(frozen=True, slots=True)
class Line:
    """One strategy's searches of one report, as if they were one."""

    name: str
    points: tuple[Point, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "reports", nargs="+", type=Path, metavar="REPORT.json", help="what `tune --json` printed"
    )
    parser.add_argument(
        "-o",
        dest="picture",
        type=Path,
        metavar="FILE.png",
        help="default: beside the first report",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 if a picture was written. Raises ``UnsupportedModel`` for what is no report."""
    lines = []
    for path in args.reports:
        prefix = f"{path.stem}: " if len(args.reports) > 1 else ""
        lines += [Line(prefix + line.name, line.points) for line in lines_of(path)]
    if importlib.util.find_spec("matplotlib") is None:
        raise exc.OptionError(
            "-o", "drawing needs matplotlib; run: pip install 'torch_pruner[curve]'"
        )
    picture = args.picture or args.reports[0].with_suffix(".png")
    draw(lines, picture)
    for line in lines:
        seconds, trials, latency = line.points[-1]
        print(
            f"{line.name}: {1e3 * line.points[0][2]:.3f} ms at first,"
            f" {1e3 * latency:.3f} ms after {trials} trials and {seconds:.1f} s"
        )
    print(f"drawn in {picture}")
    return 0


def lines_of(path: Path) -> list[Line]:
    """The lines of a report. Raises ``UnsupportedModel`` where there is nothing to draw."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"larger than {MAX_BYTES >> 20} MiB")
        found = _read(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as err:
        raise exc.UnsupportedModel(
            str(path), f"not a report: {err}", "make one with: torch-pruner tune MODEL --json"
        ) from err
    if not found:
        raise exc.UnsupportedModel(
            str(path), "nothing was tuned", "tune with an empty cache, then draw that report"
        )
    return found


def _read(report: Mapping[str, Any]) -> list[Line]:
    searches: dict[str, list[list[Point]]] = {}
    for tuning in report["tunings"]:
        points = [(float(s), int(n), float(latency)) for s, n, latency in tuning["points"]]
        if not all(math.isfinite(s) and math.isfinite(latency) for s, _, latency in points):
            raise ValueError("a point of a curve is no number")
        if points:
            searches.setdefault(str(tuning["strategy"]), []).append(points)
    return [Line(name, joined(own)) for name, own in searches.items()]


def joined(searches: Sequence[Sequence[Point]]) -> tuple[Point, ...]:
    """Searches of several graphs, one after the other: times and trials go on, latencies add up.

    A graph whose search has not begun counts with the first latency it will have.
    """
    now = [points[0][2] for points in searches]
    found: list[Point] = []
    seconds, trials = 0.0, 0
    for k, points in enumerate(searches):
        for at, count, latency in points:
            now[k] = latency
            found.append((seconds + at, trials + count, sum(now)))
        seconds, trials = seconds + points[-1][0], trials + points[-1][1]
    return tuple(found)


def draw(lines: Sequence[Line], picture: Path) -> None:
    """Two panels, time and trials, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, column, label in zip(panels, (0, 1), ("seconds", "trials"), strict=True):
        for line in lines:
            x = [p[column] for p in line.points]
            y = [1e3 * p[2] for p in line.points]
            axes.step(x, y, where="post", marker=".", label=line.name)
        axes.set_xlabel(label)
    panels[0].set_ylabel("ms per call, all kernels")
    panels[0].legend()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, format="png", dpi=150)
