"""Libraries of graphs in the store: loaded where they are there, kept where they were built."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch_pruner import exc
from torch_pruner.cache import Artifact, ArtifactKind
from torch_pruner.log import logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch_pruner.cache import GraphKey, KernelStore
    from torch_pruner.codegen.build.load import Entry
    from torch_pruner.compiler.toolchain import Library, Toolchain

log = logger(__name__)

LIBRARY = ArtifactKind.LIBRARY


@dataclass(frozen=True, slots=True)
class Libraries:
    """Those of one store, loaded by the toolchain of their device."""

    store: KernelStore
    toolchain: Toolchain

    def has(self, key: GraphKey) -> bool:
        """Whether there is a file; it may still be one that cannot be loaded."""
        return self.store.get(LIBRARY, key) is not None

    def loaded(
        self, key: GraphKey, names: Sequence[str], checked: Callable[[], None] | None = None
    ) -> tuple[list[Entry], str] | None:
        """The named entries, then the toolchain's own, and the digest of the file.

        Where there is one, ``checked`` is called before it is loaded.
        """
        if (found := self.store.get(LIBRARY, key)) is None:
            return None
        if checked is not None:
            checked()
        try:
            entries = self.toolchain.load(found[1], [*names, *self.toolchain.own])
        except exc.CorruptEntry as err:
            log.warning("rebuilding a library that cannot be loaded: %s", err)
            self.store.drop(LIBRARY, key)
            return None
        return entries, found[0].blob

    def publish(self, key: GraphKey, library: Library, kernels: int) -> str:
        """Keep a library for the next process; the digest of its file, "" if that fails."""
        try:
            with tempfile.TemporaryDirectory(prefix="torch_pruner") as folder:
                path = Path(folder) / "graph.so"
                library.save(path)
                self.store.put(Artifact(LIBRARY, key, path, {"kernels": kernels}))
                return hashlib.sha256(path.read_bytes()).hexdigest()
        except (exc.CompileError, OSError) as err:
            log.warning(
                "the compiled graph is used but cannot be kept for the next process: %s", err
            )
            return ""
