"""One compiled convolution network, many image sizes and batches: programs, and what they cost.

Images of ``SIDES`` and batches of ``BATCHES`` in random order through one function, compiled with
``dynamic=True``. Beside it one that was compiled for that size alone, with a cache of its own. Per
size: the difference from eager, what the first call took, what it compiled, and latencies in turns.
``--every`` calls it with every side and every batch up to ``--most``; ``--count`` of them have a
program of their own beside it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import accuracy, models, tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from benchmarks.dynamic import STATIC, geometric_mean
from benchmarks.job import timed
from torch_pruner.dynamo.run import reports

if TYPE_CHECKING:
    from collections.abc import Callable

SIDES = tuple(range(160, 321, 32))
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)


def every_size(most: int, seed: int = 0) -> list[tuple[int, int]]:
    """All pairs of a batch, 1 to ``most``, and a side, in random order."""
    found = list(itertools.product(range(1, most + 1), SIDES))
    random.Random(seed).shuffle(found)
    return found


def some_sizes(count: int, most: int, seed: int = 0) -> list[tuple[int, int]]:
    """Pairs of a batch, at most ``most``, and a side, in random order; every side in turn."""
    order = random.Random(seed)
    batches = [batch for batch in BATCHES if batch <= most]
    found: list[tuple[int, int]] = []
    for side in itertools.islice(itertools.cycle(SIDES), count):
        left = [batch for batch in batches if (batch, side) not in found]
        if left:
            found.append((order.choice(left), side))
    order.shuffle(found)
    return found


@torch.no_grad()
def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """What each size took, in a program for many and in one of its own."""
    module, _ = models.load(options.network)
    ours = backend_options(options)
    shared = torch.compile(
        module, backend="pruner", dynamic=True, options=ours | {"cache_dir": str(folder / "shared")}
    )
    compared = options.sizes or some_sizes(options.count, options.most)
    rows = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for batch, side in every_size(options.most) if options.every else compared:
            generator = torch.Generator().manual_seed(side)
            x = torch.randn(batch, 3, side, side, generator=generator)
            before = captures()
            with reports.collect() as programs:
                first = [timed(partial(shared, x))[1] for _ in range(2)]
            captured = captures() - before
            wanted, eager_s = timed(partial(module, x))
            row: dict[str, Any] = {
                "batch": batch,
                "side": side,
                "programs": [graph.name for graph in programs],
                "captures": captured,
                "first_calls_s": first,
                "eager_s": eager_s,
                "difference": accuracy.difference([shared(x)], [wanted]),
            }
            if (batch, side) in compared:
                alone = torch.compile(
                    copy.deepcopy(module), backend="pruner", dynamic=False,
                    options=ours | {"cache_dir": str(folder / "alone")},
                )  # fmt: skip
                timings = in_turns({"pruner": shared, STATIC: alone}, x, options.rounds)
                row["latency"] = {name: t.to_json() for name, t in timings.items()}
                print(batch, side, {k: timing.duration(t.median_s) for k, t in timings.items()})
            rows.append(row)
    return {
        "machine": timing.machine(),
        "network": options.network,
        "options": ours,
        "sizes": rows,
    }


def captures() -> int:
    """How many graphs Dynamo has captured in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def in_turns(
    ways: dict[str, Callable[[torch.Tensor], Any]], x: torch.Tensor, rounds: int
) -> dict[str, timing.Timing]:
    """Latencies of one size, after a first call of each."""
    calls = {name: partial(way, x) for name, way in ways.items()}
    for call in calls.values():
        call()
    return timing.interleave(calls, warmup=1, rounds=rounds, pause_s=timing.PAUSE_S, per_turn=2)


def size(text: str) -> tuple[int, int]:
    """``4x224``: a batch and a side."""
    batch, side = text.split("x")
    return int(batch), int(side)


def shares(rows: list[dict[str, Any]]) -> list[float]:
    """Of the speed of a size's own program, for each size that has one."""
    medians = [{k: t["median_s"] for k, t in row["latency"].items()} for row in rows]
    return [m[STATIC] / m["pruner"] for m in medians]


def stalls(rows: list[dict[str, Any]]) -> list[float]:
    """Seconds that the first two calls took longer than one of eager's; nothing was captured."""
    known = [row for row in rows if not (row["programs"] or row["captures"])]
    return [max(row["first_calls_s"]) - row["eager_s"] for row in known]


def render(result: dict[str, Any]) -> str:
    """A line for each size with a program of its own, or that was captured; then the sums."""
    rows, lines, names = result["sizes"], [], (STATIC, "pruner")
    compared = [row for row in rows if "latency" in row]
    for row in rows:
        if "latency" not in row and not (row["programs"] or row["captures"]):
            continue
        cells, share = ["-"] * len(names), "-"
        if "latency" in row:
            cells = [timing.duration(row["latency"][name]["median_s"]) for name in names]
            share = f"{shares([row])[0]:.2f}"
        first, eager = (timing.duration(s) for s in (row["first_calls_s"][0], row["eager_s"]))
        made = ", ".join(row["programs"]) or ("captured only" if row["captures"] else "-")
        lines.append([f"{row['batch']}x{row['side']}", *cells, share, eager, first, made])
    header = ["size", *names, "share of static", "eager once", "first call", "compiled"]
    programs = [name for row in rows for name in row["programs"]]
    worst, found = max(row["difference"] for row in rows), shares(compared)
    slowest = f"{1e3 * max(stalls(rows)):.0f} ms over eager" if stalls(rows) else "none"
    return tables.markdown(header, lines) + (
        f"\n\n{len(rows)} sizes, {sum(row['captures'] for row in rows)} captures,"
        f" {len(programs)} programs; {geometric_mean(found):.2f} of"
        f" static programs' speed in geometric mean of {len(found)}, least {min(found):.2f};"
        f" slowest call where nothing was captured: {slowest}; largest difference from eager"
        f" {worst:.1e} of the largest output."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_sizes", description=__doc__)
    parser.add_argument("--network", default="resnet50", choices=["resnet18", "resnet50"])
    parser.add_argument("--count", type=int, default=8, help="how many sizes")
    parser.add_argument("--sizes", type=size, nargs="+", help="these, in order: 4x224 4x160")
    parser.add_argument("--every", action="store_true", help="all sides and batches")
    parser.add_argument("--most", type=int, default=16, help="the largest batch")
    add_tuning(parser)
    parser.set_defaults(effort="none")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/image_sizes.json")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="images-") as folder:
        result = measure(options, Path(options.cache_dir or folder))
    print(render(result))
    write_json(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
