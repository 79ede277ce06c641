"""Compiled graphs ride in torch's own caches: found again, never another backend's, never blind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import torch_pruner as tp
from torch_pruner import exc
from torch_pruner.dynamo.capture import torch_cache

pytestmark = [
    pytest.mark.tvm,
    pytest.mark.skipif(not torch_cache.AVAILABLE, reason="this torch has no such cache"),
]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_captures():
    """Our own store would answer before torch's cache is asked (test_captures.py)."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_pruner.dynamo.capture.capture_key.of", lambda *_: None)
        yield


def fn(x, w):
    return torch.softmax(x @ w, -1)


def mixed(x, w):
    return torch.cumprod(x @ w, 0).relu()


def args():
    torch.manual_seed(0)
    return torch.randn(24, 40), torch.randn(40, 56)


def fresh(compiled, *values):
    """The result of a call as a new process would make it, and how torch's cache was used."""
    torch._dynamo.reset()
    counters.clear()
    result = compiled(*values)
    return result, dict(counters["aot_autograd"])


def hits(of) -> int:
    return of.get("autograd_cache_hit", 0)


@pytest.mark.parametrize("function", [fn, mixed])
def test_the_second_process_finds_it_and_traces_nothing(cold, function) -> None:
    values = args()
    first, before = fresh(cold.compile(function), *values)
    assert not hits(before)
    assert before["autograd_cache_saved"] == 1
    again, after = fresh(cold.compile(function), *values)
    assert hits(after) == 1
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    (graph,) = tp.last_report().graphs
    assert graph.tasks
    assert {t.source for t in graph.tasks} <= {"cache", "draft", "untuned"}
    other = [torch.randn_like(v) for v in values]
    torch.testing.assert_close(cold.compile(function)(*other), function(*other))


def test_what_was_never_compared_with_eager_is_compiled_again(cold, monkeypatch) -> None:
    monkeypatch.setattr("torch_pruner.dynamo.run.checked.CheckedCall._first", _not_checked)
    _, before = fresh(cold.compile(fn), *args())
    assert before["autograd_cache_saved"] == 1
    monkeypatch.undo()
    result, after = fresh(cold.compile(fn), *args())
    assert not hits(after)
    torch.testing.assert_close(result, fn(*args()))
    _, last = fresh(cold.compile(fn), *args())
    assert hits(last) == 1


def _not_checked(self, values):
    return self._call(values)


def test_what_was_compared_once_is_not_compared_by_the_next_process(cold, monkeypatch) -> None:
    """Also without torch's cache: the kernel store alone remembers."""
    first = []

    def seen(self, values):
        first.append(values)
        return self._call(values)

    with torch._functorch.config.patch(enable_autograd_cache=False):
        fresh(cold.compile(fn), *args())
        monkeypatch.setattr("torch_pruner.dynamo.run.checked.CheckedCall._first", seen)
        result, _ = fresh(cold.compile(fn), *args())
        assert not first
        torch.testing.assert_close(result, fn(*args()))
        fresh(cold.compile(lambda x, w: fn(w.T, x.T)), *args())  # another graph is compared
        assert len(first) == 1


def test_other_kernels_have_to_be_compared_anew(cold, tmp_path) -> None:
    fresh(cold.compile(fn), *args())
    _, after = fresh(cold.compile(fn, cache_dir=str(tmp_path / "another")), *args())
    assert not hits(after)
    _, last = fresh(cold.compile(fn, cache_dir=str(tmp_path / "another")), *args())
    assert hits(last) == 1


def test_without_the_check_it_is_used_at_once(cold) -> None:
    fresh(cold.compile(fn, check="off"), *args())
    result, after = fresh(cold.compile(fn, check="off"), *args())
    assert hits(after) == 1
    torch.testing.assert_close(result, fn(*args()))


def test_another_backend_does_not_get_it(cold) -> None:
    fresh(cold.compile(fn), *args())
    _, of_inductor = fresh(torch.compile(fn, backend="inductor"), *args())
    assert not hits(of_inductor)
    torch._dynamo.reset()
    compiled = cold.compile(fn)
    compiled(*args())
    assert tp.last_report().graphs[0].tasks


def test_a_cache_without_the_kernels_is_a_miss_as_ever(cold, tmp_path) -> None:
    fresh(cold.compile(fn), *args())
    empty = cold.compile(fn, cache_dir=str(tmp_path / "empty"), on_miss="error")
    with pytest.raises(BackendCompilerFailed) as caught:
        fresh(empty, *args())
    assert isinstance(caught.value.inner_exception, exc.CacheMiss)


def test_production_finds_what_was_tuned_with_other_options(cold) -> None:
    fresh(cold.compile(fn, trials=4, effort="quick", threads=1), *args())
    shipped = cold.compile(fn, on_miss="error", effort="quick", threads=1)
    result, after = fresh(shipped, *args())
    assert hits(after) == 1
    torch.testing.assert_close(result, fn(*args()))


def test_training_is_kept_if_torch_compiles_the_backward_at_once(cold) -> None:
    def step():
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        result, seen = fresh(cold.compile(module), torch.randn(6, 8))
        result.sum().backward()
        return [p.grad for p in module.parameters()], seen

    lazy, before = step()
    assert "autograd_cache_saved" not in before
    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        eager_lowered, saved = step()
        assert saved["autograd_cache_saved"] == 1
        loaded, after = step()
    assert hits(after) == 1
    torch.testing.assert_close(eager_lowered, lazy)
    torch.testing.assert_close(loaded, lazy)


def test_weights_that_change_later_are_seen(cold) -> None:
    module = nn.Linear(8, 16).eval()
    x = torch.randn(4, 8)
    with torch.no_grad():
        fresh(cold.compile(module), x)
        compiled = cold.compile(module)
        _, after = fresh(compiled, x)
        assert hits(after) == 1
        module.weight.mul_(2)
        torch.testing.assert_close(compiled(x), module(x))


SHIP = """
import sys, torch, torch_pruner
from torch_pruner.dynamo.capture import capture_key
capture_key.of = lambda *_: None
from torch._dynamo.utils import counters
def fn(x, w):
    return torch.softmax(x @ w, -1)
torch.manual_seed(0)
values = torch.randn(24, 40), torch.randn(40, 56)
if sys.argv[1] == "load":
    torch.compiler.load_cache_artifacts(open(sys.argv[2], "rb").read())
options = {"effort": "none", "strict": True, "cache_dir": sys.argv[3]}
result = torch.compile(fn, backend="pruner", options=options)(*values)
torch.testing.assert_close(result, fn(*values))
if sys.argv[1] == "save":
    open(sys.argv[2], "wb").write(torch.compiler.save_cache_artifacts()[0])
assert "torch._inductor.codegen.triton" not in sys.modules  # a second's imports, for a key
print(counters["aot_autograd"].get("autograd_cache_hit", 0))
"""


@pytest.mark.rotated(6)
def test_it_travels_in_torchs_artifacts(tmp_path, monkeypatch) -> None:
    """What ``save_cache_artifacts`` wrote is found with another, empty directory of torch's."""
    found = []
    for role in ("save", "load"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / role))
        done = subprocess.run(
            [sys.executable, "-c", SHIP, role, str(tmp_path / "file"), str(tmp_path / "kernels")],
            capture_output=True, text=True, timeout=200, cwd=ROOT, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(int(done.stdout.splitlines()[-1]))
    assert found == [0, 1]


def test_ahead_of_time(cold, tmp_path) -> None:
    compiled = cold.compile(fn, fullgraph=True).aot_compile((args(), {}))
    compiled.save_compiled_function(str(tmp_path / "model"))
    torch._dynamo.reset()
    with (tmp_path / "model").open("rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    torch.testing.assert_close(loaded(*args()), fn(*args()))
