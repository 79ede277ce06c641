"""Which calls of one kernel follow one another and do not wait for each other.

A GPU does them in one launch (``codegen.build.gpu.together``): the queries, keys and values of a
layer. Schedules are chosen for that many at once.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.graph.fuse import Kernel


def calls_together(kernels: Sequence[Kernel], workloads: Sequence[str]) -> dict[str, int]:
    """For each workload how many of its calls are together in the runs that have most of them.

    ``workloads``: of each of the ``kernels``, in the order in which they run.
    """
    found: dict[str, Counter[int]] = {}
    length, written = 0, set[int]()
    for k, (kernel, workload) in enumerate(zip(kernels, workloads, strict=True)):
        follows = k > 0 and workload == workloads[k - 1] and not written & set(kernel.inputs)
        length, written = (length + 1, written) if follows else (1, set())
        written |= set(kernel.outputs)
        of = found.setdefault(workload, Counter())
        of[length] += length  # this run, as long as it is now, has so many calls ...
        if follows:
            of[length - 1] -= length - 1  # ... and is no run that is shorter
    return {workload: max(of, key=lambda n: (of[n], n)) for workload, of in found.items()}
