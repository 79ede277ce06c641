"""How graphs are cut into kernels where programs were measured: for processes to come.

Without a note rules hold. What is read decides only which of several equal programs is made: sites
that a graph does not have are nothing.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from torch_pruner.cache import Artifact, ArtifactKind
from torch_pruner.graph.cuts import NO_CUTS, from_text, to_text
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch_pruner.cache import GraphKey
    from torch_pruner.compiler.driver import Compiler
    from torch_pruner.graph.cuts import Cuts
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.layout import Order

log = logger(__name__)

MOST_BYTES = 1 << 20


def remember_cuts(
    compiler: Compiler,
    graph: Graph,
    inputs: Sequence[Order],
    outputs: Sequence[Order],
    cuts: Cuts,
) -> None:
    """Note that ``graph``, between values in these memory orders, is to be cut so."""
    key = _key(compiler, graph, inputs, outputs)
    compiler.store.put(Artifact(ArtifactKind.CUTS, key, to_text(cuts).encode()))


def remembered_cuts(
    compiler: Compiler, graph: Graph, inputs: Sequence[Order], outputs: Sequence[Order]
) -> Cuts:
    """What was noted; nothing where there is no note, or one that is damaged."""
    key = _key(compiler, graph, inputs, outputs)
    if (found := compiler.store.get(ArtifactKind.CUTS, key)) is None:
        return NO_CUTS
    try:
        with open(found[1], "rb") as file:
            data = file.read(MOST_BYTES + 1)
        if len(data) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES} bytes")
        return from_text(data.decode())
    except (OSError, ValueError, RecursionError) as err:
        log.warning("a graph is cut as rules say, what was noted of it is damaged: %s", err)
        compiler.store.drop(ArtifactKind.CUTS, key)
        return NO_CUTS


def _key(
    compiler: Compiler, graph: Graph, inputs: Sequence[Order], outputs: Sequence[Order]
) -> GraphKey:
    ends = json.dumps([[list(o) for o in inputs], [list(o) for o in outputs]])
    return compiler.context.graph_key(f"cuts {graph.digest()} {ends}", [])
