"""That a program gave eager's results once: remembered in the store, for processes to come.

A verdict is about one program with one set of kernels on one device. It is an entry of the store's
graphs without a library, so it is evicted, verified and shipped as they are.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.cache import GraphKey
    from torch_pruner.compiler.driver import CompiledGraph, Compiler


def remember(
    compiler: Compiler, program: bytes, compiled: Sequence[CompiledGraph], name: str
) -> None:
    """The first call agreed with eager. ``on_miss="error"`` promises not to write, so it is silent
    then."""
    if compiler.config.on_miss != "error":
        compiler.store.put_graph(_key(compiler, program, compiled), b"ok", {"checked": name})


def remembered(compiler: Compiler, program: bytes, compiled: Sequence[CompiledGraph]) -> bool:
    """Whether this program agreed with eager, with these kernels."""
    return compiler.store.get_graph(_key(compiler, program, compiled)) is not None


def _key(compiler: Compiler, program: bytes, compiled: Sequence[CompiledGraph]) -> GraphKey:
    about = ["checked", hashlib.sha256(program).hexdigest(), *sorted({c.digest for c in compiled})]
    workloads = sorted({f"{t.workload}:checked" for c in compiled for t in c.tasks})
    return compiler.context.graph_key(" ".join(about), workloads)
