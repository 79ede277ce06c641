"""Under ``fast_math`` products in bfloat16 are one more choice, which estimates make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.unit.tuner.graphs_by_kind import matmul
from torch_pruner.compiler.drafting import draft
from torch_pruner.families import named, sketches_for
from torch_pruner.families.bf16_tiles import space as tiles
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.precision import allow_fast
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

AMX = replace(TargetSpec.from_dict({"kind": "llvm", "mcpu": "sapphirerapids"}, 2), bf16_tiles=True)
ZEN5 = TargetSpec.from_dict({"kind": "llvm", "mcpu": "znver5"}, 2)
ICELAKE = TargetSpec.from_dict({"kind": "llvm", "mcpu": "icelake-server"}, 2)
EXACT = matmul(128, 768, 768)


@pytest.fixture(autouse=True)
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "tiles_allowed", lambda: True)


def convolution(channels: int, size: int, out: int, kernel: int) -> Graph:
    """Channels last, as graphs are laid out."""
    b = GraphBuilder()
    x = b.input(0, (1, size, size, channels), "float32")
    w = b.input(1, (out, channels, kernel, kernel), "float32", static=True)
    pad = (kernel // 2,) * 2
    y = b.append(
        "conv", (b.permute(x, (0, 3, 1, 2)), w), (1, out, size, size), "float32",
        stride=(1, 1), lo=pad, hi=pad, dilation=(1, 1), groups=1,
    )  # fmt: skip
    return b.finish([b.permute(y, (0, 2, 3, 1))])


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


def test_convolutions_are_rounded_where_that_pays() -> None:
    """Windows of few channels are lines of the input: each a step, most of it products."""
    assert chosen(allow_fast(convolution(256, 14, 256, 3)), AMX) == "bf16_tiles"
    assert chosen(allow_fast(convolution(3, 224, 64, 7)), AMX) == "bf16_tiles"
    assert chosen(allow_fast(convolution(1, 224, 64, 3)), AMX) != "bf16_tiles"


@pytest.mark.parametrize("family", ["bf16_tiles", "bf16_pairs"])
def test_weights_are_rounded_when_they_are_packed(family: str) -> None:
    fast = allow_fast(EXACT)
    (sketch,) = (s for s in sketches_for(Task("kernel", fast, AMX, 2)) if s.name == family)
    found = named(family).signature(fast, sketch.named(sketch.default()))
    packed = [b for b, p in zip(found.inputs, found.packs, strict=True) if p is not None]
    assert [b.dtype for b in packed] == ["bfloat16"]
    assert [b.dtype for b in found.scratch[:1]] == ["bfloat16"], "the first operand's copy"
