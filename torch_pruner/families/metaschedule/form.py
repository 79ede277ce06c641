"""What a kernel of MetaSchedule's takes: inputs in the layouts that its trace chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.base import Parameters
from torch_pruner.graph.packing import PackLayout, strided_layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.graph.ir import Graph


def parameters(spec: Graph, decisions: Mapping[str, int]) -> Parameters:
    """Inputs whose layout MetaSchedule chose: axis by axis, an extent and a stride."""
    packs: dict[int, PackLayout] = {}
    for k, position in enumerate(spec.inputs):
        axes: list[tuple[int, int]] = []
        while (extent := decisions.get(f"in{k}_extent{len(axes)}")) is not None:
            axes.append((extent, decisions[f"in{k}_stride{len(axes)}"]))
        if axes:
            packs[k] = strided_layout(spec.nodes[position], axes)
    return Parameters(packs)
