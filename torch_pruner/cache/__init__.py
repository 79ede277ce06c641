"""The kernel cache: keys, entries, tuning records and the store. Imports neither torch nor TVM."""

from __future__ import annotations

from torch_pruner.cache.entry import (
    EFFORTS,
    SOURCES,
    Artifact,
    ArtifactEntry,
    ArtifactKind,
    KernelEntry,
    Source,
    keep_best,
)
from torch_pruner.cache.key import GraphKey, KernelKey, canonical_json
from torch_pruner.cache.maintenance import Listed, PruneReport, VerifyReport
from torch_pruner.cache.records import TuningRecord
from torch_pruner.cache.store import DEFAULT_MAX_BYTES, KernelStore, StoreStats

__all__ = [
    "DEFAULT_MAX_BYTES",
    "EFFORTS",
    "SOURCES",
    "Artifact",
    "ArtifactEntry",
    "ArtifactKind",
    "GraphKey",
    "KernelEntry",
    "KernelKey",
    "KernelStore",
    "Listed",
    "PruneReport",
    "Source",
    "StoreStats",
    "TuningRecord",
    "VerifyReport",
    "canonical_json",
    "keep_best",
]
