"""The pattern-aware model: features, network, loss, learning, momentum, weights."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from tests import fakes
from tests.contracts.cost_model import CostModelContract, results_of
from torch_pruner.families import sketches_for
from torch_pruner.families.flow import Role, flow_of
from torch_pruner.task import Task
from torch_pruner.tuner.cost_model import network, pattern
from torch_pruner.tuner.cost_model.analytic import AnalyticModel
from torch_pruner.tuner.cost_model.moa import MomentumModel, follow
from torch_pruner.tuner.cost_model.network import Batch
from torch_pruner.tuner.cost_model.pacm import MIN_MEASURED, PatternAwareModel
from torch_pruner.tuner.cost_model.ranking import SHARPNESS, lambda_rank
from torch_pruner.tuner.cost_model.residual import ResidualModel
from torch_pruner.tuner.cost_model.training import MAX_LISTED, TaskList
from torch_pruner.tuner.cost_model.weights import Weights


class TestPatternAwareModel(CostModelContract):
    @pytest.fixture
    def model(self):
        return PatternAwareModel(1)


class TestWithoutTheRegression(CostModelContract):
    @pytest.fixture
    def model(self):
        return PatternAwareModel(1, local=False)


class TestTheNetworkAlone(CostModelContract):
    @pytest.fixture
    def model(self):
        return PatternAwareModel(1, local=False, prior=False)


class TestMomentumModel(CostModelContract):
    @pytest.fixture
    def model(self):
        return MomentumModel(1)


class TestOffline(CostModelContract):
    @pytest.fixture
    def model(self):
        return MomentumModel(1, trained(MomentumModel(0)).weights(), learn=False)


def points_of(sketch, n: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    points = np.unique(np.stack([rng.choice(d, 2 * n) for d in sketch.domains], 1), axis=0)
    return points[rng.permutation(len(points))[:n]]


def trained(model, batches: int = 6, sketch=None):
    sketch = sketch or fakes.FakeSketch()
    points = points_of(sketch, 8 * batches)
    for at in range(0, len(points), 8):
        model.update(fakes.make_task(), [sketch], results_of(sketch, points[at : at + 8]))
    return model


def random_batch(n: int, t: int, rng: np.random.Generator) -> Batch:
    lengths = rng.integers(1, t + 1, n)
    return Batch(
        rng.standard_normal((n, network.STATEMENT)),
        rng.standard_normal((n, t, network.TOKEN)),
        rng.integers(0, network.N_ROLES, (n, t)),
        np.arange(t)[None, :] < lengths[:, None],
    )


def random_parameters(rng: np.random.Generator) -> np.ndarray:
    flat = network.initial(rng, "float64")
    return flat + 0.1 * rng.standard_normal(flat.shape)


def test_gradients_equal_those_of_differences() -> None:
    rng = np.random.default_rng(0)
    batch, flat = random_batch(32, 5, rng), random_parameters(rng)
    pull, found = rng.standard_normal(32), np.zeros(network.SIZE)
    network.Pass(network.named(flat), batch).backward(pull, network.named(found))
    for name, places in network.named(np.arange(network.SIZE, dtype=np.float64)).items():
        for i in rng.choice(places.reshape(-1), 3).astype(int):
            step = np.zeros(network.SIZE)
            step[i] = 1e-6
            up, down = (network.forward(flat + s * step, batch) @ pull for s in (1, -1))
            assert found[i] == pytest.approx((up - down) / 2e-6, rel=1e-4, abs=1e-6), name


def test_tokens_outside_the_mask_do_not_count() -> None:
    rng = np.random.default_rng(1)
    batch, flat = random_batch(40, 6, rng), random_parameters(rng)
    junk = np.where(batch.mask[:, :, None], batch.tokens, 100.0)
    other = Batch(batch.statement, junk, batch.roles, batch.mask)
    np.testing.assert_allclose(network.forward(flat, batch), network.forward(flat, other))


def test_the_order_of_tokens_counts() -> None:
    rng = np.random.default_rng(2)
    batch, flat = random_batch(8, 4, rng), random_parameters(rng)
    full = Batch(batch.statement, batch.tokens, batch.roles, np.ones_like(batch.mask))
    turned = Batch(full.statement, full.tokens[:, ::-1], full.roles[:, ::-1], full.mask)
    assert np.abs(network.forward(flat, full) - network.forward(flat, turned)).min() > 1e-4


def test_without_the_draft_model_the_network_ranks_by_itself() -> None:
    sketch = fakes.FakeSketch()
    model, points = PatternAwareModel(1, local=False, prior=False), points_of(sketch, 20)
    assert not model.predict(fakes.make_task(), sketch, points).any()
    trained(model)
    found = pattern.patterns(fakes.make_task(), sketch, points)
    scores = model.predict(fakes.make_task(), sketch, points)
    assert np.ptp(scores) > 0
    np.testing.assert_allclose(scores, model._score(found))


def test_an_untrained_network_corrects_nothing() -> None:
    rng = np.random.default_rng(3)
    scores = network.forward(network.initial(rng), random_batch(3, 4, rng))
    np.testing.assert_array_equal(scores, np.zeros(3))


def slow_lambda_rank(scores: np.ndarray, labels: np.ndarray) -> float:
    """One list, pair by pair, as it is written down."""
    n = len(scores)
    order = sorted(range(n), key=lambda i: -scores[i])
    rank = {i: r for r, i in enumerate(order)}
    ideal = sum(
        (2**y - 1) / np.log2(r + 2) for r, y in enumerate(sorted(labels.tolist(), reverse=True))
    )
    total = 0.0
    for i in range(n):
        for j in range(n):
            if labels[i] > labels[j]:
                gain = abs(2 ** labels[i] - 2 ** labels[j]) / ideal
                discount = abs(1 / np.log2(rank[i] + 2) - 1 / np.log2(rank[j] + 2))
                total += gain * discount * np.log1p(np.exp(-SHARPNESS * (scores[i] - scores[j])))
    return float(total)


def test_the_loss_equals_a_slow_reference_and_its_gradient_differences() -> None:
    rng = np.random.default_rng(4)
    scores, labels = rng.standard_normal((2, 9)), rng.random((2, 9))
    labels[0, 3] = 0.0
    mask = np.ones((2, 9), dtype=bool)
    mask[1, 6:] = False
    loss, pull = lambda_rank(scores, labels, mask)
    slow = [slow_lambda_rank(scores[0], labels[0]), slow_lambda_rank(scores[1, :6], labels[1, :6])]
    assert loss == pytest.approx(np.mean(slow))
    for place in np.ndindex(2, 9):
        moved = scores.copy()
        moved[place] += 1e-6  # too little to change a rank
        assert pull[place] == pytest.approx(
            (lambda_rank(moved, labels, mask)[0] - loss) / 1e-6, abs=1e-4
        )
    assert not pull[1, 6:].any()


def test_a_list_of_failures_gives_no_gradient() -> None:
    loss, pull = lambda_rank(np.ones((1, 4)), np.zeros((1, 4)), np.ones((1, 4), dtype=bool))
    assert loss == 0.0
    assert not pull.any()


def test_labels_follow_the_best_and_are_zero_for_failures() -> None:
    own, sketch = TaskList(), fakes.FakeSketch()
    found = pattern.patterns(fakes.make_task(), sketch, points_of(sketch, 3))
    own.add(found, [2.0, np.inf, 4.0])
    np.testing.assert_allclose(own.labels(), [1.0, 0.0, 0.5])
    own.add(found, [1.0, np.inf, np.inf])
    np.testing.assert_allclose(own.labels(), [0.5, 0.0, 0.25, 1.0, 0.0, 0.0])
    for _ in range(MAX_LISTED // 3 + 5):
        own.add(found, [1.0, 1.0, 1.0])
    assert len(own.seconds) == len(own.tokens) == MAX_LISTED


@pytest.mark.parametrize("kind", ["matmul", "elementwise", "rows"])
def test_every_sketch_has_features_row_by_row(kind) -> None:
    task = _task(kind)
    for sketch in sketches_for(task):
        points = sketch.default()[None].repeat(3, axis=0)
        for j, domain in enumerate(sketch.domains):
            points[1, j] = domain[-1]
        together = pattern.patterns(task, sketch, points)
        alone = pattern.patterns(task, sketch, points[1:2])
        assert together.statement.shape == (3, pattern.STATEMENT)
        assert together.tokens.shape[1:] == (len(together.roles), pattern.TOKEN)
        assert np.isfinite(together.tokens).all()
        assert np.isfinite(together.statement).all()
        np.testing.assert_array_equal(together.tokens[1], alone.tokens[0])
        np.testing.assert_array_equal(together.statement[1], alone.statement[0])
        roles = [s.role for s in flow_of(task, sketch, points)]
        assert roles[-1] is Role.WRITE
        assert roles.count(Role.COMPUTE) == 1
        reads = roles.count(Role.ACTIVATION) + roles.count(Role.CONSTANT)
        assert reads >= len(task.spec.inputs)


def _task(kind: str) -> Task:
    from torch_pruner.graph.ir import GraphBuilder

    if kind == "matmul":
        return fakes.make_task(64)
    b = GraphBuilder()
    x, y, z = (b.input(i, (64, 128), "float32") for i in range(3))
    out = b.pointwise("add", b.pointwise("mul", x, y), z)
    if kind == "rows":
        out = b.reduce("sum", out, [1])
    like = fakes.make_task()
    return Task(kind, b.finish([out]), like.target, like.threads)


def test_the_matmul_flow_says_how_operands_are_used_again() -> None:
    task = fakes.make_task(64)
    (sketch,) = sketches_for(task)
    steps = flow_of(task, sketch, sketch.default()[None])
    first, second = steps[0], steps[1]
    assert (first.role, second.role) == (Role.ACTIVATION, Role.CONSTANT)
    assert first.unique == 64 * 16 * 4
    assert second.unique == 16 * 8 * 4
    assert np.all(first.moved >= first.unique)
    assert steps[-1].moved == 64 * 8 * 4


def test_few_measurements_leave_it_the_residual_model() -> None:
    sketch, task = fakes.FakeSketch(), fakes.make_task()
    points = points_of(sketch, 40)
    model, plain = PatternAwareModel(0), ResidualModel()
    for each in (model, plain):
        each.update(task, [sketch], results_of(sketch, points[: MIN_MEASURED - 1]))
    np.testing.assert_array_equal(
        model.predict(task, sketch, points), plain.predict(task, sketch, points)
    )


@pytest.mark.parametrize(("local", "least"), [(True, 0.8), (False, 0.3)])
def test_it_learns_a_ranking_that_the_draft_model_gets_wrong(local, least) -> None:
    sketch, task = fakes.FakeSketch(believed=(1, 4, 0, 0)), fakes.make_task()
    points = points_of(sketch, 200, 5)
    model = PatternAwareModel(0, local=local, steps=30)
    for at in range(0, 80, 8):
        model.update(task, [sketch], results_of(sketch, points[at : at + 8]))
    rest, latency = points[80:], sketch.latency_s(points[80:])
    before = _rank_correlation(AnalyticModel().predict(task, sketch, rest), latency)
    after = _rank_correlation(model.predict(task, sketch, rest), latency)
    assert before < -0.5
    assert after > least


def test_what_is_learned_of_one_task_helps_another() -> None:
    sketch, other = fakes.FakeSketch(believed=(1, 4, 0, 0)), fakes.make_task(16)
    points = points_of(sketch, 160, 6)
    model = PatternAwareModel(0, steps=30)
    for at in range(0, 80, 8):
        model.update(fakes.make_task(), [sketch], results_of(sketch, points[at : at + 8]))
    rest, latency = points[80:], sketch.latency_s(points[80:])
    before = _rank_correlation(ResidualModel().predict(other, sketch, rest), latency)
    assert _rank_correlation(model.predict(other, sketch, rest), latency) > before + 0.2


def _rank_correlation(scores: np.ndarray, latencies: np.ndarray) -> float:
    return float(np.corrcoef(scores.argsort().argsort(), (-latencies).argsort().argsort())[0, 1])


def test_momentum_is_a_mean_first_and_a_hundredth_later() -> None:
    siamese = np.array([5.0, -3.0])
    follow(siamese, np.array([1.0, 2.0]), 0)
    np.testing.assert_allclose(siamese, [1.0, 2.0])
    follow(siamese, np.array([3.0, 2.0]), 1)
    np.testing.assert_allclose(siamese, [2.0, 2.0])
    follow(siamese, np.array([102.0, 2.0]), 5000)
    np.testing.assert_allclose(siamese, [3.0, 2.0])


def test_training_happens_in_a_copy_and_keeps_the_scaling() -> None:
    first = trained(MomentumModel(0)).weights()
    start = Weights(first.flat.copy(), first.scaling, 1000)
    model = trained(MomentumModel(1, start), 3, fakes.FakeSketch(optimum=(0, 0, 0, 0)))
    np.testing.assert_array_equal(start.flat, first.flat)
    found = model.weights()
    assert found.scaling is first.scaling
    assert found.updates in (1002, 1003)  # the first batch may be too few to train on
    moved = np.abs(found.flat - first.flat).max()
    assert 0 < moved < np.abs(model._flat - first.flat).max()
    assert model.changed


def test_without_momentum_what_was_trained_is_kept() -> None:
    first = trained(MomentumModel(0)).weights()
    model = trained(MomentumModel(1, first, momentum=0.0), 3)
    np.testing.assert_array_equal(model.weights().flat, model._flat)


def test_a_restart_begins_at_the_siamese_model() -> None:
    first = trained(MomentumModel(0)).weights()
    start = Weights(first.flat, first.scaling, 1000)
    sketch = fakes.FakeSketch(optimum=(0, 0, 0, 0))
    anew, on = (
        trained(MomentumModel(1, start, restart=restart), 6, sketch) for restart in (True, False)
    )
    moved = [float(np.abs(m._flat - first.flat).mean()) for m in (anew, on)]
    assert 0 < moved[0] < moved[1]


def test_offline_nothing_is_trained() -> None:
    first = trained(MomentumModel(0)).weights()
    model = MomentumModel(1, first, learn=False, local=False)
    sketch = fakes.FakeSketch()
    points = points_of(sketch, 20, 9)
    before = model.predict(fakes.make_task(), sketch, points)
    trained(model)
    np.testing.assert_array_equal(model.predict(fakes.make_task(), sketch, points), before)
    np.testing.assert_array_equal(model.weights().flat, first.flat)
    assert not model.changed


def test_weights_from_elsewhere_are_believed_only_once_they_have_proved_right() -> None:
    given = trained(MomentumModel(0)).weights()
    sketch, task = fakes.FakeSketch(), fakes.make_task()
    points = points_of(sketch, 20, 9)
    plain = AnalyticModel().predict(task, sketch, points)
    adapted = MomentumModel(1, given, local=False)
    np.testing.assert_array_equal(adapted.predict(task, sketch, points), plain)
    fixed = MomentumModel(1, given, learn=False, local=False).predict(task, sketch, points)
    assert np.abs(fixed - plain).max() > 0.01
    seen = results_of(sketch, points_of(sketch, 8, 3))
    adapted.update(task, [sketch], seen)  # the order of which the weights know from before
    assert adapted._trust.share > 0
    assert np.abs(adapted.predict(task, sketch, points) - plain).max() > 0.01


def test_without_training_there_is_nothing_to_keep() -> None:
    with pytest.raises(ValueError, match="nothing was trained"):
        MomentumModel(0).weights()


def test_weights_survive_bytes_exactly() -> None:
    first = trained(MomentumModel(0)).weights()
    again = Weights.from_bytes(first.to_bytes())
    np.testing.assert_array_equal(again.flat, first.flat)
    np.testing.assert_allclose(again.scaling.token, first.scaling.token, rtol=1e-6)
    assert again.updates == first.updates
    assert again.to_bytes() == first.to_bytes()


def test_the_bytes_are_safetensors() -> None:
    load = pytest.importorskip("safetensors.numpy").load
    first = trained(MomentumModel(0)).weights()
    tensors = load(first.to_bytes())
    np.testing.assert_array_equal(tensors["role"], network.named(first.flat)["role"])


def test_damaged_weights_are_refused() -> None:
    content = trained(MomentumModel(0)).weights().to_bytes()
    rng = np.random.default_rng(0)
    samples = [b"", b"{}", content[:100], content[:-1], content + b"x", b"\xff" * len(content)]
    for place in rng.integers(0, len(content), 200):
        changed = bytearray(content)
        changed[place] ^= 1 << int(rng.integers(8))
        samples.append(bytes(changed))
    refused = 0
    for sample in samples:
        try:
            found = Weights.from_bytes(sample)
        except ValueError:
            refused += 1
        else:  # a bit of the header that changes no number
            np.testing.assert_array_equal(found.flat, Weights.from_bytes(content).flat)
    assert refused >= len(samples) - 20


def test_equal_seeds_agree_in_a_fresh_process_and_leave_random_states_alone() -> None:
    script = (
        "import random, numpy as np\n"
        "states = random.getstate(), np.random.get_state()[1].tolist()\n"
        "from tests.unit.tuner.test_pattern_aware import *\n"
        "sketch = fakes.FakeSketch()\n"
        "model, points = trained(MomentumModel(7)), points_of(sketch, 9)\n"
        "scores = model.predict(fakes.make_task(), sketch, points)\n"
        "assert states == (random.getstate(), np.random.get_state()[1].tolist())\n"
        "import sys; assert 'torch' not in sys.modules\n"
        "print(scores.tolist())\n"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True
        ).stdout
        for _ in range(2)
    ]
    sketch = fakes.FakeSketch()
    here = trained(MomentumModel(7)).predict(fakes.make_task(), sketch, points_of(sketch, 9))
    assert runs[0] == runs[1] == f"{here.tolist()}\n"
