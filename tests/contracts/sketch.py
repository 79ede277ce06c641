"""What every sketch promises."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.emitting import signature
from torch_pruner.graph.ir import Graph

if TYPE_CHECKING:
    from torch_pruner.families.space import Decisions, Sketch


class SketchContract:
    """Subclasses give a fixture ``sketch``."""

    @pytest.fixture
    def sketch(self) -> Sketch:
        raise NotImplementedError

    @pytest.fixture
    def grid(self, sketch) -> Decisions:
        """Points of the whole space, valid or not, evenly spread."""
        full = np.stack(np.meshgrid(*sketch.domains, indexing="ij"), axis=-1)
        full = full.reshape(-1, len(sketch.names))
        return full[np.linspace(0, len(full) - 1, min(len(full), 2000)).astype(int)]

    def test_domains_are_distinct_integers(self, sketch) -> None:
        assert len(sketch.domains) == len(sketch.names) == len(set(sketch.names))
        for domain in sketch.domains:
            assert domain.dtype == np.int64
            assert domain.ndim == 1
            assert len(domain) > 0
            assert len(np.unique(domain)) == len(domain)

    def test_default_is_a_valid_point(self, sketch) -> None:
        point = sketch.default()
        assert point.shape == (len(sketch.names),)
        assert sketch.valid(point[None]).tolist() == [True]
        for value, domain in zip(point, sketch.domains, strict=True):
            assert value in domain

    def test_valid_is_a_mask_by_row(self, sketch, grid) -> None:
        mask = sketch.valid(grid)
        assert mask.shape == (len(grid),)
        assert mask.dtype == np.bool_
        some = slice(None, None, max(1, len(grid) // 50))
        alone = [bool(sketch.valid(p[None])[0]) for p in grid[some]]
        assert mask[some].tolist() == alone

    def test_symbols_are_finite_and_positive(self, sketch, grid) -> None:
        symbols = sketch.symbols(grid[sketch.valid(grid)])
        for entry in dataclasses.fields(symbols):
            column = getattr(symbols, entry.name)
            assert column.shape == (int(sketch.valid(grid).sum()),), entry.name
            assert np.isfinite(column).all(), entry.name
            assert (column > 0).all(), entry.name

    def test_symbols_do_not_depend_on_batch_mates(self, sketch, grid) -> None:
        points = grid[sketch.valid(grid)]
        together = sketch.symbols(points)
        for i in range(0, len(points), max(1, len(points) // 50)):
            alone = sketch.symbols(points[i : i + 1])
            for entry in dataclasses.fields(alone):
                both = getattr(together, entry.name)[i], getattr(alone, entry.name)[0]
                assert both[0] == both[1], entry.name

    def test_no_points(self, sketch, grid) -> None:
        assert sketch.valid(grid[:0]).shape == (0,)
        assert sketch.symbols(grid[:0]).latency_s.shape == (0,)

    def test_valid_points_have_signatures(self, sketch, grid) -> None:
        spec = sketch.task.spec
        points = grid[sketch.valid(grid)]
        for point in points[:: max(1, len(points) // 50)]:
            takes = signature(spec, sketch.name, sketch.named(point))
            assert len(takes.inputs) == len(takes.packs) == len(spec.inputs)
            assert len(takes.outputs) == len(spec.outputs)

    def test_deterministic(self, sketch, grid) -> None:
        """A sketch of the same task, made again from its text, is the same space."""
        spec = Graph.from_json(sketch.task.spec.to_json())
        again = type(sketch)(dataclasses.replace(sketch.task, spec=spec))
        assert [d.tolist() for d in again.domains] == [d.tolist() for d in sketch.domains]
        np.testing.assert_array_equal(again.valid(grid), sketch.valid(grid))
        np.testing.assert_array_equal(again.symbols(grid).latency_s, sketch.symbols(grid).latency_s)
        np.testing.assert_array_equal(again.default(), sketch.default())

    def test_default_is_the_best_predicted(self, sketch, grid) -> None:
        points = grid[sketch.valid(grid)]
        chosen = sketch.symbols(sketch.default()[None]).latency_s[0]
        assert chosen <= sketch.symbols(points).latency_s.min() * 1.05
