"""A training step, forward, backward and optimiser, beside eager and inductor.

Every contestant trains a copy of its own of the same network with the same data. What is compiled
is the network; the loss and the step of ``torch.optim.SGD`` are eager's everywhere. A network's
name may say how many of its layers: ``gpt2/4``. ``--autocast bfloat16`` runs the forward of all of
them in torch's mixed precision.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from benchmarks import models, tables, timing
from benchmarks.arguments import add_tuning, backend_options, write_json
from benchmarks.job import compiled, timed

if TYPE_CHECKING:
    from torch import nn

NETWORKS = ("bert_tiny", "gpt2/4", "vit_s", "resnet18", "resnet50", "unet")
RATE = 1e-4
# Of a loss, against eager's; inductor rounds to bfloat16 in other places than eager.
TOLERANCE = {"none": 1e-3, "bfloat16": 2e-2}


@dataclass(slots=True)
class Trainer:
    """One contestant; calling it is one step, whose loss it keeps."""

    module: nn.Module
    run: Any
    inputs: models.Inputs
    autocast: bool = False
    seed: int = 0
    losses: list[float] = field(default_factory=list)
    optimiser: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.optimiser = torch.optim.SGD(self.module.parameters(), lr=RATE)

    def __call__(self) -> None:
        torch.manual_seed(self.seed + len(self.losses))  # dropout draws the same for everybody
        self.optimiser.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            found = models.call(self.run, self.inputs)
        leaves = torch.utils._pytree.tree_leaves(_plain(found))
        loss = sum(t.float().square().mean() for t in leaves if isinstance(t, torch.Tensor))
        assert isinstance(loss, torch.Tensor)
        torch.autograd.backward(loss)
        self.optimiser.step()
        self.losses.append(float(loss.detach()))


def _plain(value: Any) -> Any:
    return value.to_tuple() if hasattr(value, "to_tuple") else value


def trainer(
    module: nn.Module, backend: str, options: argparse.Namespace, inputs: models.Inputs
) -> Trainer:
    own = copy.deepcopy(module)
    run = compiled(own, backend, backend_options(options))
    return Trainer(own, run, inputs, options.autocast != "none")


def measure(network: str, options: argparse.Namespace) -> dict[str, Any]:
    """First step, losses of a few steps, and latencies in turns."""
    name, _, layers = network.partition("/")
    module, inputs = models.load(name, batch=options.batch, layers=int(layers) if layers else None)
    module.train()
    found: dict[str, dict[str, Any]] = {}
    calls: dict[str, Trainer] = {}
    for backend in ("eager", *options.against.split(","), "pruner"):
        calls[backend] = trainer(module, backend, options, inputs)
        _, first_s = timed(calls[backend])
        for _ in range(options.check - 1):
            calls[backend]()
        found[backend] = {"first_step_s": first_s, "losses": calls[backend].losses[:]}
    expected = found["eager"]["losses"]
    for of in found.values():
        errors = [abs(a - b) / abs(b) for a, b in zip(of["losses"], expected, strict=True)]
        of["loss_difference"] = max(errors)
    timings = timing.in_turns(calls, rounds=options.rounds, min_seconds=options.seconds)
    for backend, t in timings.items():
        found[backend]["latency"] = t.to_json()
    return {"network": network, "batch": options.batch, "backends": found}


def render(result: dict[str, Any]) -> str:
    """A line for each network and contestant."""
    lines = []
    for row in result["networks"]:
        base = row["backends"]["pruner"]["latency"]["median_s"]
        for name, of in row["backends"].items():
            t = timing.Timing(**of["latency"])
            lines.append(
                [
                    f"{row['network']}, {name}",
                    timing.duration(t.median_s),
                    timing.spread(t),
                    f"{t.median_s / base:.2f}x",
                    f"{of['loss_difference']:.1e}",
                    timing.duration(of["first_step_s"]),
                ]
            )
    header = ["", "a step", "quartiles", "over pruner's", "loss off by", "first step"]
    return tables.plain(header, lines)


def beside(result: dict[str, Any]) -> str:
    """The geometric mean over networks, and the least, of each contestant's step over ours."""
    lines = []
    for name in result["networks"][0]["backends"]:
        ratios = [
            row["backends"][name]["latency"]["median_s"]
            / row["backends"]["pruner"]["latency"]["median_s"]
            for row in result["networks"]
        ]
        mean = statistics.geometric_mean(ratios)
        lines.append(f"{name} over pruner: {mean:.2f} in geometric mean, least {min(ratios):.2f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--networks", default=",".join(NETWORKS), help="names, by comma")
    parser.add_argument("--against", default="inductor", help="other backends, by comma")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--autocast", choices=list(TOLERANCE), default="none")
    parser.add_argument("--check", type=int, default=3, help="steps whose losses are compared")
    add_tuning(parser)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=0.2, help="at least, for each contestant")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/training.json")
    options = parser.parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    rows = [measure(name, options) for name in options.networks.split(",")]
    said = {**backend_options(options), "autocast": options.autocast}
    result = {"machine": timing.machine(), "options": said, "networks": rows}
    print(render(result))
    print(beside(result))
    write_json(options.out, result)
    worst = max(of["loss_difference"] for row in rows for of in row["backends"].values())
    return 0 if worst <= TOLERANCE[options.autocast] else 1


if __name__ == "__main__":
    sys.exit(main())
