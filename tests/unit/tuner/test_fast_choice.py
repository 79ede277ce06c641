"""Under ``fast_math`` products in bfloat16 are one more choice, which estimates make."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.tuner.graphs_by_kind import matmul
from torch_pruner.compiler.kernels import draft
from torch_pruner.families import named, sketches_for
from torch_pruner.families.bf16_tiles import space as tiles
from torch_pruner.graph.precision import allow_fast
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from torch_pruner.graph.ir import Graph

AMX = replace(TargetSpec.from_dict({"kind": "llvm", "mcpu": "sapphirerapids"}, 2), bf16_tiles=True)
ZEN5 = TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver5"}, 2)
ICELAKE = TargetSpec.from_dict({"kind": "llvm", "mcpu": "icelake-server"}, 2)
EXACT = matmul(128, 768, 768)


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "tiles_allowed", lambda: True)


def names(spec: Graph, target: TargetSpec) -> set[str]:
    return {sketch.name for sketch in sketches_for(Task("kernel", spec, target, 2))}


def chosen(spec: Graph, target: TargetSpec) -> str:
    return draft(Task("kernel", spec, target, 2)).sketch


def test_without_the_option_nothing_is_rounded() -> None:
    for target in (AMX, ZEN5, ICELAKE):
        assert not names(EXACT, target) & {"bf16_tiles", "bf16_pairs"}


def test_each_processor_has_what_it_can() -> None:
    fast = allow_fast(EXACT)
    assert names(fast, AMX) == names(EXACT, AMX) | {"bf16_tiles", "bf16_pairs"}
    assert names(fast, ZEN5) == names(EXACT, ZEN5) | {"bf16_pairs"}
    assert names(fast, ICELAKE) == names(EXACT, ICELAKE)


def test_estimates_decide() -> None:
    """An Intel core multiplies pairs as slowly as it multiplies float32 four times."""
    fast = allow_fast(EXACT)
    assert chosen(fast, AMX) == "bf16_tiles"
    assert chosen(fast, ZEN5) == "bf16_pairs"
    assert chosen(fast, replace(AMX, bf16_tiles=False)) == chosen(EXACT, AMX)


@pytest.mark.parametrize("family", ["bf16_tiles", "bf16_pairs"])
def test_weights_are_rounded_when_they_are_packed(family: str) -> None:
    fast = allow_fast(EXACT)
    (sketch,) = (s for s in sketches_for(Task("kernel", fast, AMX, 2)) if s.name == family)
    found = named(family).signature(fast, sketch.named(sketch.default()))
    packed = [b for b, p in zip(found.inputs, found.packs, strict=True) if p is not None]
    assert [b.dtype for b in packed] == ["bfloat16"]
    assert [b.dtype for b in found.scratch[:1]] == ["bfloat16"], "the first operand's copy"
