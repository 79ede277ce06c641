"""Eager's errors for values that a graph computes: indices out of bounds, divisors of zero.

Each function is called three times with good input (the first call is compared with eager), then
with bad input, which must raise what eager raises, then with good input again.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

import torch_pruner as tp
from tests.compile.agreement import assert_equal

pytestmark = pytest.mark.tvm

torch.manual_seed(0)
W = torch.randn(7, 3)
NAN = float("nan")

# A function of a table and a vector, a good one, a bad one.
INDICES = {
    "index": (lambda w, i: w[i * 2] + 1, [0, 3, -1], [0, 9, 1]),
    "index, below": (lambda w, i: w[i * 2] + 1, [0, 3, -3], [0, -4, 1]),
    "second dimension": (lambda w, i: w[:, i - 1].relu(), [0, 3], [0, 9]),
    "two indices": (lambda w, i: w[i * 2, i - 1] * 2, [0, 3], [0, 5]),
    "embedding": (lambda w, i: F.embedding(i + 1, w) * 2, [-1, 5], [0, 9]),
    "embedding, below": (lambda w, i: F.embedding(i + 1, w) * 2, [-1, 5], [0, -2]),
    "gather": (lambda w, i: w.gather(0, (i - 1)[:, None]) * 2, [1, 7], [0, 2]),
    "rows": (lambda w, i: w.index_select(0, i - 1) * 2, [1, 3], [0, 2]),
    "columns": (lambda w, i: w.index_select(1, i - 1) * 2, [1, 3], [0, 2]),
    "narrowed": (lambda w, i: w[i.to(torch.int32)] * 2, [2**32 + 6, 3], [2**32 + 9, 1]),
    "sliced": (lambda w, i: w[i[1:]] * 2, [99, 3, 6], [1, 3, 7]),
    "nan": (lambda w, x: w[x.long()] * 2, [1.5, 6.5], [0.0, NAN]),
    "take": (lambda w, i: torch.take(w, i * 2) + 1, [1, 2, 10], [1, 2, 11]),
    "scatter": (lambda w, i: w.relu().scatter(0, (i * 2)[:, None], 1.0), [1, 3], [0, 7]),
    "index_put": (lambda w, i: w.relu().index_put((i * 2,), w[0]) + 1, [1, 3], [0, 7]),
    "index_add": (lambda w, i: w.relu().index_add(0, i * 2, w[:2]) + 1, [1, 3], [0, 7]),
    "used by where alone": (
        lambda w, i: torch.where(i < 9, w[:, 0][i * 1], 0.0), [1, 6], [1, 9]
    ),
    "inside a softmax": (
        lambda w, i: ((w[i * 2] @ w.t()).softmax(-1) @ w).relu(), [1, 3], [1, 4]
    ),
    "classes": (
        lambda w, i: F.cross_entropy(w, i), [0, 1, 2, 0, -100, 0, 1], [0, 1, 3, 0, 1, 0, 1]
    ),
    "computed classes": (
        lambda w, i: F.cross_entropy(w * 2, i - 1, ignore_index=1),
        [1, 2, 2, 3, 1, 1, 1], [1, 2, 2, 0, 1, 1, 1],
    ),
    "weighted classes": (
        lambda w, i: F.nll_loss(w, i - 1, weight=w[0], reduction="sum"),
        [1, 2, 2, 3, 1, 1, 1], [1, 2, 2, 4, 1, 1, 1],
    ),
    "classes of an image": (
        lambda w, i: F.nll_loss(w.t()[None, :, None], (i + 1)[None, None], reduction="none"),
        [0, 1, -1, 0, 0, 1, 1], [0, 1, -1, 0, 0, 1, 2],
    ),
}  # fmt: skip

DIVISIONS = {
    "//": lambda w, i: (i * 3) // (i - 1),
    "%": lambda w, i: (i * 3) % (i - 1),
    "fmod": lambda w, i: torch.fmod(i * 3, i - 1) + 1,
    "trunc": lambda w, i: torch.div(i * 3, i - 1, rounding_mode="trunc") + 1,
    "floor": lambda w, i: torch.div(i * 3, i - 1, rounding_mode="floor") + 1,
    "a number": lambda w, i: 12 % (i - 1) + 5 // (i - 1),
    "of an input": lambda w, i: 7 % (i - 1) + 20 // i.clamp(min=1),
    "masked": lambda w, i: torch.where(i != 1, 7 // (i - 1), 0),
    "broadcast": lambda w, i: torch.arange(40) // (i - 1)[:, None],
    "fused": lambda w, i: ((w[:5] * 2 + (9 // (i - 1))[:, None]).softmax(-1) @ w.t()).relu(),
}


def error_of(fn, *args):
    with pytest.raises((IndexError, RuntimeError)) as info:
        fn(*args)
    return info.value


def same(mine, eager) -> None:
    for a, b in zip(mine, eager, strict=True):
        assert_equal(a, b)


def check_error(backend, fn, good, bad, *, exact=True, dynamic=None) -> None:
    compiled = backend.compile(fn, dynamic=dynamic)
    for _ in range(3):
        assert_equal(compiled(W, good), fn(W, good))
    mine, eager = error_of(compiled, W, bad), error_of(fn, W, bad)
    assert type(mine) is type(eager)
    assert str(mine) == str(eager) or not exact
    assert_equal(compiled(W, good), fn(W, good))


@pytest.mark.parametrize(("fn", "good", "bad"), INDICES.values(), ids=INDICES.keys())
def test_a_computed_index_out_of_bounds(backend, fn, good, bad):
    # torch.take is an index of the flattened tensor by the time it arrives here.
    exact = "out of range: tried to access" not in str(error_of(fn, W, torch.tensor(bad)))
    check_error(backend, fn, torch.tensor(good), torch.tensor(bad), exact=exact)


@pytest.mark.parametrize("name", ["index", "embedding", "gather", "columns"])
def test_a_computed_index_of_int32(backend, name):
    fn, good, bad = INDICES[name]
    good, bad = (torch.tensor(x, dtype=torch.int32) for x in (good, bad))
    if name == "gather":
        return check_error(
            backend, lambda w, i: w.gather(0, (i - 1).long()[:, None]) * 2, good, bad
        )
    return check_error(backend, fn, good, bad)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.int64) for name in DIVISIONS), ("%", torch.int32), ("trunc", torch.int8)],
    ids=str,
)
def test_a_whole_number_divided_by_zero(backend, name, dtype):
    fn = DIVISIONS[name]
    good, bad = torch.tensor([5, 2, -3, 4, 7]), torch.tensor([5, 2, -3, 4, 1])
    check_error(backend, fn, good.to(dtype), bad.to(dtype))


def test_one_zero_among_vectors_and_tails(backend):
    compiled = backend.compile(lambda w, i: (i * 5) // i + 1)
    good = torch.arange(1, 38)
    for place in range(37):
        assert compiled(W, good).tolist() == [6] * 37
        bad = good.clone()
        bad[place] = 0
        assert str(error_of(compiled, W, bad)) == "ZeroDivisionError"


def test_a_number_that_is_zero(backend):
    for fn in (
        lambda w, i: i * 2 // 0, lambda w, i: (i + 1) % 0, lambda w, i: torch.fmod(i + 1, 0)
    ):  # fmt: skip
        assert str(error_of(backend.compile(fn), W, torch.ones(3).long())) == "ZeroDivisionError"


def test_division_of_whole_numbers_that_eager_computes(backend):
    """A mean of whole numbers is rounded; no operator is refused by the code generator."""
    x = torch.tensor([[6, -7, 5, 0], [1, 2, 3, 9]])
    for fn in (lambda x: F.avg_pool2d(x[None, None], 2), lambda x: F.avg_pool1d(x[None], 2)):
        compiled = backend.compile(fn)
        for _ in range(2):
            assert_equal(compiled(x), fn(x))


def test_what_cannot_fail_is_not_tested(backend, monkeypatch):
    """Positions from sizes, clamped ones and constant divisors need no kernel of their own."""

    def fn(w, i):
        rows = w[i.clamp(0, 6)] + w[i % 7] + w[torch.arange(3) + 2] + w[(i > 2).long()]
        return rows + (i // 3)[:, None], w.argmax(0) // 2

    compiled = backend.compile(fn)
    i = torch.tensor([-4, 5, 50])
    for _ in range(2):
        same(compiled(W, i), fn(W, i))
    from torch_pruner.dynamo.lower import bounds

    assert tp.last_report().ops_fallback == ()
    seen = []
    monkeypatch.setattr(bounds, "flag_spec", lambda flags: seen.append(flags) or ())
    monkeypatch.setattr("torch_pruner.dynamo.lower.program.flag_spec", bounds.flag_spec)
    torch._dynamo.reset()
    other = torch.compile(fn, backend="pruner", options=backend.options(check="off"))
    other(W, i)
    assert seen in ([()], [])  # none where the captured graph was kept


def test_sizes_that_vary(backend):
    """Also in a program for larger sizes, whose padding repeats what is there."""

    def fn(w, i):
        return (F.embedding(i * 2, w).softmax(-1) + (12 // (i + 1))[:, None]).relu()

    compiled = backend.compile(fn, dynamic=True)
    for n in (16, 9, 5):
        good = torch.arange(n) % 4
        for _ in range(2):
            assert_equal(compiled(W, good), fn(W, good))
        for wrong in (4, -1):
            bad = good.clone()
            bad[n - 1] = wrong
            mine, eager = error_of(compiled, W, bad), error_of(fn, W, bad)
            assert (type(mine), str(mine)) == (type(eager), str(eager))
        assert_equal(compiled(W, good), fn(W, good))


def test_forward_and_backward_of_a_loss(backend):
    def fn(w, i):
        return F.cross_entropy(w.tanh() * 2, i + 1, ignore_index=2)

    compiled = backend.compile(fn)

    def step(of, target):
        w = W.clone().requires_grad_()
        loss = of(w, target)
        loss.backward()
        return loss.detach(), w.grad

    good, bad = torch.tensor([0, 1, -1, 0, 0, 1, -1]), torch.tensor([0, 1, -1, 0, 7, 1, -1])
    for _ in range(3):
        same(step(compiled, good), step(fn, good))
    mine, eager = error_of(step, compiled, bad), error_of(step, fn, bad)
    assert (type(mine), str(mine)) == (type(eager), str(eager))
    same(step(compiled, good), step(fn, good))


def test_the_gradient_of_a_loss_alone(backend):
    """Handed to the operator itself; eager writes out of bounds for some of these."""

    def fn(w, i):
        total = torch.tensor(2.0)
        return torch.ops.aten.nll_loss_backward(total, w * 2, i + 1, None, 1, -100, total)

    good, bad = torch.tensor([0, 1, -1, 0, 0, 1, -1]), torch.tensor([0, 1, -1, 0, 7, 1, -1])
    check_error(backend, fn, good, bad)


def test_an_input_is_not_written_before_an_error(backend):
    """The bad index comes first, so eager never came to the update."""

    def fn(w, cache, i):
        row = w[i * 2] * 2
        cache.index_copy_(0, torch.tensor([1]), row[:1])
        return (cache + 1).relu(), row

    compiled = backend.compile(fn)
    good, bad = torch.tensor([1]), torch.tensor([4])
    for _ in range(3):
        mine, eager = W.clone(), W.clone()
        same(compiled(W, mine, good), fn(W, eager, good))
        assert_equal(mine, eager)
    mine = W.clone()
    error_of(compiled, W, mine, bad)
    assert_equal(mine, W)
    same(compiled(W, mine, good), fn(W, W.clone(), good))


def test_threads_raise_for_their_own_values(backend):
    def fn(w, i):
        return w[i * 2] * 2 + (6 // (i + 1))[:, None]

    compiled = backend.compile(fn)
    good, bad = torch.arange(4), torch.tensor([0, 1, 4, 2])
    for _ in range(3):
        compiled(W, good)
    expected = fn(W, good)

    def work(k):
        for _ in range(50):
            if k % 2:
                assert isinstance(error_of(compiled, W, bad), IndexError)
            else:
                assert_equal(compiled(W, good), expected)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_a_saved_graph_raises_too(cold):
    """A process that finds the captured graph in the cache has the flags from there."""

    def fn(w, i):
        return w[i * 2] + 1

    good, bad = torch.tensor([0, 3]), torch.tensor([0, 4])
    for _ in range(2):
        torch._dynamo.reset()
        check_error(cold, fn, good, bad)


@torch.no_grad()
def test_what_shows_values_to_eager_is_explained_like_any_output():
    """``explain`` ended in ``ValueError``: it counted one output less than the region has."""

    class Shifted(torch.nn.Module):
        def forward(self, x, i):
            return x[i + 1]

    found = tp.explain(Shifted().eval(), (torch.randn(8), torch.arange(4)))
    assert "compiled" in str(found)
