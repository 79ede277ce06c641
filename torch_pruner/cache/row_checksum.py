"""Seals of rows: a checksum, which finds damage, and a signature, which finds what others wrote.

In: the name and the text of a row. Out: a seal; later the same text, or an error. The checksum is
anybody's to compute. The signature is an HMAC under a key that the user keeps outside of the cache
(``userkey``), so no other user can have made it, whatever he could write to once.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

_DIGITS = 32


class ForeignSeal(ValueError):
    """A sound row that this user has not signed."""


@dataclass(frozen=True, slots=True)
class Seals:
    """How the rows of one place are sealed, and which are taken.

    Attributes:
        key: the user's; without one, rows get a checksum only.
        own: this user made the place, so everything in it has his signature, and what has not is
            not his. Elsewhere (a directory that was shipped here) sound rows are taken.
    """

    key: bytes | None = None
    own: bool = False

    def seal(self, table: str, name: str, text: str) -> str:
        """The seal of ``text`` as the row called ``name``."""
        return seal(name, text) + self._signature(table, name, text)

    def unseal(
        self, table: str, name: str, text: object, sealed: object, *, mine: bool = False
    ) -> str:
        """``text``, if its seal is right. Raises ValueError otherwise.

        ``mine`` takes what has this user's signature and nothing else, wherever it lies; without
        it, so does a place of his ``own``. ForeignSeal says that only the signature is missing.
        """
        plain = unseal(name, text, sealed[:_DIGITS] if isinstance(sealed, str) else sealed)
        if (mine or self.own) and not self.signed(table, name, plain, sealed):
            raise ForeignSeal("this user has not signed it")
        return plain

    def signed(self, table: str, name: str, text: str, sealed: object) -> bool:
        """Whether this user sealed ``text`` as this row."""
        expected = self._signature(table, name, text)
        given = sealed[_DIGITS:] if isinstance(sealed, str) and sealed.isascii() else ""
        return bool(expected) and hmac.compare_digest(expected, given)

    def _signature(self, table: str, name: str, text: str) -> str:
        if self.key is None:
            return ""
        message = f"{table}\n{name}\n{text}".encode("utf-8", "replace")
        return "." + hmac.new(self.key, message, hashlib.sha256).hexdigest()


def seal(name: str, text: str) -> str:
    """The checksum of ``text`` as the row called ``name``."""
    return hashlib.sha256(f"{name}\n{text}".encode("utf-8", "replace")).hexdigest()[:_DIGITS]


def unseal(name: str, text: object, sealed: object) -> str:
    """``text``, if the checksum is right. Raises ValueError otherwise."""
    if not isinstance(text, str) or seal(name, text) != sealed:
        raise ValueError("its checksum is wrong")
    return text
