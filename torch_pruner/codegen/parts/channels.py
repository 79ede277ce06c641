"""Channels that lie next to each other, divided into blocks of vectors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Channels:
    """``count`` blocks of ``vectors`` vectors of ``lanes`` channels, from channel ``first``."""

    first: int
    count: int
    vectors: int
    lanes: int

    @property
    def width(self) -> int:
        """Channels of a block."""
        return self.vectors * self.lanes


def channel_blocks(channels: int, lanes: int, vectors: int) -> Iterator[Channels]:
    """Whole blocks, the vectors that do not fill one, and ever smaller vectors of what is left."""
    whole, rest = divmod(channels, lanes * vectors)
    if whole:
        yield Channels(0, whole, vectors, lanes)
    if rest >= lanes:
        yield Channels(channels - rest, 1, rest // lanes, lanes)
    rest %= lanes
    while rest:
        lanes = -(-lanes // 2)
        if rest >= lanes:
            yield Channels(channels - rest, rest // lanes, 1, lanes)
            rest %= lanes
