"""What was captured once is found by Dynamo's graph alone, where that is all it depends on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F

import torch_pruner as tp
from torch_pruner import exc
from torch_pruner.dynamo.capture import capture_key

pytestmark = pytest.mark.tvm


@pytest.fixture
def captured(monkeypatch):
    """Counts the graphs that AOTAutograd is asked to capture."""
    torch._dynamo.list_backends()  # imports others, which use it
    from torch._dynamo.backends import common

    seen = []
    original = common.aot_autograd

    def counting(**arguments):
        seen.append(1)
        return original(**arguments)

    monkeypatch.setattr(common, "aot_autograd", counting)
    return seen


def fn(x, w):
    return torch.softmax(F.linear(x, w)[:, 1:], -1), x.sum(0)


def args():
    torch.manual_seed(0)
    return torch.randn(24, 40), torch.randn(56, 40)


def fresh(compiled, *values):
    """The result of a call as a new process would make it."""
    torch._dynamo.reset()
    return compiled(*values)


def test_the_second_process_captures_nothing(cold, captured) -> None:
    first = fresh(cold.compile(fn), *args())
    assert captured == [1]
    again = fresh(cold.compile(fn), *args())
    assert captured == [1]
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    report = tp.last_report()
    assert report.dynamo_s > 0.0  # what torch took outside of us
    (graph,) = report.graphs
    assert graph.tasks
    other = [torch.randn_like(v) for v in args()]
    torch.testing.assert_close(cold.compile(fn)(*other), fn(*other))


def test_a_module_with_other_weights_is_the_same_graph(cold, captured) -> None:
    with torch.no_grad():
        for seed in range(2):
            torch.manual_seed(seed)
            module = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU()).eval()
            x = torch.randn(2, 3, 9, 9)
            torch.testing.assert_close(fresh(cold.compile(module), x), module(x))
    assert captured == [1]


def test_production_finds_it(cold, captured) -> None:
    fresh(cold.compile(fn), *args())
    result = fresh(cold.compile(fn, on_miss="error"), *args())
    assert captured == [1]
    torch.testing.assert_close(result, fn(*args()))


def test_production_without_kernels_still_says_why(cold, tmp_path) -> None:
    fresh(cold.compile(fn), *args())
    empty = cold.compile(fn, cache_dir=str(tmp_path / "empty"), on_miss="error")
    with pytest.raises(BackendCompilerFailed) as caught:
        fresh(empty, *args())
    assert isinstance(caught.value.inner_exception, exc.CacheMiss)


def test_what_was_never_compared_with_eager_is_captured_again(cold, captured, monkeypatch) -> None:
    monkeypatch.setattr(
        "torch_pruner.dynamo.run.checked.CheckedCall._first",
        lambda self, values: self._call(values),
    )
    fresh(cold.compile(fn), *args())
    fresh(cold.compile(fn), *args())
    assert captured == [1, 1]


OTHERS = {
    "a constant": lambda x, w: (torch.softmax(F.linear(x, w)[:, 2:], -1), x.sum(0)),
    "an argument": lambda x, w: (torch.softmax(F.linear(x, w)[:, 1:], -1), x.sum(1)),
    "a function": lambda x, w: (torch.log_softmax(F.linear(x, w)[:, 1:], -1), x.sum(0)),
    "the order of outputs": lambda x, w: fn(x, w)[::-1],
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_graph_is_captured(cold, captured, what: str) -> None:
    fresh(cold.compile(fn), *args())
    result = fresh(cold.compile(OTHERS[what]), *args())
    assert captured == [1, 1]
    torch.testing.assert_close(result, OTHERS[what](*args()))


def test_other_inputs_are_captured(cold, captured) -> None:
    x, w = args()
    inputs = [
        (x, w),
        (x[:12], w),
        (x.t().contiguous().t(), w),
        (x.double(), w.double()),
        (x.clone().requires_grad_(), w),
    ]
    for given in inputs:
        torch.testing.assert_close(fresh(cold.compile(fn), *given), fn(*given))
    assert len(captured) == len(inputs)


def test_settings_of_torch_count(cold, captured) -> None:
    def under_autocast():
        with torch.autocast("cpu", torch.bfloat16):
            return fresh(cold.compile(fn), *args())

    plain = fresh(cold.compile(fn), *args())
    half = under_autocast()
    assert captured == [1, 1]
    assert half[0].dtype != plain[0].dtype or not torch.equal(half[0], plain[0])
    torch.testing.assert_close(under_autocast(), half, rtol=0, atol=0)
    assert captured == [1, 1]


def writes(x, w):
    x.add_(1)
    return x @ w.t()


def gives_a_view(x, w):
    return x.t(), x @ w.t()


@pytest.mark.parametrize("function", [writes, gives_a_view])
def test_what_torch_undoes_around_a_call_is_captured_every_time(cold, captured, function) -> None:
    for _ in range(2):
        given, expected = args(), args()
        result = fresh(cold.compile(function), *given)
        torch.testing.assert_close(result, function(*expected))
        torch.testing.assert_close(given, expected)
    assert captured == [1, 1]
    x, w = args()
    views = fresh(cold.compile(gives_a_view), x, w)[0]
    assert views.data_ptr() == x.data_ptr()


def test_training_is_captured_every_time(cold, captured) -> None:
    for _ in range(2):
        torch.manual_seed(0)
        module = nn.Linear(8, 4)
        fresh(cold.compile(module), torch.randn(2, 8)).sum().backward()
        assert module.weight.grad is not None
    assert captured == [1, 1]


def test_inputs_that_share_memory_are_not_described(cold, captured) -> None:
    x, w = args()
    for _ in range(2):
        fresh(cold.compile(lambda a, b: a @ b.t()), x[:12], x[12:])
    assert captured == [1, 1]
    del w


def test_functions_of_users_are_not_described() -> None:
    @torch._dynamo.allow_in_graph
    def mine(x):
        return x + 1

    seen = []

    def backend(gm, inputs):
        seen.append(capture_key.of(gm, inputs))
        return gm.forward

    torch.compile(lambda x: mine(x) * 2, backend=backend)(torch.ones(3))
    torch.compile(lambda x: torch.relu(x) * 2, backend=backend)(torch.ones(3))
    assert seen[0] is None
    assert seen[1] is not None


def test_a_damaged_entry_is_captured_again(cold, captured, monkeypatch) -> None:
    fresh(cold.compile(fn), *args())
    monkeypatch.setattr("torch_pruner.compiler.remembered.captured.find", lambda *_: b"no program")
    torch.testing.assert_close(fresh(cold.compile(fn), *args()), fn(*args()))
    assert captured == [1, 1]


def test_what_nobody_expected_is_said_and_eager_runs(cold, captured, caplog, monkeypatch) -> None:
    """A fault of ours while an entry is used goes the way of any other: one boundary holds it."""
    fresh(cold.compile(fn), *args())

    def broken(*_):
        raise ZeroDivisionError("a fault of ours")

    monkeypatch.setattr("torch_pruner.dynamo.lower.serialization.loads", broken)
    torch.testing.assert_close(fresh(cold.compile(fn, strict=False), *args()), fn(*args()))
    assert captured == [1]
    assert "runs in eager: ZeroDivisionError: a fault of ours" in caplog.text
