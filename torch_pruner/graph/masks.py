"""How masks of dropout are drawn from the state of torch's generator for the CPU.

``codegen.build.masks`` draws, ``dynamo.run.masks`` hands it the generator's state. No torch here.
"""

from __future__ import annotations

import math
from typing import NamedTuple

WORDS, AHEAD = 624, 397
"""Words of the state, and how far ahead a word is read that a new one is made of."""
_PAIRS = WORDS // 2


class Draw(NamedTuple):
    """What the program reads, in the order of its table; addresses are left to the caller."""

    next: int  # the first unread word
    unread: int
    begun: int  # elements that the unread words make
    renewals: int  # of the state
    rest: int  # elements that the last renewal makes
    high: int  # upper 21 and lower 32 bits of the limit
    low: int

    @staticmethod
    def of(count: int, p: float, left: int, following: int) -> Draw:
        """``count`` elements that are true with probability ``p``, 0 to 1, of a generator that says
        so of its state: words ``left`` before it is renewed by reading the last of these, and the
        word ``following``."""
        unread = left - 1
        begun = min(count, unread // 2)
        if begun == count:
            unread = 2 * begun  # the others stay
        others = count - begun
        renewals = -(-others // _PAIRS)
        limit = math.ceil(p * 2.0**53)
        return Draw(
            following, unread, begun, renewals, others - (renewals - 1) * _PAIRS if renewals else 0,
            limit >> 32, limit & 0xFFFFFFFF,
        )  # fmt: skip

    def state_after(self, left: int) -> tuple[int, int]:
        """What the generator then says: words left, and the following one."""
        if not self.renewals:
            return left - self.unread, self.next + self.unread
        read = 2 * ((self.renewals - 1) * _PAIRS + self.rest) - self.unread % 2
        read -= WORDS * (self.renewals - 1)
        return WORDS + 1 - read, read
