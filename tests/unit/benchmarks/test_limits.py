"""Tasks against the peak, memory against what is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import memory, tasks

GIGA = 1e9


def _task(name: str, calls: int, gflop: float, seconds: float | None, mb: float = 1.0) -> Any:
    return {
        "name": name,
        "calls": calls,
        "flops": gflop * GIGA,
        "bytes": mb * 1e6,
        "seconds": seconds,
        "peak": 80 * GIGA if name == "matmul_b" else 125 * GIGA,  # a slow minute
        "source": "tuned",
        "sketch": "contraction",
    }


TASKS = [
    _task("matmul_a", 2, 1.0, 0.01),  # 100 GFLOP/s
    _task("matmul_b", 1, 2.0, 0.04),  # 50 GFLOP/s
    _task("matvec_c", 1, 0.1, 0.01, mb=100.0),
    _task("matmul_d", 1, 1.0, None),
]


def test_the_mean_share_is_weighted_by_flops_of_all_calls() -> None:
    assert tasks.weighted_share(TASKS[:2], 100 * GIGA) == pytest.approx(0.75)
    assert tasks.weighted_share([TASKS[3]], 100 * GIGA) is None
    assert tasks.in_turns(TASKS[:2]) == pytest.approx((100 / 125 + 50 / 80) / 2)
    assert tasks.in_turns([TASKS[3]]) is None


def test_the_limit_is_what_runs_out_first() -> None:
    assert tasks.limit(TASKS[0], 100 * GIGA, 10 * GIGA) == "arithmetic"
    assert tasks.limit(TASKS[2], 100 * GIGA, 10 * GIGA) == "memory"


def test_tasks_that_fall_short_are_named_unless_memory_is_the_limit() -> None:
    rates = {"flops_per_s": 100 * GIGA, "bytes_per_s": 10 * GIGA}
    text = tasks.render("net", {"tasks": TASKS, **rates})
    assert "below 60 %: matmul_b" in text
    assert "below 60 %: matvec_c" not in text
    assert "1 tasks run untuned or in a library" in text


def test_memory_may_be_eagers_plus_packed_weights_plus_a_tenth() -> None:
    result: Any = {
        "status": "ok",
        "error": "",
        "eager": {"peak_bytes": 100_000_000, "anonymous_bytes": 90_000_000},
        "aot_eager": {"peak_bytes": 110_000_000},
        "pruner": {"packed_bytes": 100_000_000, "peak_bytes": 219_000_000},
        "freed": {"freed_bytes": 60_000_000, "anonymous_bytes": 70_000_000},
    }
    assert memory.allowed_bytes(result) == pytest.approx(220e6)
    text = memory.render({"fits": result, "failed": {"status": "crash", "error": "boom"}})
    fits, failed = text.splitlines()[2:]
    assert fits.split()[1:-1:2] == ["100", "110", "100", "220", "219", "60", "90", "70"]
    assert fits.endswith("ok")
    assert "boom" in failed
