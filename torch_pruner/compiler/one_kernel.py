"""Whether attention of few queries, keys or columns is one kernel or three, by their drafts.

A kernel's candidates all compute one graph, so this is decided before kernels are tuned: both cuts
are made, and the least predicted latencies of their kernels compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.families.decode_attention.form import few_queries_of
from torch_pruner.families.machine import BARRIER_S, LAUNCH_S
from torch_pruner.graph.attention import alone, any_attention, attention_of
from torch_pruner.graph.fuse import fuse
from torch_pruner.task import Task

if TYPE_CHECKING:
    from torch_pruner.graph.attention import Attention, Takes
    from torch_pruner.graph.fuse import Kernel
    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec

_OWN = "decode_attention", "attention"  # families that such a kernel would be of
# What a mask leaves of a cache that fills from its start to its end: three kernels read all of it.
# Half of 4096 keys took 0.47 to 0.55 of what all of them took (docs/experiments.md).
_SEEN = 0.5
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
    found = [name for name in _OWN if families.named(name).matches(task)]
    if not found:
        return False
    together = min(
        _seconds(one[0], target, threads, (name,)) * _seen(one[0].spec, name) for name in found
    )
    three = fuse(graph).kernels
    return together < sum(_seconds(kernel, target, threads) for kernel in three)


def _seen(spec: Graph, family: str) -> float:
    """The part of the keys that a kernel reads where masks rule some of them out."""
    few = few_queries_of(spec) if family == "decode_attention" else None
    return _SEEN if few is not None and few.ruling else 1.0


def _seconds(
    kernel: Kernel, target: TargetSpec, threads: int, names: tuple[str, ...] = ()
) -> float:
    """The least predicted seconds of a kernel in a program, of these families or of all.

    Kernels of a program share one launch, and each is estimated with its own, or as long as memory
    takes. After each the threads meet.
    """
    task = Task("attention", kernel.spec, target, threads)
    sketches = [s for s in families.sketches_for(task) if not names or s.name in names]
    found = [sketch.symbols(sketch.default()[None]) for sketch in sketches]
    least = min(found, key=lambda symbols: float(symbols.latency_s[0]))
    seconds = float(least.latency_s[0])
    if threads == 1:
        return seconds
    memory_s = float(least.s5_traffic_bytes[0]) / target.dram_bytes_per_s
    return max(seconds - LAUNCH_S, memory_s) + BARRIER_S
