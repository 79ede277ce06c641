"""Where a call of a network goes on the GPU at hand: kernels, what lies between, and the host.

    python -m benchmarks.gpu.timeline --network bert_base --out timeline.json

Each contestant's call is profiled by torch (CUPTI): how long its kernels run, how long the device
waits between the first and the last, how long before and after. ``pruner-one-carveout`` asks for
the same division of L1 cache and shared memory for all of our kernels, which else ask for what each
needs: a multiprocessor runs empty before its division changes.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from benchmarks import models, tables, timing
from benchmarks.arguments import write_json
from benchmarks.gpu.networks import precision_of, prepare

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

CONTESTANTS = ("pruner", "pruner-one-carveout", "pruner-graphs", "inductor-graphs")
CALLS = 10
CARVEOUT = 9  # CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, in percent
SHOWN = 12  # kernels of each contestant


@dataclass(frozen=True, slots=True)
class Ran:
    """A kernel on the device; microseconds."""

    name: str
    start: float
    end: float


def divided(kernels: Sequence[Ran]) -> dict[str, Any]:
    """Of one call: kernels, their microseconds, those between them, and the sums of each name."""
    ordered = sorted(kernels, key=lambda k: k.start)
    busy, until = 0.0, ordered[0].start if ordered else 0.0
    for k in ordered:  # kernels may overlap
        busy += max(0.0, k.end - max(k.start, until))
        until = max(until, k.end)
    sums: dict[str, list[float]] = defaultdict(list)
    for k in ordered:
        sums[k.name].append(k.end - k.start)
    whole = until - ordered[0].start if ordered else 0.0
    return {
        "kernels": len(ordered), "busy_us": busy, "between_us": whole - busy,
        "by_name": {n: [len(t), sum(t)] for n, t in sums.items()},
    }  # fmt: skip


@contextlib.contextmanager
def one_carveout() -> Iterator[None]:
    """Kernels that are loaded inside all prefer as much shared memory as there is."""
    from torch_pruner.codegen.build.gpu.driver import CudaDriver

    function = CudaDriver.function

    def found(self: Any, module: Any, symbol: str, shared_bytes: int) -> Any:
        kernel = function(self, module, symbol, shared_bytes)
        self._cuda.cuFuncSetAttribute(kernel, CARVEOUT, 100)
        return kernel

    CudaDriver.function = found  # type: ignore[method-assign]
    try:
        yield
    finally:
        CudaDriver.function = function  # type: ignore[method-assign]


@torch.no_grad()
def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One contestant: what its kernels take, and the median of calls without the profiler."""
    torch._dynamo.reset()
    precision = models.PRECISIONS[precision_of(options.network)]
    module, inputs = models.load(options.network, precision, options.batch, None)
    module = module.to("cuda")
    inputs = tree_map(lambda x: x.to("cuda") if isinstance(x, torch.Tensor) else x, inputs)
    settings = {"effort": options.effort, "cache_dir": options.cache_dir}
    settings = {k: v for k, v in settings.items() if v is not None}
    carveout = one_carveout() if name == "pruner-one-carveout" else contextlib.nullcontext()
    with carveout:
        function = prepare(name, module, settings)

        def call() -> float:
            torch.compiler.cudagraph_mark_step_begin()
            begin = time.perf_counter()
            models.call(function, inputs)
            torch.cuda.synchronize()
            return time.perf_counter() - begin

        for _ in range(5):
            call()
    seconds = [call() for _ in range(20 * CALLS)]
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(CALLS):
            call()
    ran = [
        Ran(e.name, e.time_range.start, e.time_range.end)
        for e in profiler.events()
        if str(e.device_type).endswith("CUDA")
    ]
    calls = per_call(ran, CALLS)
    found = [divided(c) for c in calls]
    middle = sorted(found, key=lambda f: f["busy_us"])[len(found) // 2] if found else divided([])
    return {"contestant": name, "median_us": 1e6 * statistics.median(seconds), **middle}


def per_call(ran: Sequence[Ran], calls: int) -> list[list[Ran]]:
    """The kernels of each call: as many of each, in the order of their starts."""
    ordered = sorted(ran, key=lambda k: k.start)
    each = len(ordered) // calls
    return [ordered[k * each : (k + 1) * each] for k in range(calls)] if each else []


def render(rows: Sequence[dict[str, Any]]) -> str:
    header = ["contestant", "call", "kernels", "they run", "between them", "before and after"]
    lines = []
    for r in rows:
        rest = r["median_us"] - r["busy_us"] - r["between_us"]
        times = [r["busy_us"], r["between_us"], rest]
        shown = [timing.duration(max(t, 0.0) / 1e6) for t in times]
        lines.append(
            [r["contestant"], timing.duration(r["median_us"] / 1e6), str(r["kernels"]), *shown]
        )
    text = tables.markdown(header, lines)
    for r in rows:
        longest = sorted(r["by_name"].items(), key=lambda item: -item[1][1])[:SHOWN]
        named = [[n[:70], str(c), f"{us:.1f} us", f"{us / c:.2f} us"] for n, (c, us) in longest]
        head = [f"kernel of {r['contestant']}", "calls", "together", "each"]
        text += "\n\n" + tables.markdown(head, named)
    return text


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.timeline", description=__doc__)
    parser.add_argument("--network", default="bert_base")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--effort", default="none", choices=["none", "quick", "full"])
    parser.add_argument("--cache-dir")
    parser.add_argument(
        "--contestants", type=lambda t: t.split(","), default=list(CONTESTANTS), metavar="NAME,..."
    )
    parser.add_argument("--out", help="write JSON there")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device, or a build of torch without CUDA", file=sys.stderr)
        return 2
    rows = []
    for name in options.contestants:
        rows.append(measure(name, options))
        print(render(rows[-1:]), flush=True)
        write_json(options.out, {"machine": timing.machine(), "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
