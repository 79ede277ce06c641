"""Convolutions of three taps by minimal filtering, F(4, 3), where they may be less exact.

A family of its own beside ``winograd``, whose space and kernels it shares: decisions of that one,
and so its records and keys, are the same whether or not tiles of four results are allowed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner.families.winograd import WinogradFamily
from torch_pruner.families.winograd.matrices import MORE_RESULTS

if TYPE_CHECKING:
    from torch_pruner.families.space import Sketch


class Winograd4Family(WinogradFamily):
    """See the module."""

    name = "winograd4"
    results = MORE_RESULTS

    def space(self) -> type[Sketch]:
        from torch_pruner.families.winograd.space import Winograd4Sketch

        return Winograd4Sketch


FAMILY = Winograd4Family()
