"""The seam of the vendor's library, and when one of its kernels is worth a step of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch_pruner.graph.describe import flops_of
from torch_pruner.graph.ops import FLOATS, OpKind

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph
    from torch_pruner.task import Task

# A vendor kernel is a step of its own with another thread pool: its idle workers spin against ours.
# Measured on two cores, per call of such a kernel: 10 ms inside GPT-2 (12 calls, 240 ms instead of
# 120), 2.3 ms inside BERT-tiny (18 calls, 68 ms instead of 26).
VENDOR_MARGIN, VENDOR_SWITCH_S, VENDOR_SPIN_S = 1.1, 20e-6, 10e-3


class Vendor(Protocol):
    """Runs a kernel graph through the framework's own operators.

    Tests: ``tests/contracts/vendor.py``.
    """

    def latency_s(self, spec: Graph) -> float | None:
        """Median seconds per call, or None when the library has nothing faster for it."""

    def runs(self, spec: Graph) -> bool:
        """Whether the library gives the results of a kernel graph, fast or not."""


def wins(vendor_s: float, ours_s: float, threads: int) -> bool:
    """Whether the vendor's kernel is so much faster that leaving the program for it pays."""
    switch_s = VENDOR_SPIN_S if threads > 1 else VENDOR_SWITCH_S
    return vendor_s * VENDOR_MARGIN + switch_s < ours_s


def worth_vendor(task: Task) -> bool:
    """Whether a library can have a better kernel: for large contractions of floating point."""
    contraction = any(n.kind is OpKind.CONTRACT and n.dtype in FLOATS for n in task.spec.nodes)
    return contraction and flops_of(task.spec) > 1e6
