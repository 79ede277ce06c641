"""Whether a convolution to few channels is one kernel, or a product and a sum, by their drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.compiler.one_kernel import draft_seconds
from torch_pruner.graph.few_columns import spread_columns
from torch_pruner.graph.fuse import fuse

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec

_known: dict[tuple[str, str, int], bool] = {}


def cheaply_spread(graph: Graph, target: TargetSpec, threads: int) -> Graph:
    """``graph`` with convolutions as products and sums where these are estimated to take less."""

    def takes(direct: Graph, spread: Graph) -> bool:
        key = direct.digest(), target.key(), threads
        if key not in _known:
            _known[key] = _seconds(spread, target, threads) < _seconds(direct, target, threads)
        return _known[key]

    return graph if target.card else spread_columns(graph, takes)


def _seconds(graph: Graph, target: TargetSpec, threads: int) -> float:
    return sum(draft_seconds(kernel, target, threads) for kernel in fuse(graph).kernels)
