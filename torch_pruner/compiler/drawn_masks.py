"""The entry that draws masks of dropout: of one library for all graphs, kept as theirs are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner import exc
from torch_pruner.compiler.building.kept import KeptKernels
from torch_pruner.compiler.libraries import Libraries
from torch_pruner.graph.memory import MASKS
from torch_pruner.log import logger

if TYPE_CHECKING:
    from torch_pruner.codegen.build.load import Entry
    from torch_pruner.compiler.driver import Compiler

log = logger(__name__)


def masks_entry(compiler: Compiler) -> Entry | None:
    """The entry ``graph.memory.MASKS``; None where the device has none, it may not be built, or
    cannot be."""
    toolchain, store, context = compiler.toolchain, compiler.store, compiler.context
    if MASKS not in toolchain.optional:
        return None
    libraries, key = Libraries(store, toolchain), context.graph_key(MASKS, [])
    toolchain.prepare()
    if (known := libraries.loaded(key, [MASKS])) is not None:
        return known[0][0]
    if compiler.config.on_miss == "error":
        return None
    kept, target = KeptKernels(store, context), context.target
    try:
        with compiler.timer.phase("build"):
            library = toolchain.build({}, {MASKS: ()}, 0, target, kept)
            libraries.publish(key, library, 0)
            return library.entries()[0]
    except exc.CompileError as err:
        log.warning("eager draws masks of dropout: %s", err)
        return None
