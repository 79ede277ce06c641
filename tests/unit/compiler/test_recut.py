"""Which other cuts of a graph are worth a race, and what is remembered of the one that won."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from tests.unit.graph.attention_graphs import Case, attention
from torch_pruner.cache import Artifact, ArtifactKind
from torch_pruner.compiler import drafting, recut
from torch_pruner.compiler.choice import Choice
from torch_pruner.compiler.recut import ABOUT, FEW, NEW, Recut
from torch_pruner.compiler.remembered import cuts as remembered
from torch_pruner.compiler.remembered.cuts import remember_cuts, remembered_cuts
from torch_pruner.config import Config
from torch_pruner.devices.cpu import CpuDevice
from torch_pruner.graph.cuts import APART, JOINED, NO_CUTS, PARTS, PLANES, STAGES, Site
from torch_pruner.graph.ir import Graph, GraphBuilder
from torch_pruner.graph.layout import identity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch_pruner.compiler.driver import Compiler

Orders = tuple[list[tuple[int, ...]], list[tuple[int, ...]]]


def gated(layers: int = 1) -> Graph:
    """Layers of two products of the same rows, one of which gates the other, and a third one."""
    b, given = GraphBuilder(), 1
    x = b.input(0, (64, 64), "float32")
    for _ in range(layers):
        weights = []
        for shape in ((128, 64), (128, 64), (64, 128)):
            weights.append(b.permute(b.input(given, shape, "float32", static=True), (1, 0)))
            given += 1
        gate, up = b.matmul(x, weights[0]), b.matmul(x, weights[1])
        both = b.pointwise("mul", b.pointwise("relu", gate), up)
        x = b.pointwise("add", x, b.matmul(both, weights[2]))
    return b.finish([x])


def ends(graph: Graph) -> Orders:
    inputs, outputs = (
        [identity(len(graph.nodes[i].shape)) for i in some]
        for some in (graph.inputs, graph.outputs)
    )
    return inputs, outputs


@pytest.fixture
def compiler(tmp_path: Path) -> Compiler:
    config = Config.from_options(options={"cache_dir": str(tmp_path), "threads": 2})
    return CpuDevice().compiler(config)


def recut_of(compiler: Compiler, graph: Graph) -> Recut:
    orders = ends(graph)
    tasks = compiler.lower(graph, *orders).tasks
    choices = {t.workload: Choice(drafting.draft(t), "tuned", 1e-4) for t in tasks}
    made = Recut.of(compiler, graph, *orders, choices)
    assert made is not None
    return made


def always() -> bool:
    return True


def test_joined_products_are_a_stage_of_their_own(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recut, "ABOUT", 10.0)
    made = recut_of(compiler, gated(layers=2))
    (joined,) = made.promising([JOINED], always)
    assert joined.kind == JOINED
    assert len(joined.sites) == 2, "layers that are alike are decided together"
    products = [n for n in joined.lowered.hoisted.graph.nodes if n.op == "matmul"]
    assert [n.shape[-1] for n in products] == [256, 64, 256, 64]
    others = made.promising(STAGES[-1], always)
    assert others
    assert JOINED not in {other.kind for other in others}


def test_the_most_promising_come_first_and_few(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = recut_of(compiler, gated(layers=2))
    assert all(other.ratio <= ABOUT for other in made.promising(STAGES[-1], always))
    monkeypatch.setattr(recut, "ABOUT", 10.0)
    found = made.promising(STAGES[-1], always)
    ratios = [other.ratio for other in found]
    assert ratios == sorted(ratios)
    assert len(found) <= FEW
    assert made.promising(STAGES[-1], lambda: False) == []


def test_what_brings_many_kernels_that_nobody_knows_is_left_out(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recut, "ABOUT", 10.0)
    made = recut_of(compiler, gated())
    assert {other.kind for other in made.promising(STAGES[-1], always)} == {APART}
    monkeypatch.setattr(recut, "NEW", 0)
    assert made.promising(STAGES[-1], always) == []
    assert NEW > 0


def test_estimates_are_of_kernels_in_a_program(compiler: Compiler) -> None:
    made = recut_of(compiler, attention(Case(queries=128, keys=128)))
    (parts,) = (s for s in made.lowered.sites if s.kind == PARTS)
    other = made.with_sites(frozenset([parts]))
    assert other.ratio > 1.0, "scores in memory cost more than none"
    assert len(other.lowered.workloads) > len(made.lowered.workloads)
    assert other.base == made.lowered.cuts == NO_CUTS
    made.take(other, {})
    assert made.changed
    back = made.with_sites(frozenset([parts]))
    assert back.cuts == NO_CUTS, "the other way of the other way"
    assert back.ratio == pytest.approx(1 / other.ratio)


def test_what_was_compiled_otherwise_is_left_alone(compiler: Compiler) -> None:
    graph = gated()
    assert Recut.of(compiler, graph, *ends(graph), {}) is None


def test_later_processes_cut_as_is_remembered(compiler: Compiler) -> None:
    graph = gated()
    orders = ends(graph)
    usual = compiler.lower(graph, *orders)
    (joined,) = (s for s in usual.sites if s.kind == JOINED)
    remember_cuts(compiler, graph, *orders, frozenset([joined]))
    cut = compiler.lower(graph, *orders)
    assert cut.cuts == {joined}
    assert cut.workloads != usual.workloads
    assert replace(compiler, cuts=NO_CUTS).lower(graph, *orders).workloads == usual.workloads
    other = gated(layers=2)
    assert compiler.lower(other, *ends(other)).cuts == NO_CUTS
    turned = ([(1, 0), *orders[0][1:]], orders[1])
    assert compiler.lower(graph, *turned).cuts == NO_CUTS, "of values that lie otherwise"


def test_a_library_is_of_one_cut(compiler: Compiler) -> None:
    """Two cuts may have kernels alike, and others between them."""
    graph = gated(layers=2)
    orders = ends(graph)
    usual = compiler.lower(graph, *orders)
    choices = {t.workload: Choice(drafting.draft(t), "tuned", 1e-4) for t in usual.tasks}
    keys = {
        compiler._graph_key(replace(usual, cuts=cuts), choices, None).digest()
        for cuts in (NO_CUTS, frozenset([Site(PLANES, 1)]), frozenset([Site(PLANES, 2)]))
    }
    assert len(keys) == 3


@pytest.mark.parametrize(
    "damage",
    [lambda n: b"[[1]]", lambda n: b"\xff", lambda n: b" " * (n + 1), lambda n: b"[" * 100_000],
)
def test_a_damaged_note_is_a_warning_and_gone(
    compiler: Compiler, damage: Callable[[int], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    graph = gated()
    orders = ends(graph)
    key = remembered._key(compiler, graph, *orders)
    compiler.store.put(Artifact(ArtifactKind.CUTS, key, damage(remembered.MOST_BYTES)))
    assert remembered_cuts(compiler, graph, *orders) == NO_CUTS
    assert "damaged" in caplog.text
    assert compiler.store.get(ArtifactKind.CUTS, key) is None
