"""Checksums of rows, which find damage, and signatures, which find what others wrote.

In: the name and the text of a row. Out: what its column ``checksum`` holds (the checksum, and
behind a point the signature); later the same text, or an error. Anybody can compute a checksum. The
signature is an HMAC under a key that the user keeps outside of the cache (``userkey``), so no other
user can have made it, whatever he could write to once.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

_DIGITS = 32


class UnsignedRow(ValueError):
    """A sound row that this user has not signed."""


@dataclass(frozen=True, slots=True)
class RowChecksums:
    """Signs the rows of one index, and decides which of them are taken.

    Attributes:
        key: the user's; without one, rows get a checksum only.
        own: this user made the index, so every row of it has his signature, and a row without it is
            not his. Elsewhere (a directory that was shipped here) sound rows are taken.
    """

    key: bytes | None = None
    own: bool = False

    def compute(self, table: str, name: str, text: str) -> str:
        """The checksum and signature of ``text`` as the row called ``name``."""
        return checksum_of(name, text) + self._signature(table, name, text)

    def verify(
        self, table: str, name: str, text: object, checksum: object, *, mine: bool = False
    ) -> str:
        """``text``, if its checksum is right. Raises ValueError otherwise.

        ``mine`` takes what has this user's signature and nothing else, wherever it lies; without
        it, so does an index of his ``own``. UnsignedRow says that only the signature is missing.
        """
        plain = verified(name, text, checksum[:_DIGITS] if isinstance(checksum, str) else checksum)
        if (mine or self.own) and not self.is_signed(table, name, plain, checksum):
            raise UnsignedRow("this user has not signed it")
        return plain

    def is_signed(self, table: str, name: str, text: str, checksum: object) -> bool:
        """Whether this user signed ``text`` as this row."""
        expected = self._signature(table, name, text)
        given = checksum[_DIGITS:] if isinstance(checksum, str) and checksum.isascii() else ""
        return bool(expected) and hmac.compare_digest(expected, given)

    def _signature(self, table: str, name: str, text: str) -> str:
        if self.key is None:
            return ""
        message = f"{table}\n{name}\n{text}".encode("utf-8", "replace")
        return "." + hmac.new(self.key, message, hashlib.sha256).hexdigest()


def checksum_of(name: str, text: str) -> str:
    """The checksum of ``text`` as the row called ``name``."""
    return hashlib.sha256(f"{name}\n{text}".encode("utf-8", "replace")).hexdigest()[:_DIGITS]


def verified(name: str, text: object, checksum: object) -> str:
    """``text``, if the checksum is right. Raises ValueError otherwise."""
    if not isinstance(text, str) or checksum_of(name, text) != checksum:
        raise ValueError("its checksum is wrong")
    return text
