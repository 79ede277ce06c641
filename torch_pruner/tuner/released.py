"""Pruner's Symbol-based Analyzer as its release computes it, for comparison with our own.

One row per buffer that a kernel writes; the latency of a kernel is the sum over its rows of the
slower of computing and moving. The release counts elements where the paper says bytes, and has no
penalty for occupancy or alignment (docs/algorithm.md says what ours does instead). Formulas: the
paper's equation 1 with the penalties of the release's "version 6".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.graph.contraction import contraction_of

if TYPE_CHECKING:
    from torch_pruner.families.gpu_product.space import GpuProductSketch
    from torch_pruner.families.space import Array, Decisions
    from torch_pruner.task import Task

WARP, PARTITIONS, REGISTERS = 32.0, 4.0, 128.0


@dataclass(frozen=True, slots=True)
class ReleasedDevice:
    """What the release knows of a card."""

    peak_gflops: float  # float32 on CUDA cores
    bandwidth_gb_s: float
    multiprocessors: int
    resident: int = 1  # blocks that a multiprocessor runs at once


A100_40 = ReleasedDevice(19490.0, 1555.0, 108)


@dataclass(frozen=True, slots=True)
class Row:
    """One written buffer, each number one value per point.

    ``thread_ops``: operations of a thread; ``registers`` and ``touched``: elements that it holds,
    and that it reads and writes in all; ``moved``: elements between memory and the card.
    """

    thread_ops: Array
    registers: Array
    touched: Array
    moved: Array
    blocks: Array
    threads: Array


def latency_s(rows: list[Row], device: ReleasedDevice) -> Array:
    """Seconds of kernels with these rows."""
    total = np.zeros_like(rows[0].blocks)
    for row in rows:
        compute = row.thread_ops * row.blocks * row.threads * _reuse(row) * _spilled(row)
        compute = compute / (device.peak_gflops * 1e9 * _waves(row, device) * _lanes(row))
        memory = row.moved / (device.bandwidth_gb_s * 1e-3 * 2.0**30 * 1e3)
        total = total + np.maximum(compute, memory)
    return total


def _lanes(row: Row) -> Array:
    """Share of the lanes that whole warps would have: P of compute at level 1."""
    warps = row.threads / WARP
    result: Array = warps / np.ceil(warps)
    return result


def _reuse(row: Row) -> Array:
    """One more than the inverse of a thread's reuse: P of compute at level 0, a factor of work."""
    reuse = np.where(row.thread_ops > 0, 1.0 + row.thread_ops / np.maximum(row.touched, 1e-9), 1.0)
    return np.where(row.thread_ops > 0, 1.0 + 1.0 / reuse, 1.0)


def _spilled(row: Row) -> Array:
    """What a thread holds beyond its registers: P of memory at level 0, a factor of work."""
    return np.where(row.registers >= REGISTERS, row.registers / REGISTERS, 1.0)


def _waves(row: Row, device: ReleasedDevice) -> Array:
    """Share of the card that whole waves of blocks would fill: P of compute at level 2."""
    full = float(device.multiprocessors * device.resident)
    warps = np.ceil(row.threads / WARP)
    few = row.blocks * np.minimum(warps, PARTITIONS)
    units = np.where(row.blocks >= full, row.blocks, few)
    size = np.where(row.blocks >= full, full, PARTITIONS * device.multiprocessors)
    result: Array = units / (np.ceil(units / size) * size)
    return result


def product_rows(task: Task, sketch: GpuProductSketch, decisions: Decisions) -> list[Row]:
    """The rows of a product on CUDA cores: both tiles, the sums, and the output."""
    con, c = contraction_of(task.spec), sketch.columns(decisions)
    blocks = con.groups * np.ceil(con.rows / c.bm) * np.ceil(con.n / c.bn)
    threads = (c.bm / c.tm) * (c.bn / c.tn)
    depth, none = float(con.depth), np.zeros(len(decisions))
    sums, sides = c.tm * c.tn, c.tm + c.tn
    return [
        Row(none, none, none, blocks * c.bm * depth, blocks, threads),
        Row(none, none, none, blocks * c.bn * depth, blocks, threads),
        Row(2.0 * sums * depth, sums + sides, sums + sides * depth, none, blocks, threads),
        Row(none, none, none, blocks * c.bm * c.bn, blocks, threads),
    ]
