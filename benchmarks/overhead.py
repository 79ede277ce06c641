"""What one call costs when there is almost nothing to compute.

Twenty linear + relu layers of 8x8 at batch 4 on one thread: some 10 microseconds of arithmetic, so
the rest is dispatch, allocation and guards.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import nn

from benchmarks import timing
from benchmarks.arguments import write_json
from benchmarks.job import compiled, timed

LAYERS, WIDTH, BATCH = 20, 8, 4


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    torch.set_num_threads(1)
    backends = [b for b in (*options.against.split(","), options.backend) if b]
    result = measure(list(dict.fromkeys(("eager", *backends))), options.rounds, options.seconds)
    print(f"{LAYERS} x (linear {WIDTH}x{WIDTH} + relu), batch {BATCH}, float32, one thread\n")
    timings = {name: timing.Timing(**t) for name, t in result["latency"].items()}
    print(timing.format_timings(timings, "eager"))
    write_json(options.out, result)
    return 0


def measure(backends: list[str], rounds: int, seconds: float) -> dict[str, Any]:
    """First call and latency of each backend on the same module."""
    torch.manual_seed(0)
    layers = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    module, x = nn.Sequential(*layers).eval(), torch.randn(BATCH, WIDTH)
    calls, first = {}, {}
    with torch.no_grad():
        for backend in backends:
            function = compiled(module, backend, {"threads": 1})
            calls[backend] = lambda function=function: function(x)
            _, first[backend] = timed(calls[backend])
        timings = timing.interleave(calls, rounds=rounds, min_seconds=seconds)
    return {
        "machine": timing.machine(),
        "first_call_s": first,
        "latency": {name: t.to_json() for name, t in timings.items()},
        "speed_against_eager": timing.ratios(timings, "eager"),
    }


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--backend", default="pruner")
    parser.add_argument("--against", default="inductor", help="other backends, by comma")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=1.0, help="at least, for each backend")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/overhead.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
