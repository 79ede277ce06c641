"""The space of rows on a GPU: a block each, a warp of a block each, or abreast."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families.gpu import (
    COMBINED_S,
    ELEMENT_S,
    EXCHANGE_S,
    EXCHANGES,
    NEIGHBOUR_S,
    SPLIT_S,
    TRANSACTION,
    WARP,
    GpuSweep,
    column,
)
from torch_pruner.families.gpu_rows.form import GpuRowsDecisions, kept_in_memory
from torch_pruner.families.space import Array, Decisions, Mask, Symbols
from torch_pruner.graph.rows import full_node, meet_others, passes, row_domain, steps_along

if TYPE_CHECKING:
    from torch_pruner.graph.rows import RowDomain

_VECTORS = (1, 2, 4)
_VECTOR_DTYPES = {"float32", "float16", "bfloat16", "bool"}
_ROWS = (1, 2, 4, 8)
ABREAST = 32  # rows of a block that lie abreast
_PARTS = (1, 2, 4, 8, 16, 32, 64)
AT_ONCE = 4  # blocks of a multiprocessor: where there are more, no row needs several
PART_S = 30e-9  # of a thread, to read what one part gave; not measured


class GpuRowsSketch(GpuSweep[GpuRowsDecisions[Array]]):
    """Threads for each row."""

    name = "gpu_rows"
    decisions = GpuRowsDecisions

    @cached_property
    def _domain(self) -> RowDomain:
        return row_domain(self.task.spec)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        threads = [2, 4, 8, 16, *(WARP * n for n in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32))]
        vectors = [vl for vl in _VECTORS if vl == 1 or self._divides(vl)]
        several = [n for n in _ROWS if n == 1 or self._fits(n)]
        abreast = [0, 1] if self._domain.rows > 1 else [0]
        rows = sorted({*several, *(ABREAST for _ in abreast[1:])})
        parts = [n for n in _PARTS if n == 1 or self._few(n)]
        return tuple(column(d) for d in (threads, vectors, rows, abreast, parts))

    def _few(self, parts: int) -> bool:
        """Whether there may be so few rows that ``parts`` blocks share each."""
        blocks = -(-self._domain.rows // ABREAST)
        return parts * blocks <= AT_ONCE * self.card.multiprocessors

    def _divides(self, vl: int) -> bool:
        """Whether rows can be read in vectors of ``vl``.

        TVM prints no vectors of booleans in memory, and of integers none that all operators take.
        """
        spec, domain = self.task.spec, self._domain
        ends = (*spec.inputs, *spec.outputs, *domain.reductions, *domain.kept_values)
        flags = any(spec.nodes[i].dtype == "bool" for i in ends)
        wide = {n.dtype for n in spec.nodes if n.shape == domain.shape}
        last = len(domain.shape) - 1
        whole = last in domain.axes and domain.shape[last] % vl == 0
        return whole and not flags and wide <= _VECTOR_DTYPES

    def _fits(self, rows: int) -> bool:
        """Whether a block can have several rows, each of which a warp finishes by itself."""
        spec, domain = self.task.spec, self._domain
        all_kept = kept_in_memory(spec, domain, rows) == kept_in_memory(spec, domain, 1)
        return all_kept and not meet_others(spec, domain)

    def valid(self, decisions: Decisions) -> Mask:
        c, width = self.columns(decisions), self._domain.width
        warps = (c.abreast == 0) & (c.threads >= WARP) & np.isin(c.rows, _ROWS)
        warps &= (c.threads == WARP) | ((c.rows == 1) & ((c.threads - WARP) * c.vl < width))
        abreast = (c.abreast == 1) & (c.rows == ABREAST) & (c.vl == 1)
        abreast &= c.threads <= min(WARP, max(width, 2))
        blocks, part = np.ceil(self._domain.rows / c.rows) * c.split, c.threads * c.vl * c.split
        shared = ((c.rows == 1) | (c.abreast == 1)) & (part <= width)
        shared &= blocks <= AT_ONCE * self.card.multiprocessors
        result: Mask = (warps | abreast) & ((c.split == 1) | shared)
        return result

    def _useful(self, c: GpuRowsDecisions[Array]) -> Array:
        """The share of what memory brings that is asked for."""
        domain = self._domain
        axes = [a for a, extent in enumerate(domain.shape) if extent > 1]
        total, lines = 0.0, np.zeros(len(c.threads))
        ways = [[a for a in axes if a in group] for group in (domain.axes, domain.kept)]
        along, across = (steps_along(self.task.spec, domain, w[-1] if w else 0) for w in ways)
        for (count, item, step), (_, _, beside) in zip(along, across, strict=True):
            near = np.where(c.abreast > 0, beside, step)
            ends = min(ABREAST, domain.rows), np.minimum(WARP * c.vl, domain.width)
            reach = np.where(c.abreast > 0, *ends)
            lines += count * item / self.aligned(item * np.where(near <= 1, reach, 1.0))
            total += count * item
        return total / lines if total else np.ones(len(c.threads))

    def symbols(self, decisions: Decisions) -> Symbols:
        spec, domain = self.task.spec, self._domain
        c, groups = self.columns(decisions), passes(spec)
        threads, blocks = c.threads * c.rows, np.ceil(domain.rows / c.rows) * c.split
        wide = any(full_node(spec, o, domain.shape) is not None for o in spec.outputs)
        turns = np.ceil(domain.width / (c.threads * c.vl * c.split)) * (len(groups) + wide)
        work = float(domain.rows * domain.width * len(spec.nodes))
        found = self._estimate(threads, blocks, work, TRANSACTION * self._useful(c))
        warps = np.where(c.threads > WARP, c.threads / WARP, 0.0)
        read = np.where(c.abreast > 0, c.threads, warps)  # of shared memory
        exchanges = np.where(c.abreast > 0, 0.0, EXCHANGES)
        joined = len(groups) * exchanges * EXCHANGE_S + len(domain.reductions) * read * COMBINED_S
        turn = ELEMENT_S + (c.vl - 1) * NEIGHBOUR_S
        parts = np.where(c.split > 1, c.split * PART_S * len(domain.reductions), 0.0)
        waiting = self._waiting(found, threads, turns * turn + joined + parts)
        launches = np.where(c.split > 1, len(groups) * SPLIT_S, 0.0)
        return replace(waiting, latency_s=waiting.latency_s + launches)
