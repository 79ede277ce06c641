"""What every cost model promises."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import fakes
from torch_pruner.task import MeasureResult, MeasureStatus

if TYPE_CHECKING:
    from torch_pruner.tuner.cost_model.base import CostModel


class CostModelContract:
    """Subclasses give a fixture ``model``."""

    @pytest.fixture
    def model(self) -> CostModel:
        raise NotImplementedError

    @pytest.fixture
    def sketch(self) -> fakes.FakeSketch:
        return fakes.FakeSketch()

    @pytest.fixture
    def points(self, sketch) -> np.ndarray:
        rng = np.random.default_rng(0)
        return np.stack([rng.choice(d, 40) for d in sketch.domains], axis=1)

    @pytest.fixture(params=[0, 1, 20])
    def trained(self, request, model, sketch, points) -> CostModel:
        if request.param:
            model.update(fakes.make_task(), [sketch], results_of(sketch, points[: request.param]))
        return model

    def test_shape_and_finite(self, trained, sketch, points) -> None:
        for n in (0, 1, len(points)):
            scores = trained.predict(fakes.make_task(), sketch, points[:n])
            assert scores.shape == (n,)
            assert np.isfinite(scores).all()

    def test_a_score_does_not_depend_on_its_batch_mates(self, trained, sketch, points) -> None:
        together = trained.predict(fakes.make_task(), sketch, points)
        alone = [trained.predict(fakes.make_task(), sketch, p[None])[0] for p in points]
        # Products of one row and of many round otherwise.
        np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-6)

    def test_the_same_until_updated(self, trained, sketch, points) -> None:
        first = trained.predict(fakes.make_task(), sketch, points)
        trained.predict(fakes.make_task(), sketch, points[::-1])
        np.testing.assert_array_equal(trained.predict(fakes.make_task(), sketch, points), first)

    def test_failures_only(self, model, sketch, points) -> None:
        results = results_of(sketch, points[:8], MeasureStatus.BUILD_ERROR)
        model.update(fakes.make_task(), [sketch], results)
        assert np.isfinite(model.predict(fakes.make_task(), sketch, points)).all()

    def test_another_task_is_unaffected(self, model, sketch, points) -> None:
        other = fakes.make_task(16)
        before = model.predict(other, sketch, points)
        model.update(fakes.make_task(), [sketch], results_of(sketch, points[:20]))
        assert np.isfinite(model.predict(other, sketch, points)).all()
        assert before.shape == (len(points),)


def results_of(sketch, points, status=MeasureStatus.OK) -> list[MeasureResult]:
    from torch_pruner.tuner.search.space import SketchSpace

    space = SketchSpace(sketch)
    found = []
    for candidate in space.candidates(space.rows_of(points.tolist())):
        result = fakes.invented([sketch], candidate)
        ok = status is MeasureStatus.OK
        found.append(result if ok else MeasureResult(candidate, status, (), "bad"))
    return found
