"""Captured programs: what capturing a graph gave, so that later processes need not capture it.

In: a description of all that capturing depended on, and the bytes that came out. They are evicted,
verified and shipped like libraries.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from torch_pruner.cache import Artifact, ArtifactKind, GraphKey

if TYPE_CHECKING:
    from torch_pruner.compiler.driver import Compiler


def find(compiler: Compiler, description: str) -> bytes | None:
    """The program that ``keep`` kept."""
    found = compiler.store.get(ArtifactKind.CAPTURED, _key(compiler, description))
    if found is None:
        return None
    try:
        head, _, program = found[1].read_bytes().partition(b"\n")
    except OSError:
        return None
    return program if head == _head(description) else None


def keep(compiler: Compiler, description: str, program: bytes, name: str) -> None:
    """Keep a program for later processes, unless ``on_miss="error"``: it promises not to write."""
    if compiler.config.on_miss != "error":
        text = _head(description) + b"\n" + program
        key = _key(compiler, description)
        compiler.store.put(Artifact(ArtifactKind.CAPTURED, key, text, {"name": name}))


def _head(description: str) -> bytes:
    """The first line of the bytes: of which description they are, whatever row names them."""
    return hashlib.sha256(description.encode()).hexdigest().encode()


def _key(compiler: Compiler, description: str) -> GraphKey:
    return compiler.context.graph_key(description, ())  # the graph is not cut into kernels yet
