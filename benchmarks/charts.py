"""Pictures of the tables in docs: ``python -m benchmarks.charts`` draws again from the same data.

Needs the extra ``curve``. A figure that was not measured is not drawn.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parent.parent / "docs"
OURS, QUICK, DRAFTS = "pruner", "pruner-quick", "pruner-none"
STYLES = {
    "eager": ("o", "#8a8f99"),
    "inductor": ("v", "#c2410c"),
    "inductor-freezing": ("^", "#ea8a4f"),
    "inductor-max": (">", "#f2b48a"),
    "onnxruntime": ("s", "#7c3aed"),
    "openvino": ("D", "#0f766e"),
    DRAFTS: ("+", "#9bb8f7"),
    QUICK: ("x", "#2f6fed"),
}
RUNTIMES = {
    "eager": STYLES["eager"],
    "inductor": STYLES["inductor"],
    "openvino": STYLES["openvino"],
    "llama.cpp": ("s", "#7c3aed"),
    "ctranslate2": ("^", "#b45309"),
    "pruner": ("o", "#2f6fed"),
}
COLOURS = {
    "eager": "#8a8f99", "inductor": "#c2410c", "pruner": "#2f6fed", "pruner static": "#111827",
}  # fmt: skip


def peers(data: Mapping[str, Any], precision: str = "float32") -> Figure | None:
    """Every contestant's latency over that of pruner with full effort, a line for each network."""
    rows = [r for r in data["rows"].values() if r["precision"] == precision and _median(r, OURS)]
    if not rows:
        return None
    rows.sort(key=lambda row: min(v for n, v in _ratios(row).items() if n not in (QUICK, DRAFTS)))
    figure = Figure(figsize=(9, 1.6 + 0.34 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for name, (marker, colour) in STYLES.items():
        at = [(k, _ratios(r)[name]) for k, r in enumerate(rows) if name in _ratios(r)]
        if at:
            y, x = zip(*at, strict=True)
            axes.scatter(x, y, marker=marker, color=colour, s=34, label=name, zorder=3)
    axes.axvline(1.0, color="#2f6fed", linewidth=1.5, zorder=2)
    axes.set_yticks(range(len(rows)), [r["title"] for r in rows])
    axes.grid(axis="x", color="#e3e6ec", zorder=0)
    _times(axes, [v for r in rows for v in _ratios(r).values()])
    axes.set_xlabel("latency over that of pruner with full effort; to the right: pruner is faster")
    axes.set_title(f"Latency beside the peers, {precision}, batch 1", loc="left")
    figure.legend(loc="outside lower center", ncols=len(STYLES), frameon=False, fontsize=8)
    return figure


def dynamic(data: Mapping[str, Any]) -> Figure:
    """Latency by sequence length."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for name in ("eager", "inductor", "pruner", "pruner static"):
        at = [
            (row["length"], 1e3 * row["latency"][name]["median_s"])
            for row in data["lengths"]
            if name in row["latency"]
        ]
        if not at:
            continue
        x, y = zip(*sorted(at), strict=True)
        alone = name == "pruner static"
        style: dict[str, Any] = {"linestyle": "none", "marker": "x"} if alone else {"marker": "."}
        axes.plot(x, y, color=COLOURS[name], label=name, zorder=3, **style)
    axes.set_xlabel("sequence length")
    axes.set_ylabel("ms per call")
    axes.set_ylim(bottom=0)
    axes.grid(color="#e3e6ec", zorder=0)
    axes.set_title(f"{data['network']}: one compiled model, many lengths", loc="left")
    axes.legend(frameon=False)
    return figure


def _bars(title: str, unit: str, groups: Mapping[str, Mapping[str, float]]) -> Figure:
    """A bar for each contestant of each group, with its number."""
    names = list(dict.fromkeys(name for of in groups.values() for name in of))
    height = 0.8 / len(names)
    figure = Figure(figsize=(8, 1.4 + 0.3 * len(names) * len(groups)), layout="constrained")
    axes = figure.subplots()
    for k, name in enumerate(names):
        at = [(g + k * height, of[name]) for g, of in enumerate(groups.values()) if name in of]
        y, x = zip(*at, strict=True)
        bars = axes.barh(y, x, height=0.9 * height, color=COLOURS[name], label=name, zorder=3)
        axes.bar_label(bars, fmt="%.4g", padding=3, fontsize=8)
    axes.set_yticks([g + 0.4 - height / 2 for g in range(len(groups))], list(groups))
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.grid(axis="x", color="#e3e6ec", zorder=0)
    axes.set_xlabel(unit)
    axes.set_title(title, loc="left")
    figure.legend(loc="outside lower center", ncols=len(names), frameon=False, fontsize=8)
    return figure


def training(data: Mapping[str, Any]) -> Figure:
    """Milliseconds of a training step."""
    groups = {
        row["network"]: {n: 1e3 * of["latency"]["median_s"] for n, of in row["backends"].items()}
        for row in data["networks"]
    }
    return _bars("A training step", "ms; shorter is faster", groups)


def serving(data: Mapping[str, Any]) -> Figure:
    """Tokens per second of ``generate``."""
    groups = {
        f"{row['network']}, {row['cache']} cache": {
            n: row["tokens"] / of["latency"]["median_s"] for n, of in row["backends"].items()
        }
        for row in data["rows"]
    }
    return _bars("generate(): greedy tokens", "tokens per second; longer is faster", groups)


def decode(data: Mapping[str, Any]) -> Figure | None:
    """Tokens per second against bits, a panel for each model: best of each runtime on a line."""
    rows = [r for r in data["rows"].values() if not r["prefill"]]
    models = list(dict.fromkeys(r["model"] for r in rows))
    if not models:
        return None
    columns = min(2, len(models))
    lines = -(-len(models) // columns)
    figure = Figure(figsize=(4.6 * columns + 1, 3.6 * lines + 0.6), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, model in zip(panels, models, strict=False):
        _decode_panel(axes, [r for r in rows if r["model"] == model])
    for axes in panels[len(models) :]:
        axes.set_axis_off()
    labels = {t: h for a in panels for h, t in zip(*a.get_legend_handles_labels(), strict=True)}
    figure.legend(
        labels.values(), labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8
    )
    return figure


def _decode_panel(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    rows = sorted(rows, key=lambda row: -row["bits"])
    at = {row["bits"]: k for k, row in enumerate(rows)}
    for runtime, (marker, colour) in RUNTIMES.items():
        rates = {r["bits"]: _rates(r, runtime) for r in rows if _rates(r, runtime)}
        points = [(at[bits], rate) for bits, of in rates.items() for rate in of]
        if points:
            axes.scatter(*zip(*points, strict=True), marker=marker, color=colour, s=22, zorder=3)
            best = [(at[bits], max(of)) for bits, of in rates.items()]
            style = {"color": colour, "marker": marker, "linewidth": 1.2, "markersize": 5}
            axes.plot(*zip(*best, strict=True), label=runtime, zorder=3, **style)
    bound = [(at[r["bits"]], r["read_bytes_per_s"] / least) for r in rows if (least := _least(r))]
    if bound:
        style = {"color": "#111827", "linestyle": ":", "label": "streaming read"}
        axes.plot(*zip(*bound, strict=True), zorder=2, **style)
    axes.set_xticks(range(len(rows)), [str(row["bits"]) for row in rows])
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(FuncFormatter(_two_and_five))
    axes.grid(color="#e3e6ec", zorder=0, which="both")
    axes.set_xlabel("bits of a weight")
    axes.set_ylabel("tokens per second")
    axes.set_title(rows[0]["title"], loc="left")


def _rates(row: Mapping[str, Any], runtime: str) -> list[float]:
    """Tokens per second of a runtime's contestants that were timed."""
    of = row["contestants"]
    names = [n for n in of if n == runtime or n.startswith(f"{runtime}-")]
    return [1 / of[n]["latency"]["median_s"] for n in names if "latency" in of[n]]


def _least(row: Mapping[str, Any]) -> int | None:
    """The bytes of the smallest format that was timed."""
    timed = [c["weight_bytes"] for c in row["contestants"].values() if "latency" in c]
    return min(timed, default=None)


def _two_and_five(value: float, _: object) -> str:
    digit = round(value / 10 ** math.floor(math.log10(value)))
    return f"{value:g}" if digit in (2, 5) else ""


def _times(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis of ratios with plain numbers."""
    axes.set_xscale("log")
    axes.set_xlim(min(0.85, 0.95 * min(values)), 1.1 * max(values))
    low, high = axes.get_xlim()
    ticks = [t for t in (0.5, 0.75, 1, 1.25, 1.5, 2, 3, 4, 6, 8) if low <= t <= high]
    axes.set_xticks(ticks)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))


def _median(row: Mapping[str, Any], name: str) -> float | None:
    found = row.get("contestants", {}).get(name, {}).get("latency")
    return float(found["median_s"]) if found else None


def _ratios(row: Mapping[str, Any]) -> dict[str, float]:
    ours = _median(row, OURS)
    assert ours
    found = {name: _median(row, name) for name in STYLES}
    return {name: seconds / ours for name, seconds in found.items() if seconds}


CHARTS: Mapping[str, tuple[str, Callable[[Any], Figure | None]]] = {
    "peers.png": ("peers.json", peers),
    "dynamic.png": ("dynamic.json", dynamic),
    "serving.png": ("serving.json", serving),
    "decode_bits.png": ("decode.json", decode),
    "training.png": ("training.json", training),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.charts", description=__doc__)
    parser.add_argument("--docs", type=Path, default=DOCS, help="where data/ is and pictures go")
    options = parser.parse_args(arguments)
    for picture, (source, draw) in CHARTS.items():
        path = options.docs / "data" / source
        if not path.exists():
            print(f"{picture}: there is no {source}")
            continue
        figure = draw(json.loads(path.read_text()))
        if figure is not None:
            FigureCanvasAgg(figure)
            figure.savefig(options.docs / picture, format="png", dpi=130)
            print(f"{picture}: drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
