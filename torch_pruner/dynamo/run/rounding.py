"""A graph whose operators round otherwise: how far a result moves by rounding alone.

A divergence of a distribution from itself is zero but for what its operators round. Another
compiler rounds elsewhere, its zero is another small number, and no shift of the inputs shows how
far the two may be apart: both distributions shift alike. So the results of operators are shifted,
each number up or down at random (Vignes, "A stochastic arithmetic for reliable scientific
computation", 1993).

Random shifts average out where thousands of numbers are added up, what a sum's own additions round
does not: a mean that is zero (of a product of what was just normalised) lies as far from it as
additions in one order or another leave it. Its operator is one step of the graph, nothing inside of
it can be shifted, but numbers that are all shifted upwards move it by as much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.dynamo.lower.calls import RuntimeValue

RUNS: Sequence[int | None] = (0, 1, None)
"""Seeds with which a graph is run; one alone may come out as eager does by chance. None: all
numbers are shifted upwards."""


class _RoundedOtherwise(fx.Interpreter):
    """Runs a graph with numbers that its operators compute shifted by one in the last place."""

    def __init__(self, gm: fx.GraphModule, seed: int | None) -> None:
        super().__init__(gm)
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}  # not the program's own

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        return tree_map(self._shifted, result) if _computes(target) else result

    def _shifted(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            return value
        if not value.is_floating_point():
            return value
        # Whole numbers are counts, masks and classes, which programs compare: they stay.
        rounded = value != value.round()
        eps = torch.finfo(value.dtype).eps
        if self._seed is None:
            return torch.where(rounded, value + value.abs() * eps, value)
        up = torch.randint(
            0, 2, value.shape, generator=self._generator(value.device, self._seed),
            device=value.device, dtype=torch.int8,
        )  # fmt: skip
        factor = torch.where(up > 0, 1 + eps, 1 - eps)  # float32, which halves would become
        return torch.where(rounded, (value * factor).to(value.dtype), value)

    def _generator(self, device: torch.device, seed: int) -> torch.Generator:
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(seed)
        return self._generators[device]


def _computes(op: object) -> bool:
    """Whether an operator's results are numbers of its own: no views and no memory written to."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims"):
        return False
    return all(r.alias_info is None for r in op._schema.returns)


def rounded_otherwise(
    gm: fx.GraphModule, inputs: Sequence[RuntimeValue], seed: int | None
) -> list[RuntimeValue]:
    """The graph's results with other roundings. Raises what its operators raise."""
    return list(_RoundedOtherwise(gm, seed).run(*inputs))
