"""Seconds that a contraction waits for memory beside its tiles, as the draft model sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families import machine
from torch_pruner.families.kinds import in_planes
from torch_pruner.graph.ops import ITEMSIZE

if TYPE_CHECKING:
    from torch_pruner.families.contraction.form import ContractionDecisions
    from torch_pruner.families.space import Array
    from torch_pruner.graph.contraction import Contraction
    from torch_pruner.task import Task


_EXPOSED = 0.9  # of the way from memory of an operand that passes again and again: 0.8 to 1.2
_HELD = 0.8  # of the last cache


def waiting_seconds(
    task: Task,
    con: Contraction,
    c: ContractionDecisions[Array],
    a_bytes: float,
    scattered: float,
) -> Array:
    """Seconds lost by writing an output in pieces, and by reading from memory what was read before.

    ``a_bytes``: of a group's part of the first operand. ``scattered``: ``scattered_cycles``.
    """
    cores = np.where(c.par == 1, task.threads, 1)
    cycles = _revisits(task, con, c) + scattered * con.groups * con.rows * con.n
    seconds: Array = cycles / cores / task.target.frequency_hz
    return seconds + _passes(task, con, c, a_bytes)


def _passes(task: Task, con: Contraction, c: ContractionDecisions[Array], a_bytes: float) -> Array:
    """Seconds in which chunks of rows come from memory once more, which no cache holds.

    All tiles of a chunk pass by a block of a panel before the next, of its panels one after another
    where chunks are outside.
    """
    blocks = np.ceil(con.n / (c.nv * c.vl))
    threads = np.where(c.par == 1, np.minimum(task.threads, c.mc), 1)
    beyond = a_bytes / c.mc * threads > _HELD * task.target.l3_bytes
    again = np.where(c.order == 1, blocks * c.kb - 1, blocks * (c.kb - 1))
    moved = con.groups * a_bytes * again
    seconds: Array = np.where(beyond, _EXPOSED * moved / task.target.dram_bytes_per_s, 0.0)
    return seconds


def scattered_cycles(task: Task, con: Contraction) -> float:
    """Cycles for each result, to store vectors of channels whose positions lie together."""
    if not in_planes(task.spec):
        return 0.0
    return machine.scattered_cycles(task.spec, con.anchor, task.target)


def _revisits(task: Task, con: Contraction, c: ContractionDecisions[Array]) -> Array:
    """Cycles lost by writing an output panel after panel, when it has left the cache between.

    Of every line of it a pass writes a part. Measured inside networks: 64 to 256 channels of
    56x56 positions lose 8 %, 16 to 96 channels of 112x112 two thirds.
    """
    blocks = np.ceil(con.n / (c.nv * c.vl))
    written = con.groups * con.rows * con.n * ITEMSIZE[task.spec.nodes[con.anchor].dtype]
    apart = 1 if con.shares_rows else con.groups
    blocks = blocks * (con.groups // apart)
    region = np.where(c.order == 1, written / apart / c.mc, float(written))
    size = task.target.l2_bytes
    per_cycle = np.where(region > 0.8 * size, 1.1, 10.0)
    cycles: Array = np.where((blocks > 1) & (region > 0.3 * size), written / per_cycle, 0.0)
    return cycles
