"""One compiled convolution network, many image sizes and batches: programs, and what they cost.

Images of ``SIDES`` and batches of ``BATCHES`` in random order through one function, compiled with
``dynamic=True``. Beside it one that was compiled for that size alone, with a cache of its own. Per
size: the difference from eager, what the first call took, what it compiled, and latencies in turns.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import accuracy, models, tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from benchmarks.dynamic import STATIC, geometric_mean
from benchmarks.job import timed
from torch_pruner.dynamo.run import reports

SIDES = tuple(range(160, 321, 32))
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16)


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
    rows = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for batch, side in options.sizes or some_sizes(options.count, options.most):
            generator = torch.Generator().manual_seed(side)
            x = torch.randn(batch, 3, side, side, generator=generator)
            with reports.collect() as programs:
                first = [timed(lambda x=x: shared(x))[1] for _ in range(2)]
            wanted, eager_s = timed(lambda x=x: module(x))
            alone = torch.compile(
                copy.deepcopy(module), backend="pruner", dynamic=False,
                options=ours | {"cache_dir": str(folder / "alone")},
            )  # fmt: skip
            calls = {
                "pruner": lambda x=x: shared(x),
                STATIC: lambda x=x, alone=alone: alone(x),
            }
            calls[STATIC]()
            timings = timing.interleave(
                calls, warmup=1, rounds=options.rounds, pause_s=timing.PAUSE_S, per_turn=2
            )
            rows.append(
                {
                    "batch": batch,
                    "side": side,
                    "programs": [graph.name for graph in programs],
                    "first_calls_s": first,
                    "eager_s": eager_s,
                    "difference": accuracy.difference([shared(x)], [wanted]),
                    "latency": {name: t.to_json() for name, t in timings.items()},
                }
            )
            print(batch, side, {k: timing.duration(t.median_s) for k, t in timings.items()})
    return {
        "machine": timing.machine(),
        "network": options.network,
        "options": ours,
        "sizes": rows,
    }


def size(text: str) -> tuple[int, int]:
    """``4x224``: a batch and a side."""
    batch, side = text.split("x")
    return int(batch), int(side)


def shares(result: dict[str, Any]) -> list[float]:
    """Of the speed of a size's own program, for each size."""
    medians = [{k: t["median_s"] for k, t in row["latency"].items()} for row in result["sizes"]]
    return [m[STATIC] / m["pruner"] for m in medians]


def render(result: dict[str, Any]) -> str:
    """A line for each size; programs, the geometric mean of shares and the worst difference."""
    lines, names = [], (STATIC, "pruner")
    for row, share in zip(result["sizes"], shares(result), strict=True):
        cells = [timing.duration(row["latency"][name]["median_s"]) for name in names]
        first, eager = (timing.duration(s) for s in (row["first_calls_s"][0], row["eager_s"]))
        made = ", ".join(row["programs"]) or "-"
        lines.append([f"{row['batch']}x{row['side']}", *cells, f"{share:.2f}", eager, first, made])
    header = ["size", *names, "share of static", "eager once", "first call", "compiled"]
    programs = [name for row in result["sizes"] for name in row["programs"]]
    worst = max(row["difference"] for row in result["sizes"])
    return tables.markdown(header, lines) + (
        f"\n\n{len(lines)} sizes, {len(programs)} programs; {geometric_mean(shares(result)):.2f} of"
        f" static programs' speed in geometric mean, least {min(shares(result)):.2f}; largest"
        f" difference from eager {worst:.1e} of the largest output."
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.image_sizes", description=__doc__)
    parser.add_argument("--network", default="resnet50", choices=["resnet18", "resnet50"])
    parser.add_argument("--count", type=int, default=8, help="how many sizes")
    parser.add_argument("--sizes", type=size, nargs="+", help="these, in order: 4x224 4x160")
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
