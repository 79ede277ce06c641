"""A step of an optimizer, compiled as a function, beside eager, eager's fused one and inductor.

    python -m benchmarks.optimizers [--optimizers adamw,sgd] [--networks mlp,bert_base/4]

Every contestant has a copy of the same parameters, with the same gradients at every step. What is
compiled is ``optimizer.step``; eager's fused step, of optimizers that have one, is no compiler's.
"""

from __future__ import annotations

import argparse
import copy
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from benchmarks import models, tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from benchmarks.job import compiled, timed

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-4}),
    "sgd": (torch.optim.SGD, {"lr": 1e-4, "momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-4}),
}
FUSED = frozenset(("adamw", "sgd"))
STEPS = 3  # before anything is timed; after them parameters are compared
TOLERANCE = 1e-5  # of a parameter after these, over the largest


def network(text: str) -> nn.Module:
    """``mlp``: 48 small tensors; else a network of ``benchmarks.models``, as ``bert_base/4``."""
    if text == "mlp":
        blocks = (nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256)) for _ in range(12))
        return nn.Sequential(*blocks)
    name, _, layers = text.partition("/")
    return models.load(name, layers=int(layers) if layers else None)[0]


def stepper(
    module: nn.Module, optimizer: str, backend: str, options: argparse.Namespace
) -> tuple[nn.Module, Callable[[], object]]:
    """A copy of the parameters, and what takes a step of all of them."""
    own = copy.deepcopy(module)
    for k, p in enumerate(own.parameters()):
        generator = torch.Generator().manual_seed(k)
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
    make, settings = OPTIMIZERS[optimizer]
    fused = {"fused": True} if backend == "fused" else {}
    step = make(own.parameters(), **settings, **fused).step
    if backend in ("eager", "fused"):
        return own, step
    return own, compiled(lambda: step(), backend, backend_options(options))


def measure(text: str, optimizer: str, options: argparse.Namespace) -> dict[str, Any]:
    """Latencies of steps in turns, and how far parameters are from eager's. Raises
    ``ArithmeticError`` where they are too far."""
    module = network(text)
    names = ["eager", *(["fused"] if optimizer in FUSED else []), "inductor", "pruner"]
    found: dict[str, dict[str, Any]] = {}
    own: dict[str, nn.Module] = {}
    calls: dict[str, Callable[[], object]] = {}
    for backend in names:
        own[backend], calls[backend] = stepper(module, optimizer, backend, options)
        _, first_s = timed(calls[backend])
        for _ in range(STEPS - 1):
            calls[backend]()
        off = _difference(own[backend], own["eager"])
        if off > TOLERANCE:
            raise ArithmeticError(f"{backend}'s parameters are off by {off:.1e}")
        found[backend] = {"first_step_s": first_s, "difference": off}
    timings = timing.interleave(calls, rounds=options.rounds, pause_s=0.02)
    for backend, t in timings.items():
        found[backend]["latency"] = t.to_json()
    numbers = sum(p.numel() for p in module.parameters())
    return {"network": text, "optimizer": optimizer, "numbers": numbers, "backends": found}


def _difference(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    with torch.no_grad():
        return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def render(rows: Sequence[dict[str, Any]]) -> str:
    """A line for each optimizer, network and contestant."""
    lines = []
    for row in rows:
        base = row["backends"]["pruner"]["latency"]["median_s"]
        for name, of in row["backends"].items():
            t = timing.Timing(**of["latency"])
            lines.append(
                [
                    f"{row['optimizer']}, {row['network']} ({row['numbers'] / 1e6:.1f} M), {name}",
                    timing.duration(t.median_s),
                    timing.spread(t),
                    f"{t.median_s / base:.2f}x",
                    timing.duration(of["first_step_s"]),
                ]
            )
    return tables.plain(["", "a step", "quartiles", "over pruner's", "first step"], lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.optimizers", description=__doc__)
    parser.add_argument("--optimizers", default="adamw,sgd", help=", ".join(OPTIMIZERS))
    parser.add_argument("--networks", default="mlp,bert_base/4", help="names, by comma")
    add_tuning(parser)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data", help="write the figures there, as JSON")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = []
    for text in options.networks.split(","):
        for optimizer in options.optimizers.split(","):
            rows.append(measure(text, optimizer, options))
            torch._dynamo.reset()
    of = timing.machine()
    print(timing.machine_line(of))
    print(render(rows))
    write_json(options.data, {"machine": of, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
