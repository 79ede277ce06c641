"""Compile a network with this backend and see what it is worth: ``make demo``.

Times the first call, compares outputs with eager, times eager, inductor and the compiled network
side by side, and says what was tuned. Run it twice: the second time nothing is tuned.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import accuracy, models, reports, tables, timing
from benchmarks.arguments import add_tuning, backend_options, network_names
from benchmarks.job import compiled, timed

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.models import Inputs

WIDTH = 96


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    ours = backend_options(options)
    correct = [demonstrate(name, options, ours) for name in options.networks]
    return 0 if all(correct) else 1


@dataclass(slots=True)
class Row:
    """One backend in the table."""

    call: Callable[[], object]
    first: str = "-"
    difference: float = 0.0


def demonstrate(name: str, options: argparse.Namespace, ours: dict[str, Any]) -> bool:
    """Prints one network's table; returns whether outputs agree with eager."""
    torch._dynamo.reset()
    module, inputs = models.load(name, models.PRECISIONS[options.precision])
    print("=" * WIDTH)
    print(f"{models.NETWORKS[name].title}, {options.precision}, {_shape(inputs)}")
    print(textwrap.fill(timing.machine_line(timing.machine()), WIDTH) + "\n")
    backends = [b for b in (*options.against.split(","), options.backend) if b not in ("", "eager")]
    report = None
    with torch.no_grad():
        reference = accuracy.float32_outputs(module, inputs)
        eager = Row(_call(module, inputs))
        eager.difference = accuracy.difference(eager.call(), reference)
        rows = {"eager": eager}
        for backend in dict.fromkeys(backends):
            print(f"compiling with {backend} ...", end=" ", flush=True)
            row = Row(_call(compiled(module, backend, ours), inputs))
            output, seconds = timed(row.call)
            report = reports.last(backend) or report
            row.first, row.difference = f"{seconds:.1f} s", accuracy.difference(output, reference)
            rows[backend] = row
            print(f"first call {row.first}")
        calls = {backend: row.call for backend, row in rows.items()}
        timings = timing.in_turns(calls, rounds=options.rounds, min_seconds=1.0)
    _print_latencies(rows, timings)
    if report is not None:
        _print_report(reports.summary(report), ours)
    worst = rows[options.backend].difference
    bound = accuracy.bound(options.precision, eager.difference)
    if not worst <= bound:
        print(f"\nFAILED: outputs are off by {worst:.1e}, more than {bound:.1e}.")
    return worst <= bound


def _print_latencies(rows: dict[str, Row], timings: dict[str, timing.Timing]) -> None:
    faster = timing.ratios(timings, "eager")
    lines = [
        [
            backend,
            rows[backend].first,
            timing.duration(t.median_s),
            timing.spread(t),
            f"{faster[backend]:.2f}x",
            f"{rows[backend].difference:.1e}",
        ]
        for backend, t in timings.items()
    ]
    header = ["", "first call", "median latency", "quartiles", "speed", "max difference"]
    print("\n" + tables.plain(header, lines))
    print("\nspeed: times faster than eager.")
    print("max difference: max|output - reference| / max|reference|; reference: eager in float32.")


def _print_report(summary: dict[str, Any], ours: dict[str, Any]) -> None:
    print()
    for line in reports.describe(summary):
        print(line)
    print(f"cache       {_cache_directory(ours)}")
    tuned, untuned = (summary["tasks"].get(source, 0) for source in ("tuned", "untuned"))
    if tuned:
        print(
            f"\nTuned {tuned} kernels by measuring {summary['candidates_measured']} candidates. "
            "Run this again and nothing is tuned."
        )
    else:
        print("\nNothing was tuned: kernels came from the cache or the library.")
    if untuned:
        print(f"{untuned} kernels run untuned: a larger --effort or --time-budget reaches them.")


def _cache_directory(ours: dict[str, Any]) -> str:
    from torch_pruner.config import Config

    return str(Config.from_options(options=ours).cache_root)


def _call(function: Callable[..., object], inputs: Inputs) -> Callable[[], object]:
    return lambda: models.call(function, inputs)


def _shape(inputs: Inputs) -> str:
    tensors = inputs if isinstance(inputs, tuple) else tuple(inputs.values())
    return ", ".join(f"input {tuple(tensor.shape)}" for tensor in tensors)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.demo", description=__doc__)
    parser.add_argument(
        "--networks",
        type=network_names,
        default=["bert_tiny"],
        metavar="NAME,...",
        help=", ".join(models.NETWORKS),
    )
    add_tuning(parser)
    parser.add_argument("--precision", default="float32", choices=sorted(models.PRECISIONS))
    parser.add_argument("--backend", default="pruner", help="what is demonstrated")
    parser.add_argument("--against", default="inductor", help="other backends to time, by comma")
    parser.add_argument("--rounds", type=int, default=20)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
