"""Training through the backend: forward and backward are both compiled.

Two copies of a small transformer start from the same weights and see the same batches; one trains
in eager mode, one compiled. Their losses must agree.

    python examples/train_step.py
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

TOKENS, WIDTH, BATCH, CLASSES = 32, 128, 8, 10
STEPS = 12


class Classifier(nn.Module):
    """Two transformer layers and the mean of what they say."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x).mean(dim=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="pruner")
    backend = parser.parse_args().backend
    options = {"time_budget_s": 15.0} if backend == "pruner" else None

    torch.manual_seed(0)
    eager = Classifier()
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, backend=backend, options=options)
    steps = {
        "eager": _step(eager, torch.optim.SGD(eager.parameters(), lr=0.1)),
        backend: _step(compiled, torch.optim.SGD(other.parameters(), lr=0.1)),
    }
    x, target = torch.randn(BATCH, TOKENS, WIDTH), torch.randint(CLASSES, (BATCH,))
    losses: dict[str, list[float]] = {name: [] for name in steps}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(STEPS):
        for name, step in steps.items():
            start = time.perf_counter()
            losses[name].append(step(x, target))
            seconds[name].append(time.perf_counter() - start)

    gap = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    for name, values in losses.items():
        print(
            f"{name:>10}: loss {values[0]:.4f} -> {values[-1]:.4f}, "
            f"first step {seconds[name][0]:.2f} s, "
            f"then median {1e3 * statistics.median(seconds[name][2:]):.2f} ms"
        )
    print(f"largest difference of losses over {STEPS} steps: {gap:.1e}")


def _step(
    model: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer
) -> Callable[[torch.Tensor, torch.Tensor], float]:
    def step(x: torch.Tensor, target: torch.Tensor) -> float:
        loss = nn.functional.cross_entropy(model(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


if __name__ == "__main__":
    main()
