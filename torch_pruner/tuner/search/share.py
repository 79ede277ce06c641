"""The share of proposals that is left to chance."""

from __future__ import annotations


class Share:
    """Turns a share into whole numbers: fractions add up from batch to batch."""

    def __init__(self) -> None:
        self._due = 0.0

    def of(self, share: float, n: int) -> int:
        """How many of ``n`` proposals, but for one at least; none of a single one."""
        if n < 2:
            return 0
        self._due += share * n
        whole = int(self._due)
        self._due -= whole
        return min(whole, n - 1)
