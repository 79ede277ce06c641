"""The space of attention kernels keeps the contract of sketches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.contracts.sketch import SketchContract
from tests.unit.graph.attention_graphs import Case, attention
from torch_pruner.families import sketches_for
from torch_pruner.families.decode_attention.space import DecodeAttentionSketch
from torch_pruner.target import TargetSpec
from torch_pruner.task import Task

if TYPE_CHECKING:
    from torch_pruner.families.space import Sketch

_CASES = {
    "ragged": Case(queries=37, keys=197, depth=80, width=80, mask="add", guard=True),
    "long": Case(queries=2048, keys=2048, heads=32, kv=8, depth=128, width=128, causal=True),
    "small": Case(queries=16, keys=16, depth=16, width=16, heads=1, kv=1),
    "float64": Case(dtype="float64"),
    "narrow": Case(queries=64, keys=77, depth=2, width=5),
    "bfloat16": Case(dtype="bfloat16", mask="bool"),
}


class TestAttentionSketch(SketchContract):
    @pytest.fixture(
        params=[(n, t, m) for n in _CASES for t in (1, 4) for m in ("icelake-server", "haswell")],
        ids=str,
    )
    def sketch(self, request: Any) -> Sketch:
        name, threads, mcpu = request.param
        target = TargetSpec.from_dict({"kind": "llvm", "mcpu": mcpu}, threads)
        (sketch,) = sketches_for(Task(name, attention(_CASES[name]), target, threads))
        assert sketch.name == "attention"
        return sketch


_FEW = {
    "grouped": Case(queries=1, heads=32, kv=4, keys=4096, depth=64, width=64, mask="bool"),
    "ragged": Case(queries=3, heads=7, kv=1, keys=197, depth=80, width=72, mask="add", guard=True),
    "one head": Case(queries=1, heads=1, kv=1, keys=32),
    "bfloat16": Case(queries=1, dtype="bfloat16"),
}


class TestDecodeAttentionSketch(SketchContract):
    @pytest.fixture(
        params=[(n, t, m) for n in _FEW for t in (1, 4) for m in ("icelake-server", "haswell")],
        ids=str,
    )
    def sketch(self, request: Any) -> Sketch:
        name, threads, mcpu = request.param
        target = TargetSpec.from_dict({"kind": "llvm", "mcpu": mcpu}, threads)
        found = sketches_for(Task(name, attention(_FEW[name]), target, threads))
        (sketch,) = (s for s in found if s.name == "decode_attention")
        return sketch


def test_keys_are_shared_out_where_heads_are_too_few() -> None:
    target = TargetSpec.from_dict({"kind": "llvm", "mcpu": "icelake-server"}, 2)
    for heads, shares in ((8, 1), (1, 2)):
        case = Case(queries=1, heads=heads, kv=heads, keys=4096, depth=64, width=64)
        sketch = DecodeAttentionSketch(Task("decode", attention(case), target, 2))
        assert sketch.named(sketch.default())["shares"] == shares
