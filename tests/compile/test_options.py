"""Options of the backend: wrong ones, modes, fallbacks, misses, threads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.compile.agreement import check
from tests.compile.functions import (
    leaf,
    mlp,
    qr_in_the_middle,
    randn,
)
from torch_pruner import exc

pytestmark = pytest.mark.tvm


def failure_of(fn, *args) -> BaseException:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        fn(*args)
    return caught.value.inner_exception


BAD_OPTIONS = {
    "misspelt": ({"trails": 3}, "did you mean 'trials'"),
    "unknown": ({"zzz": 3}, "known options"),
    "wrong type": ({"trials": "many"}, "trials"),
    "out of range": ({"time_budget_s": -1}, "time_budget_s"),
    "no such choice": ({"effort": "huge"}, "effort"),
    "bool as int": ({"threads": True}, "threads"),
    "zero threads": ({"threads": 0}, "threads"),
    "not a bool": ({"strict": "yes"}, "strict"),
    "not a path": ({"cache_dir": 7}, "cache_dir"),
    "bad target": ({"target": {"arch": "x"}}, "target"),
    "rpc without tracker": ({"executor": "rpc"}, "tracker"),
}


@pytest.mark.parametrize(("options", "says"), BAD_OPTIONS.values(), ids=BAD_OPTIONS.keys())
def test_wrong_options_raise(options, says):
    compiled = torch.compile(mlp, backend="pruner", options=options)
    error = failure_of(compiled, randn(3, 4), randn(4, 5))
    assert isinstance(error, exc.OptionError)
    assert says in str(error)


MODES = ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode, shared_cache, monkeypatch):
    monkeypatch.setenv("TORCH_PRUNER_CACHE_DIR", str(shared_cache))
    monkeypatch.setenv(
        "TORCH_PRUNER_ON_MISS", "fallback"
    )  # modes set the effort, and tuning is not the point
    monkeypatch.setenv("TORCH_PRUNER_STRICT", "1")
    check(torch.compile(mlp, backend="pruner", mode=mode), mlp, lambda: (randn(3, 4), randn(4, 5)))


def test_fallback_error_refuses_what_is_not_compiled(backend):
    error = failure_of(backend.compile(qr_in_the_middle, fallback="error"), randn(4, 6))
    assert isinstance(error, exc.UnsupportedModel)
    assert "qr" in str(error)
    check(backend.compile(mlp, fallback="error"), mlp, lambda: (randn(3, 4), randn(4, 5)))


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(randn, id="inference"),
        pytest.param(leaf, id="training", marks=pytest.mark.rotated(6)),  # two more of its builds
    ],
)
def test_fallback_inductor(backend, make):
    compiled = backend.compile(qr_in_the_middle, fallback="inductor")
    check(compiled, qr_in_the_middle, lambda: (make(6, 4),), tolerance=1e-3)


def test_fallback_inductor_keeps_random_numbers_and_writes(backend):
    def fn(x):
        return F.dropout(x, 0.5, training=True) * 2

    check(backend.compile(fn, fallback="inductor"), fn, lambda: (randn(4, 6),))


class Canary(Exception):
    """Raised by an operator that must not run."""


def test_on_miss_error_raises_before_anything_runs_and_is_silent_when_warm(cold):
    ran = []

    @torch.library.custom_op("pruner_tests::canary", mutates_args=())
    def canary(x: torch.Tensor) -> torch.Tensor:
        ran.append(1)
        return x.clone()

    canary.register_fake(torch.empty_like)

    def fn(x, w):
        x.add_(1)
        return torch.ops.pruner_tests.canary(x) @ w

    x, w = randn(3, 4), randn(4, 5)
    before = x.clone()
    error = failure_of(cold.compile(fn, on_miss="error"), x, w)
    assert isinstance(error, exc.CacheMiss)
    assert "torch-pruner tune" in str(error)
    assert not ran
    assert torch.equal(x, before)
    torch._dynamo.reset()
    check(cold.compile(fn), fn, lambda: (randn(3, 4), randn(4, 5)))
    torch._dynamo.reset()
    check(cold.compile(fn, on_miss="error"), fn, lambda: (randn(3, 4), randn(4, 5)))


def test_on_miss_error_names_the_differing_field(cold):
    x, w = randn(3, 4), randn(4, 5)
    cold.compile(mlp, threads=1)(x, w)
    torch._dynamo.reset()
    error = failure_of(cold.compile(mlp, threads=2, on_miss="error"), x, w)
    assert isinstance(error, exc.CacheMiss)
    assert "threads" in str(error)


def test_on_miss_error_of_a_backward_raises_before_the_forward_runs(cold):
    """Production must not serve a forward whose backward is missing."""
    x, w = leaf(3, 4), leaf(4, 5)
    with torch.no_grad():
        cold.compile(mlp)(x, w)
    torch._dynamo.reset()
    error = failure_of(cold.compile(mlp, on_miss="error"), x, w)
    assert isinstance(error, exc.CacheMiss)


def test_check_off(backend):
    check(backend.compile(mlp, check="off"), mlp, lambda: (leaf(3, 4), leaf(4, 5)))


def test_one_thread_and_two_threads(backend):
    for threads in (1, 2, 1):
        check(backend.compile(mlp, threads=threads), mlp, lambda: (randn(30, 40), randn(40, 50)))
        torch._dynamo.reset()
