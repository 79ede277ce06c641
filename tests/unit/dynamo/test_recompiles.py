"""What counts as compiled before: the same function for other sizes, not another model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_pruner.dynamo.capture import recompiles


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


def test_sizes_of_a_function_and_models_of_a_class() -> None:
    found: list[bool] = []

    def backend(gm: Any, example_inputs: Any) -> Any:
        found.append(recompiles.seen(example_inputs))
        return gm.forward

    for _ in range(2):
        torch._dynamo.reset()
        found.clear()
        for width in (4, 6):
            model = torch.compile(Net(width), backend=backend, dynamic=False)
            for batch in (2, 3):
                model(torch.zeros(batch, width))
        function = torch.compile(lambda x: x + 1, backend=backend, dynamic=False)
        for batch in (2, 3):
            function(torch.zeros(batch))
        assert found == [False, True] * 3
