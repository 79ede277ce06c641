"""What looking at weights costs: ``weights="checked"`` and ``"live"`` in turns with ``"frozen"``.

BERT-base, MobileNet-V2 and a decoded token of Llama 12x768 with the same kernels ("live" has its
own, which pack whatever they pack at every call).
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import models, tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from benchmarks.decoding import shapes
from benchmarks.decoding.torch_models import TorchDecoder
from benchmarks.job import compiled

if TYPE_CHECKING:
    from collections.abc import Callable

DECODE = "llama_decode"
LENGTH = 256  # of its cache
MODES = ("frozen", "checked", "live")


def calls_of(name: str, options: dict[str, Any], modes: list[str]) -> dict[str, Callable[[], Any]]:
    """A compiled call in each mode; all of one module."""
    if name == DECODE:
        model = shapes.build("llama")
        given = {m: options | {"weights": m} for m in modes}
        return {m: TorchDecoder(model, "pruner", given[m], LENGTH).scores for m in modes}
    module, inputs = models.load(name)

    def call(mode: str) -> Callable[[], Any]:
        function = compiled(module, "pruner", options | {"weights": mode})
        return lambda: models.call(function, inputs)

    return {mode: call(mode) for mode in modes}


@torch.no_grad()
def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Latencies in turns, by network and mode."""
    if given.threads:
        torch.set_num_threads(given.threads)
    found = {}
    for name in given.networks.split(","):
        torch._dynamo.reset()
        calls = calls_of(name, backend_options(given), given.modes.split(","))
        timings = timing.interleave(calls, rounds=given.rounds, min_seconds=given.seconds)
        found[name] = {mode: t.to_json() for mode, t in timings.items()}
    return {"machine": timing.machine(), "options": backend_options(given), "networks": found}


def render(result: dict[str, Any]) -> str:
    """A line for each network and mode; the cost is beside ``frozen``."""
    lines = []
    for name, modes in result["networks"].items():
        base = timing.Timing(**modes[MODES[0]])
        for mode, of in modes.items():
            t = timing.Timing(**of)
            more = t.median_s - base.median_s
            cost = "" if mode == MODES[0] else f"{more * 1e6:.0f} us, {more / base.median_s:.2%}"
            lines.append([name, mode, timing.duration(t.median_s), timing.spread(t), cost])
    return tables.plain(["network", "weights", "a call", "quartiles", "costs"], lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument("--networks", default=f"bert_base,mobilenet_v2,{DECODE}")
    parser.add_argument("--modes", default=",".join(MODES))
    add_tuning(parser)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=5.0, help="at least, for each mode")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/weights.json")
    given = parser.parse_args(arguments)
    result = measure(given)
    print(render(result))
    write_json(given.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
