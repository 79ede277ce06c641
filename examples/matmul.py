"""One matrix product with its bias and activation, tuned: the smallest use of the backend.

python examples/matmul.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS, INPUTS, OUTPUTS = 128, 768, 3072


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="pruner")
    backend = parser.parse_args().backend
    options = {"time_budget_s": 20.0} if backend == "pruner" else None

    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(INPUTS, OUTPUTS), nn.GELU()).eval()
    x = torch.randn(ROWS, INPUTS)
    compiled = torch.compile(layer, backend=backend, options=options)

    with torch.no_grad():
        start = time.perf_counter()
        result = compiled(x)
        print(f"first call, with tuning: {time.perf_counter() - start:.1f} s")
        difference = (result - layer(x)).abs().max().item()
        print(f"largest difference from eager: {difference:.1e}")
        for name, seconds in latencies({"eager": layer, backend: compiled}, x).items():
            gflops = 2 * ROWS * INPUTS * OUTPUTS / seconds / 1e9
            print(f"{name:>10}: {1e3 * seconds:7.3f} ms  {gflops:6.0f} GFLOP/s")

    if backend == "pruner":
        import torch_pruner

        print(torch_pruner.last_report())


def latencies(functions: dict[str, Callable], x: torch.Tensor) -> dict[str, float]:
    """Median seconds per call; the functions take turns."""
    samples: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(50):
        for name, function in functions.items():
            function(x)
            start = time.perf_counter()
            function(x)
            samples[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in samples.items()}


if __name__ == "__main__":
    main()
