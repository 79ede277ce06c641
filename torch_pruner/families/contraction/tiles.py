"""What of a contraction's estimates depends on the rows of a tile alone, one value per number.

Made once a space: asked of thousands of points, arithmetic on small integers took half the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.families.space import Array
    from torch_pruner.graph.contraction import Contraction

MAX_ROWS = 16  # of a tile
_CROSSING = 0.12  # what a tile takes longer for going on in another line


class TileTables(NamedTuple):
    """Each (17,), by the rows of a tile; what is at 0 means nothing."""

    tiles: Array  # how many
    crossing: Array  # share of its time that a tile takes longer
    inside: Array  # share of kernel offsets at which a tile reads anything but padding


def tile_tables(con: Contraction, extent: Sequence[int]) -> TileTables:
    """The tables of ``con``; ``extent``: of its first operand, the spatial dimensions."""
    rows = np.maximum(np.arange(MAX_ROWS + 1.0), 1.0)
    crossing = np.where(con.by_line(rows), 0.0, 0.0 if con.in_line else _CROSSING)
    return TileTables(con.row_tiles(rows), crossing, _share_inside(con, extent))


def _share_inside(con: Contraction, extent: Sequence[int]) -> Array:
    conv, shares = con.conv, np.ones(MAX_ROWS + 1)
    if conv is None or con.form != "conv" or not conv.copies_input:
        return shares
    for tm in (t for t in range(1, MAX_ROWS + 1) if con.by_line(t)):
        for d, (size, lo) in enumerate(zip(extent, conv.lo, strict=True)):
            rows, stride = con.m[d + 1], conv.stride[d]
            count = tm if d == len(extent) - 1 else 1
            first = np.minimum(np.arange(0, rows, count), rows - count) * stride - lo
            at = first[:, None] + np.arange(conv.kernel[d]) * conv.dilation[d]
            shares[tm] *= np.mean((at + (count - 1) * stride >= 0) & (at < size))
    return shares
