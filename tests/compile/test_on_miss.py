"""``on_miss="error"``: the deployment fails, never a request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torch_pruner as tp
from torch_pruner import exc

pytestmark = pytest.mark.tvm

ROOT = Path(__file__).resolve().parents[2]
SERVE = """
import sys, torch
from torch import nn
import torch_pruner as tp

def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8)).eval()

model = net()
options = {"effort": "none", "on_miss": "error", "threads": 1}
with torch.no_grad():
    for dynamic in (None, False, True):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="pruner", options=options, dynamic=dynamic)
        for batch in (8, 5, 5, 3, 8):
            x = torch.randn(batch, 24)
            torch.testing.assert_close(compiled(x), model(x))
    torch._dynamo.reset()
    try:
        torch.compile(model, backend="pruner", options=options)(torch.randn(5, 24))
    except tp.exc.CacheMiss as err:
        print("refused", err.missing)
"""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8)).eval()


def given(batch: int) -> tuple[torch.Tensor]:
    return (torch.zeros(batch, 24),)


@pytest.mark.parametrize("dynamic", [None, False], ids=["automatic", "static"])
@torch.no_grad()
def test_a_later_size_runs_in_eager_with_one_warning(cold, caplog, dynamic) -> None:
    """It ended in ``BackendCompilerFailed`` in the middle of serving."""
    model = net()
    cold.compile(model)(*given(8))
    torch._dynamo.reset()
    served = cold.compile(model, on_miss="error", dynamic=dynamic)
    served(*given(8))
    for batch in (5, 8, 5):
        x = torch.randn(batch, 24)
        torch.testing.assert_close(served(x), model(x))
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "run in eager" in warnings[0]
    assert "torch-pruner tune" in warnings[0]


@pytest.mark.rotated(6)
@torch.no_grad()
def test_the_same_in_another_process_where_nothing_is_tuned_and_nothing_logged(cold) -> None:
    model = net()
    cold.compile(model, threads=1)(*given(8))
    done = subprocess.run(
        [sys.executable, "-c", SERVE],
        env={**os.environ, "TORCH_PRUNER_CACHE_DIR": str(cold.cache_dir), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("refused ('matmul"), done.stdout
    lines = [line for line in done.stderr.splitlines() if "run in eager" in line]
    # One for the graph of all later sizes, and one for each of the static graphs of 5 and of 3.
    # With ``dynamic=True`` smaller sizes run in the library for 8 rows.
    assert len(lines) == 1 + 2, done.stderr[-3000:]


@torch.no_grad()
def test_check_ready_lists_everything_that_is_missing(cold) -> None:
    model, options = net(), cold.options()
    with pytest.raises(exc.CacheMiss) as caught:
        tp.check_ready(model, [given(8), given(5)], options=options)
    assert len(caught.value.missing) == 4
    assert not list(cold.cache_dir.rglob("*.so"))
    tp.tune(model, given(8), options=options)
    assert tp.check_ready(model, given(8), options=options) is None
    with pytest.raises(exc.CacheMiss) as caught:
        tp.check_ready(model, [given(8), given(5)], options=options)
    assert [name.rpartition("_")[2] for name in caught.value.missing] == ["5x40", "5x8"]
    tp.tune(model, given(5), options=options)
    assert tp.check_ready(model, [given(8), given(5)], options=options) is None
    served = cold.compile(model, on_miss="error")
    for batch in (8, 5):
        served(*given(batch))
        assert "failed" not in tp.last_report().notes
        assert tp.last_report().sources["cache"] == 2


@torch.no_grad()
def test_check_ready_misses_a_library_that_is_gone(cold) -> None:
    model, options = net(), cold.options()
    tp.tune(model, given(8), options=options)
    for library in cold.cache_dir.rglob("*.so"):
        library.unlink()
    with pytest.raises(exc.CacheMiss, match="library of graph"):
        tp.check_ready(model, given(8), options=options)
