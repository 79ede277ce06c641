"""The first-call check: what it compares, and how closely."""

import math

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torch_pruner import exc
from torch_pruner.dynamo.run.checked import CheckedCall, bounds_of, run_eager

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
