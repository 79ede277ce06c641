"""All contestants on one network, timed in turns in one process.

In: a ``Contest`` as JSON on the command line. Out: an answer for ``job.launch``, written again
before each contestant is prepared, so that the parent knows which one a crash belongs to.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from benchmarks import accuracy, machine_peak, models, reports, timing
from benchmarks.contestants import OURS, PREPARE, Setting, as_tensors, time_limit
from benchmarks.job import ProcessJob, answer_with, reason, timed

if TYPE_CHECKING:
    from collections.abc import Callable

PEAK = "fma peak"

"""Calls of a turn: untimed, then timed. README.md says why turns are longer than a call."""


@dataclass(frozen=True, slots=True)
class Contest(ProcessJob):
    """What to run, and how. ``excluded`` gives reasons for contestants that are not tried.

    ``onnx`` names a file for each runtime that wants one; ``quick`` and ``drafts`` have the
    options of the contestants ``pruner-quick`` and ``pruner-none``, ``stock`` those of
    ``metaschedule``. Times are seconds; the limit is for getting one peer ready.
    """

    network: str
    contestants: tuple[str, ...]
    precision: str = "float32"
    batch: int = 1
    layers: int | None = None
    quick: dict[str, Any] = field(default_factory=dict)
    rounds: int = 20
    min_seconds: float = 1.0
    pause_s: float = 0.0
    peer_limit_s: float = 300.0
    onnx: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)
    stock: dict[str, Any] = field(default_factory=dict)
    drafts: dict[str, Any] = field(default_factory=dict)


def run(contest: Contest, answer: Path) -> dict[str, Any]:
    """The result has ``contestants`` by name: ``reason``, or times and numerical difference."""
    threads = contest.use_threads()
    module, inputs = models.load(
        contest.network, models.PRECISIONS[contest.precision], contest.batch, contest.layers
    )
    ours = (contest.options, contest.quick)
    rest = (dict(contest.onnx), contest.stock, contest.drafts)
    setting = Setting(module, inputs, contest.precision, threads, *ours, *rest)
    calls: dict[str, Callable[[], object]] = {}
    found: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {"status": "ok", "threads": threads, "contestants": found}
    with torch.no_grad():
        result["flops"] = flops(module, inputs)
        exact = accuracy.exact_outputs(module, inputs, contest.precision)
        for name in (n for n in PREPARE if n in contest.contestants):
            if name in contest.excluded:
                found[name] = {"reason": contest.excluded[name]}
                continue
            answer.write_text(json.dumps(result | {"preparing": name}))
            limit = None if name in ("eager", *OURS) else contest.peer_limit_s
            found[name] = _prepare(name, setting, limit, exact, calls)
        answer.write_text(json.dumps(result | {"preparing": None}))
        del exact
        gc.collect()
        _time(contest, threads, calls, result)
    return result


def _prepare(
    name: str,
    setting: Setting,
    limit: float | None,
    exact: object,
    calls: dict[str, Callable[[], object]],
) -> dict[str, Any]:
    """Makes a contestant ready and calls it once; its call goes to ``calls`` if that worked."""
    try:
        with time_limit(limit):
            call, prepare_s = timed(lambda: PREPARE[name](setting))
            output, first_call_s = timed(call)
        difference = accuracy.difference(as_tensors(output), exact)
    except Exception as error:  # one that cannot is a cell of the table
        return {"reason": reason(error)}
    calls[name] = call
    report = reports.last(name)
    return {
        "prepare_s": prepare_s + first_call_s,
        "difference": difference,
        "report": reports.summary(report) if report else None,
        "notes": list(report.notes) if report else [],
    }


def _time(
    contest: Contest,
    threads: int,
    calls: dict[str, Callable[[], object]],
    result: dict[str, Any],
) -> None:
    """Medians, with the peak measured before, between and after."""
    peak, amount = machine_peak.fma_loop(threads)
    before = max(machine_peak.samples(peak, amount))
    timings = timing.interleave(
        calls | {PEAK: peak},
        rounds=contest.rounds,
        min_seconds=contest.min_seconds,
        pause_s=contest.pause_s,
        wake=timing.WAKE,
        per_turn=timing.PER_TURN,
        beside=(PEAK,),  # a millisecond: networks of seconds would take dozens of turns for it
    )
    between = amount / timings.pop(PEAK).median_s
    after = max(machine_peak.samples(peak, amount))
    result["peak_flops_per_s"] = {"before": before, "between": between, "after": after}
    for name, t in timings.items():
        result["contestants"][name]["latency"] = t.to_json()


@torch.no_grad()
def flops(module: torch.nn.Module, inputs: models.Inputs) -> float:
    """Floating-point operations of matrix products, convolutions and attention, by torch's count.

    torch's counter lacks the attention kernel that CPUs use.
    """

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return sdpa_flop_count(query, key, value)

    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={fused: attention})
    with counter:
        models.call(module, inputs)
    return float(counter.get_total_flops())


def main() -> None:
    contest, answer = Contest.from_json(sys.argv[1]), Path(sys.argv[2])
    answer_with(lambda: run(contest, answer), answer)


if __name__ == "__main__":
    main()
