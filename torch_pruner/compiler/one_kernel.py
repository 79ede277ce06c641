"""Whether attention of few queries, keys or columns is one kernel or three, and its gradient one or
five, by their drafts.

A kernel's candidates all compute one graph, so this is decided before kernels are tuned: both cuts
are made, and the least predicted latencies of their kernels compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner import families
from torch_pruner.families import machine
from torch_pruner.families.decode_attention.form import few_queries_of
from torch_pruner.families.machine import BARRIER_S, LAUNCH_S
from torch_pruner.graph.attention import alone, any_attention, attention_of
from torch_pruner.graph.attention_gradient import any_gradient, gradient_of
from torch_pruner.graph.fuse import fuse
from torch_pruner.task import Task

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph.attention import Attention, Takes
    from torch_pruner.graph.attention_gradient import AttentionGradient, TakesGradient
    from torch_pruner.graph.fuse import Kernel
    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec

_OWN = "decode_attention", "attention", "gpu_attention"  # families that such a kernel would be of
# What a mask leaves of a cache that fills from its start to its end: three kernels read all of it.
# Half of 4096 keys took 0.47 to 0.55 of what all of them took (docs/experiments.md).
_SEEN = 0.5
_known: dict[tuple[str, str, int], bool] = {}


def is_cheaper_as_one(target: TargetSpec, threads: int) -> Takes:
    """Says of an attention whether one kernel of it is estimated to take less time than three."""

    def takes(graph: Graph, found: Attention) -> bool:
        small = alone(graph, found.inner, (found.out,))
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
    own = [families.named(name) for name in _OWN]
    found = [f.name for f in own if f.target_kind == target.kind and f.matches(task)]
    if not found:
        return False
    together = min(
        draft_seconds(one[0], target, threads, (name,)) * _seen(one[0].spec, name) for name in found
    )
    three = fuse(graph).kernels
    return together < sum(draft_seconds(kernel, target, threads) for kernel in three)


def gradient_is_cheaper(target: TargetSpec, threads: int) -> TakesGradient:
    """Says of a gradient of attention whether one kernel of it is estimated to take less time."""

    def takes(graph: Graph, found: AttentionGradient) -> bool:
        small = alone(graph, found.inner, found.outputs)
        key = small.digest(), target.key(), threads
        if key not in _known:
            _known[key] = _gradient_cheaper(small, target, threads)
        return _known[key]

    return takes


def _gradient_cheaper(graph: Graph, target: TargetSpec, threads: int) -> bool:
    def seconds(kernels: Sequence[Kernel]) -> float:
        return sum(
            draft_seconds(k, target, threads) + _way(k.spec, target, threads) for k in kernels
        )

    one = fuse(graph, gradients=any_gradient).kernels
    made = sum(gradient_of(k.spec) is not None for k in one)
    return made == 1 and seconds(one) < seconds(fuse(graph).kernels)


def _way(spec: Graph, target: TargetSpec, threads: int) -> float:
    """Seconds in which a kernel's inputs and outputs come and go, which estimates of products take
    for hidden: what an epilogue reads and writes is not."""
    size = machine.input_bytes(spec) + machine.output_bytes(spec)
    if size < target.l2_bytes * threads:
        return 0.0
    near = float(machine.bytes_per_cycle(np.array(size), target)) * target.frequency_hz * threads
    return size / (near if size < target.l3_bytes else target.dram_bytes_per_s)


def _seen(spec: Graph, family: str) -> float:
    """The part of the keys that a kernel reads where masks rule some of them out."""
    few = few_queries_of(spec) if family == "decode_attention" else None
    return _SEEN if few is not None and few.ruling else 1.0


def draft_seconds(
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
    if threads == 1 or target.card is not None:  # each kernel of a card is a launch
        return seconds
    memory_s = float(least.s5_traffic_bytes[0]) / target.dram_bytes_per_s
    return max(seconds - LAUNCH_S, memory_s) + BARRIER_S
