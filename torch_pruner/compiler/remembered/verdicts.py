"""Verdicts: which programs gave eager's results on their first call, for processes to come.

A verdict is about one program with one set of kernels, in libraries of these bytes, on one device.
It is an artifact without bytes: that it is stored is all it says. Only what this user has signed is
believed: what others compared is compared again.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from torch_pruner.cache import Artifact, ArtifactKind, GraphKey

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.compiler.compiled import CompiledGraph
    from torch_pruner.compiler.driver import Compiler


def remember(
    compiler: Compiler, program: bytes, compiled: Sequence[CompiledGraph], name: str
) -> None:
    """Note that the first call agreed with eager, unless ``on_miss="error"``, which promises not to
    write."""
    if compiler.config.on_miss != "error":
        key = _key(compiler, program, compiled)
        compiler.store.put(Artifact(ArtifactKind.VERDICT, key, meta={"name": name}))


def remembered(compiler: Compiler, program: bytes, compiled: Sequence[CompiledGraph]) -> bool:
    """Whether this program agreed with eager, with these kernels."""
    key = _key(compiler, program, compiled)
    return compiler.store.get(ArtifactKind.VERDICT, key, mine=True) is not None


def _key(compiler: Compiler, program: bytes, compiled: Sequence[CompiledGraph]) -> GraphKey:
    about = [hashlib.sha256(program).hexdigest()]
    about += sorted({f"{c.digest}:{c.library}" for c in compiled})
    workloads = sorted({t.workload for c in compiled for t in c.tasks})
    return compiler.context.graph_key(" ".join(about), workloads)
