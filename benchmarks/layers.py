"""Operators and subgraphs alone, all in one process: ours beside eager, inductor and the runtimes.

    python -m benchmarks.layers --batches 1,16 --data layers.json

One row for each operator and batch, written as it comes; a run that was interrupted goes on where
it stopped. A call is that of a program which has nothing else to do, what torch.compile itself
needs included, and results are in torch's own layout, as are the operands.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import accuracy, models, tables, timing
from benchmarks.arguments import add_tuning, backend_options, read_json, write_json
from benchmarks.contestants import FROM_ONNX, PREPARE, Setting, as_tensors
from benchmarks.conversion import Conversion
from benchmarks.conversion import run as convert
from benchmarks.regret import geometric_mean

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Timings = dict[str, dict[str, Any]]

PEERS = "eager,onnxruntime,openvino,inductor"
SHAPES = "1234"
BOUND = 1e-3  # of the largest magnitude, from eager's
LONG_S = 0.3  # a call that takes longer takes shorter turns
SHORT_TURNS = {"wake": 1, "per_turn": 2}
TURNS = {"wake": timing.WAKE, "per_turn": timing.PER_TURN}


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    names = [n for n, network in models.NETWORKS.items() if network.kind == "operator"]
    if options.networks:
        names = [n for n in names if n.startswith(tuple(options.networks.split(",")))]
    content = read_json(options.data) or {}
    rows: dict[str, Timings] = content.get("rows", {})
    with tempfile.TemporaryDirectory(prefix="layers-") as folder:
        for name in names:
            for batch in map(int, options.batches.split(",")):
                key = f"{name}/{batch}"
                if key not in rows:
                    rows[key] = measure(name, batch, options, Path(folder))
                    write_json(options.data, {"machine": timing.machine(), "rows": rows})
                    print(_line(key, rows[key]), flush=True)
    print("\n" + render(rows))
    return 0


def measure(name: str, batch: int, options: argparse.Namespace, folder: Path) -> Timings:
    """Of each contestant its times, or why it has none."""
    torch._dynamo.reset()
    module, inputs = models.load(name, torch.float32, batch, None)
    path = str(folder / f"{name}-{batch}.onnx")
    contestants = [*options.peers.split(","), "pruner"]
    if set(FROM_ONNX) & set(contestants):
        with contextlib.redirect_stdout(io.StringIO()):
            convert(Conversion(name, "float32", batch, None, path))
    ours = {"cache_dir": str(folder / "cache")} | backend_options(options)
    threads = options.threads or torch.get_num_threads()
    files = dict.fromkeys(FROM_ONNX, path)
    setting = Setting(module, inputs, "float32", threads, ours, onnx=files)
    found: Timings = {}
    calls: dict[str, Callable[[], object]] = {}
    with torch.no_grad():
        expected = models.call(module, inputs)
        for contestant in contestants:
            try:
                call = PREPARE[contestant](setting)
                off = accuracy.difference(as_tensors(call()), expected)
            except Exception as err:
                found[contestant] = {"reason": f"{type(err).__name__}: {err}"[:200]}
                continue
            found[contestant] = {"difference": off}
            if off <= BOUND:
                calls[contestant] = call
        once = timing.interleave(calls, rounds=1)
        long = max(t.median_s for t in once.values()) > LONG_S
        rounds = options.rounds // 3 if long else options.rounds
        turns = SHORT_TURNS if long else TURNS
        times = timing.interleave(calls, rounds=rounds, pause_s=options.pause, **turns)
    for contestant, t in times.items():
        found[contestant]["latency"] = t.to_json()
    return found


def _ratio(row: Timings, field: str) -> float | None:
    """The best peer's time over ours; None where there are not both."""
    times = {n: of["latency"][field] for n, of in row.items() if "latency" in of}
    ours = times.pop("pruner", None)
    return min(times.values()) / ours if ours and times else None


def _line(key: str, row: Timings) -> str:
    cells = [
        f"{n} {timing.duration(of['latency']['median_s'])}" if "latency" in of else f"{n} -"
        for n, of in row.items()
    ]
    ratio = _ratio(row, "median_s")
    return f"{key}: {ratio:.2f}; " + ", ".join(cells) if ratio else f"{key}: " + ", ".join(cells)


def render(rows: dict[str, Timings]) -> str:
    """A line for each operator and batch: the best peer's time over ours, by shape and on average.

    In brackets by least times.
    """
    groups: dict[tuple[str, str], dict[str, Timings]] = {}
    for key, row in rows.items():
        name, _, batch = key.partition("/")
        operator, _, shape = name.rpartition("_")
        groups.setdefault((operator, batch), {})[shape] = row
    lines = []
    for (name, batch), of in groups.items():
        cells = [_cell(of[shape]) if shape in of else "" for shape in SHAPES]
        lines.append([name, batch, *cells, _mean(of.values())])
    lines.append(["all", "", *[""] * 4, _mean(rows.values())])
    return tables.markdown(["operator", "batch", *SHAPES, "geometric mean"], lines)


def _cell(row: Timings) -> str:
    median, least = _ratio(row, "median_s"), _ratio(row, "min_s")
    return f"{median:.2f} ({least:.2f})" if median and least else "-"


def _mean(rows: Iterable[Timings]) -> str:
    cells = []
    for field in ("median_s", "min_s"):
        known = [r for row in rows if (r := _ratio(row, field)) is not None]
        cells.append(f"{geometric_mean(known):.2f}" if known else "-")
    return f"{cells[0]} ({cells[1]})"


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.layers", description=__doc__)
    parser.add_argument("--networks", help="what names begin with, by comma; default: all")
    parser.add_argument("--batches", default="1,16")
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--pause", type=float, default=0.12, help="before each turn, in seconds")
    parser.add_argument("--data", help="JSON of the rows, which a later run goes on with")
    add_tuning(parser)
    parser.set_defaults(effort="none")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
