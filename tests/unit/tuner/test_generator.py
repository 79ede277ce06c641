"""The generator of schedules: sentences, gradients, learning, files, the search that uses it."""

from __future__ import annotations

import numpy as np
import pytest

from tests import fakes
from tests.contracts.search_strategy import SearchStrategyContract
from tests.unit.tuner.test_search import IMPORT
from torch_pruner.tuner.cost_model.layers import ROWS, views
from torch_pruner.tuner.generator import network
from torch_pruner.tuner.generator.model import Generator, optimiser
from torch_pruner.tuner.generator.sentence import OPTION, PROMPT, STEP, Prompt, inputs
from torch_pruner.tuner.search.space import SketchSpace
from torch_pruner.tuner.search.tlm import TLMSearch

HERE = f"{IMPORT}('tests.unit.tuner.test_generator')"


def tlm() -> TLMSearch:
    return TLMSearch(Generator())


class TestTLM(SearchStrategyContract):
    make = f"{HERE}.tlm()"

    @pytest.fixture
    def strategy(self):
        return tlm()


def sketches() -> list[fakes.FakeSketch]:
    return [fakes.FakeSketch(), fakes.FakeSketch("other", (3, 3), (1, 1), (0, 1), 4e-4)]


def prompt() -> Prompt:
    return Prompt.of(fakes.make_task(), sketches())


def rows_of(i: int, n: int, seed: int = 0) -> np.ndarray:
    return SketchSpace(sketches()[i]).random(n, np.random.default_rng(seed))


def test_what_a_step_sees_is_what_came_before_it() -> None:
    found, rows = prompt(), rows_of(0, 6)
    whole = inputs(found, 0, rows)
    assert whole.shape == (len(rows), 1 + rows.shape[1], STEP)
    assert len(found.numbers) == PROMPT
    for t in range(rows.shape[1]):
        np.testing.assert_array_equal(inputs(found, 0, rows[:, :t]), whole[:, : t + 2])
    assert all(o.shape[1] == OPTION for o in found.options[0])


def test_later_choices_do_not_change_earlier_steps() -> None:
    rows = rows_of(0, ROWS)
    rows = np.resize(rows, (ROWS, rows.shape[1]))
    p = views(network.initial(np.random.default_rng(0)), network.SHAPES)
    changed = rows.copy()
    changed[:, -1] = 0
    runs = [network.Pass(p, inputs(prompt(), 0, r), prompt().options[0]) for r in (rows, changed)]
    for before, after in zip(runs[0].logits, runs[1].logits, strict=True):
        np.testing.assert_allclose(before, after, rtol=1e-5, atol=1e-6)


def test_gradients_equal_those_of_differences() -> None:
    generator = Generator(network.initial(np.random.default_rng(1), "float64"))
    found, rows = prompt(), rows_of(0, 5)
    weights = np.array([1.0, 2.0, 0.5, 1.0, 3.0])[: len(rows)]

    class Kept:
        def step(self, flat: np.ndarray, gradient: np.ndarray) -> None:
            self.gradient = gradient.copy()

    kept = Kept()
    batch = [(found, 0, rows, weights), (found, 1, rows_of(1, 3), np.ones(3))]
    generator.step(kept, batch)  # type: ignore[arg-type]
    rng = np.random.default_rng(2)
    for at in rng.choice(network.SIZE, 40, replace=False):
        losses = []
        for shift in (1e-5, -1e-5):
            generator.flat[at] += shift
            losses.append(generator.step(Kept(), batch))  # type: ignore[arg-type]
            generator.flat[at] -= shift
        slope = (losses[0] - losses[1]) / 2e-5
        assert kept.gradient[at] == pytest.approx(slope, rel=1e-4, abs=1e-8)


def test_probabilities_of_all_sentences_add_up_to_one() -> None:
    generator, total = Generator(), 0.0
    for i, sketch in enumerate(sketches()):
        sizes = [len(d) for d in sketch.domains]
        every = np.indices(sizes).reshape(len(sizes), -1).T
        total += float(np.exp(generator.log_probability(prompt(), i, every)).sum())
    assert total == pytest.approx(1.0, rel=1e-4)


def test_it_writes_what_it_was_trained_on() -> None:
    generator, adam = Generator(), optimiser()
    wanted = rows_of(1, 8)[:1]
    before = generator.log_probability(prompt(), 1, wanted)[0]
    for _ in range(60):
        generator.step(adam, [(prompt(), 1, wanted, np.ones(1))])
    assert generator.log_probability(prompt(), 1, wanted)[0] > max(-0.5, before)
    written = generator.write(prompt(), 64, np.random.default_rng(0))
    assert sum(map(len, written)) == 64
    assert len(written[1]) > 40
    assert (written[1] == wanted).all(axis=1).mean() > 0.5


def test_sentences_are_the_same_for_the_same_seed() -> None:
    one, two = (Generator().write(prompt(), 40, np.random.default_rng(5)) for _ in range(2))
    for a, b in zip(one, two, strict=True):
        np.testing.assert_array_equal(a, b)


def test_parameters_survive_bytes_exactly_and_damage_is_refused() -> None:
    generator = Generator(seed=3)
    content = generator.to_bytes()
    np.testing.assert_array_equal(Generator.from_bytes(content).flat, generator.flat)
    for damaged in (content[:-1], content[:50], b"", content[:-4] + b"\0\0\0\1"):
        with pytest.raises(ValueError, match=r"damaged|no weights|cut off|numbers"):
            Generator.from_bytes(damaged)


def test_the_likeliest_comes_first() -> None:
    generator, adam = Generator(), optimiser()
    wanted = rows_of(0, 8)[:1]
    for _ in range(60):
        generator.step(adam, [(prompt(), 0, wanted, np.ones(1))])
    search = TLMSearch(generator)
    search.start(fakes.make_task(), sketches(), rng=np.random.default_rng(0))
    first = search.propose(1)
    assert first == SketchSpace(sketches()[0]).candidates(wanted)
