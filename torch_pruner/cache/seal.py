"""Checksums of rows: a flipped bit or a row under the wrong name is found when it is read."""

from __future__ import annotations

import hashlib


def seal(name: str, text: str) -> str:
    """The checksum of ``text`` as the row called ``name``."""
    return hashlib.sha256(f"{name}\n{text}".encode("utf-8", "replace")).hexdigest()[:32]


def unseal(name: str, text: object, sealed: object) -> str:
    """``text``, if the checksum is right. Raises ValueError otherwise."""
    if not isinstance(text, str) or seal(name, text) != sealed:
        raise ValueError("its checksum is wrong")
    return text
