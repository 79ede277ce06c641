"""Families by name, as tests want them: kernels and their parameters from decisions in a dict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch_pruner import families
from torch_pruner.target import TargetSpec
from torch_pruner.task import Candidate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch_pruner.codegen.parts.kernel import ScheduledKernel
    from torch_pruner.graph.ir import Graph
    from torch_pruner.graph.signature import Signature


def signature(spec: Graph, family: str, decisions: Mapping[str, int]) -> Signature:
    return families.named(family).signature(spec, decisions)


def schedule(
    spec: Graph, family: str, decisions: Mapping[str, int], *, host: bool = False
) -> ScheduledKernel:
    candidate = Candidate(family, tuple(sorted(decisions.items())))
    return families.named(family).schedule(spec, candidate, TargetSpec.detect(), host=host)
