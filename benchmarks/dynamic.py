"""One compiled BERT, many sequence lengths: each length beside inductor with ``dynamic=True``.

The first capture is tuned, for every length; lengths come in random order. Contestants: eager,
inductor dynamic, pruner dynamic, and for some lengths pruner static, tuned as long. Per length:
what the first calls with it took, and then latencies in turns. ``--lengths every`` calls a model
that was compiled without a word about sizes with every length from 2 to the longest, in random
order: results beside eager's, programs, captures, and how much longer than eager's first calls
took.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import statistics
import sys
import tempfile
from typing import TYPE_CHECKING, Any

import torch
from torch._dynamo.utils import counters

from benchmarks import accuracy, models, tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from benchmarks.job import timed
from torch_pruner.dynamo.run import reports

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

LONGEST = 512
BUCKETS = (64, 128, 256, 512)
BACKENDS = ("inductor", "pruner")
STATIC = "pruner static"
FIRST = 3  # calls with a new length: then nothing changes


def tokens(length: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(length)
    return {"input_ids": torch.randint(30522, (1, length), generator=generator)}


def some_lengths(count: int, seed: int = 0) -> list[int]:
    """Those that static programs are made for, too, and as many others, in random order."""
    others = [n for n in range(2, LONGEST) if n not in BUCKETS]
    order = random.Random(seed)
    found = [*BUCKETS, *order.sample(others, count - len(BUCKETS))]
    order.shuffle(found)
    return found


def dynamic(module: nn.Module, backend: str, options: dict[str, Any]) -> Callable[..., Any]:
    if backend == "pruner":
        return torch.compile(module, backend="pruner", dynamic=True, options=options)
    return torch.compile(module, backend=backend, dynamic=True)


@torch.no_grad()
def measure(options: argparse.Namespace, cache_dir: str) -> dict[str, Any]:
    """Latencies of some lengths."""
    module, _ = models.load(options.network, layers=options.layers)
    ours = backend_options(options) | {"cache_dir": cache_dir}
    lengths = some_lengths(options.count)
    calls = {name: dynamic(module, name, ours) for name in BACKENDS}
    # The first capture is for symbols, so that no backend gets a graph for one length alone.
    with reports.collect() as programs:
        first = {name: _first_call(call, tokens(BUCKETS[1])) for name, call in calls.items()}
    static = torch.compile(copy.deepcopy(module), backend="pruner", dynamic=False, options=ours)
    rows = []
    with torch._dynamo.config.patch(recompile_limit=64):
        for n in BUCKETS:
            static(**tokens(n))
        for n in lengths:
            given = tokens(n)
            contest = {name: _call(call, given) for name, call in calls.items()}
            with reports.collect() as made:
                new = {
                    name: [timed(c)[1] for _ in range(FIRST if name == "pruner" else 2)]
                    for name, c in contest.items()
                }
            programs += made
            if n in BUCKETS:
                contest[STATIC] = _call(static, given)
            contest["eager"] = _call(module, given)
            timings = timing.in_turns(contest, rounds=options.rounds, min_seconds=options.seconds)
            latency = {name: t.to_json() for name, t in timings.items()}
            rows.append({"length": n, "first_calls_s": new, "latency": latency})
            print(n, {k: timing.duration(t.median_s) for k, t in timings.items()}, flush=True)
    return {
        "machine": timing.machine(),
        "network": options.network,
        "layers": options.layers,
        "options": backend_options(options),
        "programs": [graph.name for graph in programs],
        "capture_s": first,
        "lengths": rows,
    }


@torch.no_grad()
def compare(options: argparse.Namespace, cache_dir: str) -> dict[str, Any]:
    """Differences from eager of every length, what was compiled, and which calls took long."""
    module, _ = models.load(options.network, layers=options.layers)
    ours = backend_options(options) | {"cache_dir": cache_dir}
    before = counters["stats"]["unique_graphs"]
    call = torch.compile(module, backend="pruner", options=ours)
    lengths = list(range(2, LONGEST + 1, options.step))
    random.Random(0).shuffle(lengths)
    rows: list[dict[str, float]] = []
    with reports.collect() as programs:
        for n in lengths:
            given = tokens(n)
            wanted, eager_s = timed(_call(module, given))
            made = len(programs)
            got, first_s = timed(_call(call, given))
            worst = accuracy.difference(_outputs(got), _outputs(wanted))
            rows.append(
                {
                    "length": n,
                    "eager_s": eager_s,
                    "first_s": first_s,
                    "again_s": timed(_call(call, given))[1],
                    "difference": worst,
                    "programs": len(programs) - made,
                }
            )
    return {
        "machine": timing.machine(),
        "network": options.network,
        "layers": options.layers,
        "options": backend_options(options),
        "graphs": counters["stats"]["unique_graphs"] - before,
        "programs": [graph.name for graph in programs],
        "lengths": rows,
    }


def described(result: dict[str, Any]) -> str:
    """What ``compare`` found, in words."""
    rows = result["lengths"]
    ready = [row for row in rows if not row["programs"]]
    slowest = max(ready, key=lambda row: row["first_s"] - row["eager_s"])
    over, eager = 1e3 * (slowest["first_s"] - slowest["eager_s"]), 1e3 * slowest["eager_s"]
    return (
        f"{len(rows)} lengths, {result['graphs']} captured graphs, programs "
        f"{', '.join(result['programs'])}; largest difference from eager "
        f"{max(row['difference'] for row in rows):.1e} of the largest output; of the calls that "
        f"compiled nothing the slowest took {over:+.1f} ms over eager's {eager:.1f} "
        f"(length {slowest['length']})"
    )


def _outputs(value: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(value.to_tuple()) if t is not None]


def _call(function: Callable[..., Any], given: dict[str, torch.Tensor]) -> Callable[[], Any]:
    return lambda: function(**given)


def _first_call(call: Callable[..., Any], given: dict[str, torch.Tensor]) -> float:
    return timed(_call(call, given))[1]


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def summary(result: dict[str, Any]) -> dict[str, float]:
    """How many times faster than inductor and eager, and than our static kernels at buckets."""
    found: dict[str, list[float]] = {"inductor": [], "eager": [], STATIC: []}
    for row in result["lengths"]:
        median = {name: t["median_s"] for name, t in row["latency"].items()}
        for name in found.keys() & median.keys():
            found[name].append(median[name] / median["pruner"])
    return {name: geometric_mean(values) for name, values in found.items() if values}


def render(result: dict[str, Any]) -> str:
    """A line for each length, and the geometric means."""
    names = ["eager", "inductor", "pruner", STATIC]
    lines = []
    for row in result["lengths"]:
        median = {name: t["median_s"] for name, t in row["latency"].items()}
        cells = [timing.duration(median[n]) if n in median else "" for n in names]
        times = f"{median['inductor'] / median['pruner']:.2f}x"
        lines.append(
            [
                str(row["length"]),
                *cells,
                times,
                timing.duration(row["first_calls_s"]["pruner"][0]),
                timing.duration(max(row["first_calls_s"]["pruner"])),
            ]
        )
    header = ["length", *names, "vs inductor", "first call", f"longest of {FIRST}"]
    means = ", ".join(f"{name} {times:.2f}" for name, times in summary(result).items())
    return tables.markdown(header, lines) + f"\n\nGeometric mean of times faster than: {means}."


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dynamic", description=__doc__)
    parser.add_argument("--network", default="bert_tiny", choices=["bert_tiny", "bert_base"])
    parser.add_argument("--layers", type=int, help="default: the network's own")
    parser.add_argument("--lengths", default="some", choices=["some", "every"])
    parser.add_argument("--count", type=int, default=20, help="how many lengths are some")
    parser.add_argument("--step", type=int, default=1, help="every so many, of every")
    add_tuning(parser)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.1, help="at least, for each contestant")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/dynamic.json")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(prefix="dynamic-") as folder:
        if options.lengths == "every":
            result = compare(options, options.cache_dir or folder)
            print(described(result))
        else:
            result = measure(options, options.cache_dir or folder)
            print(render(result))
        write_json(options.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
