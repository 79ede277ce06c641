"""A search space of one's own: more accumulators for products of a few rows.

A row times a matrix keeps as many sums in flight as it has vectors of columns, and a core that
multiplies and adds every half cycle with a latency of four wants eight; the built-in space stops at
six. The space below goes on to twelve for up to two rows, and leaves everything else as it is.

python examples/new_sketch.py
"""

from __future__ import annotations

import statistics
import tempfile
import time
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

import torch_pruner
from torch_pruner.families import drop_space, use_space
from torch_pruner.families.contraction.space import ContractionSketch
from torch_pruner.graph.contraction import contraction_of

if TYPE_CHECKING:
    from torch_pruner.task import Task


class FewRows(ContractionSketch):
    """``ContractionSketch`` with register tiles of up to twelve vectors."""

    @staticmethod
    def fits(task: Task) -> bool:
        return contraction_of(task.spec).rows <= 2

    @cached_property
    def domains(self) -> tuple[np.ndarray, ...]:
        options = dict(zip(self.names, super().domains, strict=True))
        vectors = -(-self.con.n // self.lanes)
        options["nv"] = np.array([v for v in (1, 2, 3, 4, 6, 8, 12) if v <= vectors])
        return tuple(options.values())


def tuned(layer: nn.Module, x: torch.Tensor) -> tuple[object, str]:
    """The compiled layer, tuned into a cache of its own, and what its product runs as."""
    with tempfile.TemporaryDirectory(prefix="new-sketch-") as folder:
        torch._dynamo.reset()
        options = {"cache_dir": folder, "time_budget_s": 10.0, "library": False}
        compiled = torch.compile(layer, backend="pruner", options=options)
        compiled(x)
    report = torch_pruner.last_report()
    product = max(report.tasks, key=lambda t: t.flops)
    seconds = product.latency_after_s
    return compiled, f"{1e6 * seconds:.1f} us" if seconds else "not timed"


def main() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(512, 1024).eval(), torch.randn(1, 512)
    with torch.no_grad():
        calls = {}
        calls["built-in"], built_in = tuned(layer, x)
        print(f"product in the built-in space: {built_in}")
        use_space(FewRows)
        calls["with the new space"], new = tuned(layer, x)
        drop_space(FewRows)
        print(f"product in the new space: {new}")
        calls["eager"] = layer
        for name, seconds in latencies(calls, x).items():
            error = (calls[name](x) - layer(x)).abs().max().item()
            print(f"{name:>20}: {1e6 * seconds:7.1f} us a call, off by {error:.1e}")


def latencies(calls: dict, x: torch.Tensor) -> dict[str, float]:
    """Median seconds per call; all take turns."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(200):
        for name, call in calls.items():
            call(x)
            start = time.perf_counter()
            call(x)
            samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in samples.items()}


if __name__ == "__main__":
    main()
