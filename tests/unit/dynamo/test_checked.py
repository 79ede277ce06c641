"""The first-call check: what it compares, and how closely."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_pruner import exc
from torch_pruner.dynamo.run import in_double, rounding
from torch_pruner.dynamo.run.checked import CheckedCall, bounds_of, run_eager
from torch_pruner.dynamo.run.differences import Kept

aten = torch.ops.aten


def traced(fn, *args):
    return make_fx(lambda *a: list(fn(*a)), tracing_mode="fake")(*args)


def checked(gm, call, strict=True):
    dropped = []
    found = CheckedCall(gm, call, "g", strict=strict, failed=dropped.append)
    return found, dropped


def template_and_mask(x):
    template = torch.empty_strided((3, 16), (16, 1), dtype=torch.bool)
    mask = aten.bernoulli.p(template, 0.8)
    return template, mask, template.view(16, 3), x * 2


def test_unwritten_memory_is_not_compared():
    gm = traced(template_and_mask, torch.randn(4))
    assert bounds_of(gm) == [math.inf, 0.0, math.inf, 1e-3]


def test_a_template_of_a_mask_may_hold_anything():
    gm = traced(template_and_mask, torch.randn(4))

    def call(args):
        template, mask, view, double = run_eager(gm, args)
        return [~template, mask, ~view, double]

    first, dropped = checked(gm, call)
    first([torch.randn(4)])
    assert not dropped


def test_a_mask_drawn_otherwise_is_found():
    gm = traced(template_and_mask, torch.randn(4))

    def call(args):
        torch.rand(1)
        return run_eager(gm, args)

    first, dropped = checked(gm, call)
    with pytest.raises(exc.ResultMismatch, match="output 1 "):
        first([torch.randn(4)])
    assert dropped


@pytest.mark.parametrize(
    "overwrite",
    [
        lambda e, x: aten.copy(e, x),
        lambda e, x: torch.full_like(e, 2.0) * x,
        lambda e, x: torch.zeros_like(e) + x,
        lambda e, x: torch.rand_like(e) + x,
        lambda e, x: aten.fill(e, 1.0) - x,
    ],
)
def test_overwritten_memory_is_compared(overwrite):
    gm = traced(lambda x: [overwrite(torch.empty(4), x)], torch.randn(4))
    assert bounds_of(gm) == [1e-3]


def test_saved_generator_states_do_not_hide_the_operator_that_draws():
    run_and_save = torch._prims.rng_prims.run_and_save_rng_state

    def fn(x):
        template = torch.empty_strided((4,), (1,))
        state, drawn = run_and_save(aten.bernoulli.p, template, 0.5)
        return [state, drawn * x]

    gm = traced(fn, torch.randn(4))
    assert math.inf not in bounds_of(gm)


def test_random_numbers_continue_as_after_eager():
    gm = traced(template_and_mask, torch.randn(4))
    first, _ = checked(gm, lambda args: run_eager(gm, args))
    torch.manual_seed(5)
    first([torch.randn(4)])
    after = torch.rand(3)
    torch.manual_seed(5)
    run_eager(gm, [torch.randn(4)])
    assert torch.equal(after, torch.rand(3))


def lost_digits(x):
    """What is small is lost in bfloat16 beside what is large: eager is off by up to 1."""
    return [(x + 256) - 256]


def numbers():
    return torch.tensor([1.4, 2.9, -3.2, 7.6, 5.1], dtype=torch.bfloat16)


def test_a_result_may_be_nearer_to_double_precision_than_eager() -> None:
    gm = traced(lost_digits, numbers())
    first, dropped = checked(gm, lambda args: [args[0].clone()])
    first([numbers()])
    assert not dropped


def test_a_result_may_be_as_far_from_double_precision_as_eager() -> None:
    gm = traced(lost_digits, numbers())
    eager = run_eager(gm, [numbers()])[0]
    assert ((eager - numbers()).abs() > 0.06 * 7.6).any()
    first, dropped = checked(gm, lambda args: [2 * args[0] - eager])  # on the other side
    first([numbers()])
    assert not dropped


@pytest.mark.parametrize("limit", [in_double.MOST_BYTES, 1])
def test_a_result_that_is_far_from_both_is_refused(monkeypatch, limit) -> None:
    monkeypatch.setattr(in_double, "MOST_BYTES", limit)
    gm = traced(lost_digits, numbers())
    wrong = (lambda args: [args[0] + 3.5]) if limit > 1 else (lambda args: [args[0].clone()])
    first, dropped = checked(gm, wrong)
    with pytest.raises(exc.ResultMismatch, match="output 0 "):
        first([numbers()])
    assert dropped


def test_noise_of_eager_may_be_another_noise() -> None:
    """Nothing is left in double precision, and something in eager."""

    def fn(x):
        return [x.log_softmax(0) - x.log_softmax(0).mean()]

    x = torch.zeros(31)
    gm = traced(fn, x)
    eager = run_eager(gm, [x])[0]
    assert eager.abs().max() > 0
    for other in (torch.zeros(31), -eager, 1.5 * eager):
        first, dropped = checked(gm, lambda args, other=other: [other.clone()])
        first([x])
        assert not dropped
    first, dropped = checked(gm, lambda args: [100 * eager])
    with pytest.raises(exc.ResultMismatch, match="output 0 "):
        first([x])


@pytest.mark.parametrize("limit", [in_double.MOST_BYTES, 1])
def test_a_divergence_of_a_distribution_from_itself_is_any_noise(monkeypatch, limit) -> None:
    """As a student begins that was its teacher: a single number, by chance as small as it likes."""
    monkeypatch.setattr(in_double, "MOST_BYTES", limit)

    def divergence(x):
        return [(x.softmax(-1) * (x.softmax(-1).log() - x.log_softmax(-1))).sum()]

    x = torch.randn(8, 101, generator=torch.Generator().manual_seed(0))
    gm = traced(divergence, x)
    eager = run_eager(gm, [x])[0]
    assert 0 < eager.abs() < 1e-5
    for other in (-eager, torch.tensor(0.0), torch.tensor(1e-6)):
        first, dropped = checked(gm, lambda args, other=other: [other.clone()])
        first([x])
        assert not dropped
    for wrong in (1e-3, math.nan, math.inf):
        first, dropped = checked(gm, lambda args, wrong=wrong: [torch.tensor(wrong)])
        with pytest.raises(exc.ResultMismatch, match="output 0 "):
            first([x])


@pytest.mark.parametrize("limit", [in_double.MOST_BYTES, 1])
def test_a_mean_of_nothing_is_whatever_its_additions_round(monkeypatch, limit) -> None:
    """Of a product of what was normalised, as linear bottlenecks have it: eager adds in double
    precision, and thousands of numbers that are rounded at random leave less than one addition."""
    monkeypatch.setattr(in_double, "MOST_BYTES", limit)

    def running(x, weight):
        normalised = torch.ops.aten._native_batch_norm_legit.no_stats
        x = torch.conv2d(normalised(x, None, None, True, 0.1, 1e-5)[0], weight)
        return [normalised(x, None, None, True, 0.1, 1e-5)[1] * 0.1]

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, 64, 64, generator=generator)
    weight = torch.randn(16, 16, 1, 1, generator=generator)
    gm = traced(running, x, weight)
    eager = run_eager(gm, [x, weight])[0]
    unit = 0.1 * torch.finfo(torch.float32).eps
    assert 0 < eager.abs().max() < unit
    first, dropped = checked(gm, lambda args: [torch.full((16,), 4 * unit)])
    first([x, weight])
    assert not dropped
    for wrong in (1e-4, math.nan):
        first, dropped = checked(gm, lambda args, wrong=wrong: [torch.full((16,), wrong)])
        with pytest.raises(exc.ResultMismatch, match="output 0 "):
            first([x, weight])


def test_whole_numbers_are_not_rounded_otherwise() -> None:
    """What is compared with a mask or a count is no noise."""
    gm = traced(lambda x: [((x > 0).float() == 1).float() * x.sum()], torch.randn(31))
    x = torch.randn(31, generator=torch.Generator().manual_seed(0))
    first, dropped = checked(gm, lambda args: [-run_eager(gm, args)[0]])
    with pytest.raises(exc.ResultMismatch):
        first([x])
    assert dropped


@pytest.mark.parametrize("seed", rounding.RUNS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_what_is_rounded_otherwise_keeps_its_type(seed: int | None, dtype: torch.dtype) -> None:
    """Or a product of a half and what was computed of one raises."""

    def fn(x):
        return [torch.bmm(torch.softmax(x * 0.7, -1), x), x.sum() * 1.3]

    x = torch.randn(2, 5, 5).to(dtype)
    rounded = rounding.rounded_otherwise(traced(fn, x), [x], seed)
    assert [r.dtype for r in rounded] == [dtype, dtype]


def test_an_operator_that_refuses_other_roundings_shows_no_noise(monkeypatch) -> None:
    """A matrix that was just definite no longer is."""

    def refused(*_: object) -> list[torch.Tensor]:
        raise torch.linalg.LinAlgError("not positive-definite")

    monkeypatch.setattr(rounding, "rounded_otherwise", refused)
    gm = traced(lambda x: [x.sum(1)], torch.randn(8, 8))
    first, dropped = checked(gm, lambda args: [args[0].sum(1) + 1])
    with pytest.raises(exc.ResultMismatch):
        first([torch.randn(8, 8)])
    assert dropped


def test_numbers_that_a_graph_draws_are_the_same_where_it_rounds_otherwise() -> None:
    gm = traced(lambda x: [torch.dropout(x, 0.5, True) * 3], torch.randn(64))
    x, state = torch.randn(64), torch.get_rng_state()
    rounded = rounding.rounded_otherwise(gm, [x], 0)[0]
    torch.set_rng_state(state)
    torch.testing.assert_close(rounded, run_eager(gm, [x])[0], rtol=1e-5, atol=0)


def test_nothing_may_be_a_little_noise() -> None:
    """A constant less its mean."""
    gm = traced(lambda x: [x * 0], torch.ones(31))
    first, dropped = checked(gm, lambda args: [torch.full((31,), 1e-8)])
    first([torch.ones(31)])
    assert not dropped
    first, dropped = checked(gm, lambda args: [torch.full((31,), 1e-3)])
    with pytest.raises(exc.ResultMismatch):
        first([torch.ones(31)])


def test_operators_that_name_a_dtype_run_in_double_precision() -> None:
    def fn(x):
        half = x.to(torch.bfloat16)
        return [(half * 3).to(torch.float32), half.sum(0, dtype=torch.float32), x > 0]

    gm, x = traced(fn, torch.randn(4)), torch.tensor([0.1, 0.2, 0.7, 1.3])
    eager = [Kept.of(value, 0, 1) for value in run_eager(gm, [x])]
    found = in_double.bounds_by_double(gm, [x], eager, [0, 1, 2])
    assert [str(truth.value.dtype) for truth, _ in found.values()] == [
        "torch.float64", "torch.float64", "torch.bool",
    ]  # fmt: skip
    torch.testing.assert_close(found[0][0].value, x.double() * 3, rtol=0, atol=0)
    assert found[0][1] > 0  # eager has rounded
    assert found[2][1] == 0


def test_a_graph_that_reads_bits_has_no_double_precision() -> None:
    gm = traced(lambda x: [x.view(torch.int32) + 1], torch.randn(4))
    x = torch.randn(4)
    eager = [Kept.of(value, 0, 1) for value in run_eager(gm, [x])]
    assert in_double.bounds_by_double(gm, [x], eager, [0]) == {}
