"""Costs of a CPU core as the draft model sees them: pure functions of target constants.

The units are cycles, bytes and seconds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from torch_pruner.graph.ops import EXPENSIVE, ITEMSIZE, OpKind

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec

Array = npt.NDArray[Any]

# Half of six: a busy sibling on the core takes every other turn. Products straight from registers
# do not notice (two per cycle); a tile of 13 x 2 with its loads (3.2) loses a third, 8 x 3 less.
ISSUED_PER_CYCLE = 3.0
PAGE, CACHE_LINE = 4096, 64  # bytes
_FOLLOWED = 512  # bytes
_TRANSLATED, _WAYS = 96, 8  # pages that a core has at hand; lines of a set of the second cache
# Measured on an AMD Zen 3 (docs/experiments.md), on rows 1536 bytes apart, and 2048 and more.
STRIDE_CYCLES, FAR_CYCLES = 1.5, 4.5
LAUNCH_S = 5e-6  # starting and joining a parallel loop
BARRIER_S = 5e-7  # until all threads of a launch have met and go on
TASK_S = 5e-8  # handing one task to a worker
FMA_LATENCY = 4.0  # cycles from operands to result
LOADS_PER_CYCLE = 2.0
WORD_CYCLES = 3.0  # one vector of float32, rounded and put into words of two bfloat16
EXPENSIVE_CYCLES = 12.0  # one vector of a division, an exponential, an error function


def bytes_per_cycle(working_set: Array, target: TargetSpec) -> Array:
    """Sustained read bandwidth of a core from the cache level that holds ``working_set`` bytes.

    The second cache gives less the more of it is in use: its prefetcher stops at every page.
    """
    size = np.log2(np.maximum(working_set, 1.0))
    filled = np.log2(target.l2_bytes * np.array([1 / 16, 1 / 8, 3 / 8]))
    second = np.interp(size, filled, [38.0, 27.0, 22.0])
    far = np.where(working_set <= target.l3_bytes, 10.0, memory_bytes_per_cycle(target))
    beyond = np.where(working_set <= 0.8 * target.l2_bytes, second, far)
    return np.where(working_set <= 0.8 * target.l1_bytes, 64.0, beyond)


def multiplies_pairs(target: TargetSpec) -> bool:
    """Whether a processor adds products of pairs of bfloat16 faster than one number's after
    another."""
    return target.bf16_dot and target.vector_bytes == 64 and target.bf16_dot_fmas < 2


def dot_cycles(dots: Array, target: TargetSpec) -> Array:
    """Cycles of so many ``pair_dot``."""
    found: Array = dots * target.bf16_dot_fmas / target.fma_per_cycle
    return found


def stride_cycles(stride: int, count: int, target: TargetSpec) -> float:
    """Cycles that a step waits whose operand lies ``stride`` bytes from the last one's.

    There are ``count`` steps. Prefetchers follow short strides, and a core has translated some
    dozens of pages. Where strides share so many factors with the number of sets that the second
    cache cannot hold all lines, each comes from the third.
    """
    if stride <= _FOLLOWED:
        return 0.0
    beyond = min(1.0, max(0.0, 2 * (stride * count / PAGE / _TRANSLATED - 1)))
    sets = target.l2_bytes // (CACHE_LINE * _WAYS)
    shared = math.gcd(stride // CACHE_LINE, sets) if stride % CACHE_LINE == 0 else 1
    held = count <= sets // max(1, shared) * _WAYS
    return beyond * (STRIDE_CYCLES if held and stride < PAGE else FAR_CYCLES)


# Measured on an AMD Zen 4 (docs/experiments.md): an element that is stored apart from the lane
# beside it; more where planes lie whole pages apart (one set of the first cache), and where lines
# leave the caches before the next piece of them is written.
SCATTERED_CYCLES, SAME_SET_CYCLES, EVICTED_CYCLES = 1.5, 10.0, 5.0


def scattered_cycles(spec: Graph, anchor: int, target: TargetSpec) -> float:
    """Cycles of a core for each element of a convolution's result, where lanes are channels and
    each channel's positions lie together."""
    node = spec.nodes[anchor]
    plane = math.prod(node.shape[2:]) * ITEMSIZE[node.dtype]
    moved = input_bytes(spec) + output_bytes(spec)
    same = SAME_SET_CYCLES if plane % PAGE == 0 else 0.0
    return SCATTERED_CYCLES + same + (EVICTED_CYCLES if moved > target.l3_bytes / 2 else 0.0)


def memory_bytes_per_cycle(target: TargetSpec) -> float:
    """What one core reads from memory while the others read, too."""
    return target.dram_bytes_per_s / target.frequency_hz / max(target.cores, 1)


def from_memory(seconds: Array, floor: Array | float) -> Array:
    """Seconds of work on what memory gives in ``floor`` seconds, where the two overlap.

    Of two that wait for memory, the one that has less to do waits less: its loads begin earlier.
    """
    result: Array = np.maximum(seconds, 0.9 * floor + 0.1 * seconds)
    return result


def foreign_bytes_per_s(target: TargetSpec) -> float:
    """What a core reads of data that another core has just written and holds.

    Measured over 1x1 convolutions of 56x56 and 28x28 positions inside ResNet-50, divided by rows
    and by columns: 7 to 10 GB/s.
    """
    return 3.0 * target.frequency_hz


def tile_step_cycles(
    rows: Array, vectors: Array, fetched: Array, unrolled: Array, target: TargetSpec
) -> Array:
    """Cycles of one position of the reduction of a register tile whose operands are near.

    ``fetched`` instructions besides, and the loop's own, come once in ``unrolled`` positions.
    """
    fmas = rows * vectors
    issued = fmas + rows + vectors + fetched / unrolled
    cycles = np.maximum(fmas / target.fma_per_cycle, FMA_LATENCY)
    cycles = np.maximum(cycles, issued / ISSUED_PER_CYCLE)
    cycles = np.maximum(cycles, (rows + vectors) / LOADS_PER_CYCLE)
    result: Array = cycles + 0.5 * fetched / unrolled
    return result


def parallel_seconds(
    tasks: Array, task_s: Array, parallel: Array, threads: int
) -> tuple[Array, Array]:
    """(seconds, tasks of the busiest core).

    Whole tasks are dealt to threads, so a remainder leaves cores idle.
    """
    rounds = np.where(parallel > 0, np.ceil(tasks / threads), tasks)
    overhead = np.where(parallel > 0, LAUNCH_S + TASK_S * rounds, 0.0)
    return rounds * task_s + overhead, rounds


def pointwise_cycles(spec: Graph, nodes: set[int]) -> float:
    """Cycles to compute one vector through the given elementwise nodes."""
    cycles = 0.0
    for i in nodes:
        node = spec.nodes[i]
        if node.kind is OpKind.POINTWISE:
            cycles += EXPENSIVE_CYCLES if node.op in EXPENSIVE else 1.0
        elif node.kind is OpKind.INJECTIVE:
            cycles += 4.0
    return cycles


def input_bytes(spec: Graph) -> float:
    return float(sum(spec.nodes[i].numel * ITEMSIZE[spec.nodes[i].dtype] for i in spec.inputs))


_CHOSEN = ("take", "gather", "slice")  # operators that read a part of their first operand


def read_bytes(spec: Graph) -> float:
    """Bytes of the inputs that are read: of a table whose rows are picked, those rows."""
    users, total = spec.users(), 0
    for i in spec.inputs:
        node, readers = spec.nodes[i], [spec.nodes[u] for u in users[i]]
        numel = node.numel
        if all(r.op in _CHOSEN and i not in r.inputs[1:] for r in readers):
            numel = min(numel, sum(r.numel for r in readers))
        total += numel * ITEMSIZE[node.dtype]
    return float(total)


def output_bytes(spec: Graph) -> float:
    return float(sum(spec.nodes[i].numel * ITEMSIZE[spec.nodes[i].dtype] for i in spec.outputs))
