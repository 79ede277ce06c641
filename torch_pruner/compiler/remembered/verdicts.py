"""That a program gave eager's results once: remembered in the store, for processes to come.

A verdict is about one program with one set of kernels, in libraries of these bytes, on one device.
It is an entry of the store's graphs without a library, so it is evicted and verified as they are.
Only what this user has signed is believed: what others compared is compared again.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from torch_pruner.cache.entry import CHECKED

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
        compiler.store.put_graph(_key(compiler, program, compiled), b"ok", {CHECKED: name})


def remembered(compiler: Compiler, program: bytes, compiled: Sequence[CompiledGraph]) -> bool:
    """Whether this program agreed with eager, with these kernels."""
    return compiler.store.get_graph(_key(compiler, program, compiled), mine=True) is not None


def _key(compiler: Compiler, program: bytes, compiled: Sequence[CompiledGraph]) -> GraphKey:
    about = ["checked", hashlib.sha256(program).hexdigest()]
    about += sorted({f"{c.digest}:{c.library}" for c in compiled})
    workloads = sorted({f"{t.workload}:checked" for c in compiled for t in c.tasks})
    return compiler.context.graph_key(" ".join(about), workloads)
