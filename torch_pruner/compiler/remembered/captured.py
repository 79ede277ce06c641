"""Captured graphs as text, in the store beside libraries: entries of ``graphs`` whose meta says so.

In: a digest of all that capturing depended on, and the bytes that came out. They are evicted,
verified and shipped like libraries.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch_pruner.cache import GraphKey
    from torch_pruner.compiler.driver import Compiler


def find(compiler: Compiler, description: str) -> bytes | None:
    """The program that ``keep`` kept."""
    found = compiler.store.get_graph(_key(compiler, description))
    if found is None:
        return None
    try:
        head, _, program = found[1].read_bytes().partition(b"\n")
    except OSError:
        return None
    return program if head == _head(description) else None


def keep(compiler: Compiler, description: str, program: bytes, name: str) -> None:
    """For processes to come. ``on_miss="error"`` promises not to write, so it is silent then."""
    if compiler.config.on_miss != "error":
        text = _head(description) + b"\n" + program
        compiler.store.put_graph(_key(compiler, description), text, {"captured": name})


def _head(description: str) -> bytes:
    """What the bytes begin with: of which description they are, whatever row names them."""
    return hashlib.sha256(description.encode()).hexdigest().encode()


def _key(compiler: Compiler, description: str) -> GraphKey:
    return compiler.context.graph_key(f"captured {description}", ("captured",))
