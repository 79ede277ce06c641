"""Whether attention of a few queries is one kernel or three, as their drafts are estimated.

A kernel's candidates all compute one graph, so this is decided before kernels are tuned: both cuts
are made, and the least predicted latencies of their kernels compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.families.machine import LAUNCH_S
from torch_pruner.graph.attention import alone, any_attention, attention_of
from torch_pruner.graph.fuse import fuse
from torch_pruner.task import Task

if TYPE_CHECKING:
    from torch_pruner.graph.attention import Attention, Takes
    from torch_pruner.graph.fuse import Kernel
    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec

_OWN = "decode_attention"  # the family that such a kernel would be of
_known: dict[tuple[str, str, int], bool] = {}


def is_cheaper_as_one(target: TargetSpec, threads: int) -> Takes:
    """Says of an attention whether one kernel of it is estimated to take less time than three."""

    def takes(graph: Graph, found: Attention) -> bool:
        small = alone(graph, found)
        key = small.digest(), target.key(), threads
        if key not in _known:
            _known[key] = _cheaper(small, target, threads)
        return _known[key]

    return takes


def _cheaper(graph: Graph, target: TargetSpec, threads: int) -> bool:
    one = fuse(graph, few_queries=any_attention).kernels
    if len(one) != 1 or attention_of(one[0].spec) is None:
        return False
    task = Task("attention", one[0].spec, target, threads)
    if not families.named(_OWN).matches(task):
        return False
    together = _seconds(one[0], target, threads, (_OWN,))
    three = fuse(graph).kernels
    return together < sum(_seconds(kernel, target, threads) for kernel in three)


def _seconds(
    kernel: Kernel, target: TargetSpec, threads: int, names: tuple[str, ...] = ()
) -> float:
    """The least predicted latency of a kernel, of these families or of all.

    Kernels of a program share one launch, and each is estimated with its own.
    """
    task = Task("attention", kernel.spec, target, threads)
    sketches = [s for s in families.sketches_for(task) if not names or s.name in names]
    points = [(sketch, sketch.default()) for sketch in sketches]
    least = min(float(s.symbols(p[None]).latency_s[0]) for s, p in points)
    return max(0.0, least - LAUNCH_S) if threads > 1 else least
