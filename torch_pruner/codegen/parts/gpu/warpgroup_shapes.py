"""Shapes of products by warpgroups, and the ways in which tiles for them are kept in shared memory.

``ALONG``, ``ACROSS`` and ``PIECES``: see ``warpgroup``. Nothing here needs TVM.
"""

from __future__ import annotations

M, K = 64, 16  # rows and positions of the reduction of an instruction
COLUMNS = (32, 64, 96, 128, 192, 256)  # of an instruction
THREADS = 128  # of a warpgroup
LINE = 64  # elements of a line: 128 bytes
PIECE = 8  # elements that stay together: sixteen bytes
ALONG, ACROSS, PIECES = range(3)
