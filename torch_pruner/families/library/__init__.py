"""Kernels that the vendor's library runs, through the framework's own operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch_pruner.families.base import Family

if TYPE_CHECKING:
    from torch_pruner.codegen.parts.kernel import Emitted
    from torch_pruner.families.space import Sketch
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature
    from torch_pruner.task import Task


class LibraryFamily(Family):
    """See the module. Whether it wins is measured after the search, see ``compiler.vendor``."""

    name = "library"
    generated = False

    def matches(self, task: Task) -> bool:
        return False  # there is nothing to search

    def space(self) -> type[Sketch]:
        raise LookupError("the vendor's library has no space")

    def emit(
        self, spec: Graph, decisions: Any, signature: Signature, *, host: bool = False
    ) -> Emitted:
        raise LookupError("the vendor's library emits nothing")


FAMILY = LibraryFamily()
