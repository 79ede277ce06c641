"""The space of products of few rows with weights of twelve bits: ``in_place``'s, by blocks."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families.coded_rows.form import coded_of, format_of
from torch_pruner.families.in_place.space import InPlaceSketch
from torch_pruner.graph.coded import VECTORS

if TYPE_CHECKING:
    from torch_pruner.families.in_place.form import Format
    from torch_pruner.families.space import Decisions
    from torch_pruner.task import Task

_HELD = 4  # registers: the table, two masks, upper bytes
_LOOKS_UP = (32, 64)  # bytes of vectors that a byte shuffle of x86 looks up


class CodedRowsSketch(InPlaceSketch):
    """See the module. A step is a block; the coded copy takes the place of the narrow one."""

    name = "coded_rows"
    packs = True

    @staticmethod
    def fits(task: Task) -> bool:
        found, lanes = coded_of(task.spec), task.target.vector_bytes // 4
        if found is None or not task.target.is_x86 or task.target.vector_bytes not in _LOOKS_UP:
            return False
        whole = found.con.depth % lanes == 0 and found.con.depth >= VECTORS * lanes
        return whole and VECTORS * found.con.rows + _HELD <= task.target.vector_registers

    def _format(self) -> Format:
        return format_of(self.lanes)

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        lanes, _, *others = super().domains
        return (lanes, np.array([VECTORS], dtype=np.int64), *others)
