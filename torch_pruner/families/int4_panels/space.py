"""The space of products of many rows with weights of four bits: the contraction's, and its costs.

Beside them are those of widening a block of a panel.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from torch_pruner.families.contraction.space import ContractionSketch
from torch_pruner.families.int4_rows.form import int4_product
from torch_pruner.families.int4_rows.space import has_table

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions
    from torch_pruner.task import Task

_NUMBERS, _LOOKED_UP = 2.5, 1.5  # cycles to make a vector of weights and store it


class Int4PanelsSketch(ContractionSketch):
    """See the module."""

    name = "int4_panels"

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        found = int4_product(task.spec)
        if found is None:
            raise ValueError("no product with constant weights of four bits")
        self.stored = found.stored_bytes(task.spec)
        self.widen_cycles = _LOOKED_UP if has_table(task.target) and found.bits == 4 else _NUMBERS

    @staticmethod
    def fits(task: Task) -> bool:
        return int4_product(task.spec) is not None

    @cached_property
    def domains(self) -> tuple[Decisions, ...]:
        found = dict(zip(self.names, super().domains, strict=True))
        found["vl"] = np.array([self.lanes], dtype=np.int64)
        found["ahead"] = np.array([0], dtype=np.int64)
        return tuple(found.values())
