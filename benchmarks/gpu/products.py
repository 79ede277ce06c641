"""Our matrix products on the GPU at hand, beside the vendor's.

    python -m benchmarks.gpu.products --precision float16 --out products.json

Weights lie as a layer of torch has them. For each shape the draft model's best schedules are built
(NVRTC, several at once), checked against the vendor's result, and timed; the fastest of them then
takes turns with ``torch.matmul``. Times are of events on the device, between them a write that
empties the second-level cache.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from benchmarks import tables, timing
from benchmarks.arguments import write_json
from benchmarks.gpu.kernels import drafted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from torch_pruner.cards import Card
    from torch_pruner.task import Candidate, Task

# Rows, columns, depth: squares, layers of BERT-base at 128 and 512 rows, and what steps of decoding
# ask of Llama's.
SHAPES = (
    *((n, n, n) for n in (1024, 2048, 4096)),
    *((rows, *layer) for rows in (128, 512) for layer in ((768, 768), (3072, 768), (768, 3072))),
    *((rows, *layer) for rows in (1, 4, 16) for layer in ((4096, 4096), (4096, 11008))),
)
PRODUCTS = ("gpu_product", "gpu_warpgroup", "gpu_triton_product", "gpu_dots")
FLUSHED = 256 << 20  # bytes written between two timed calls: more than any second-level cache
TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}


@dataclass(frozen=True, slots=True)
class Ready:
    """A product that runs: ``call`` launches it on the current stream."""

    candidate: Candidate
    call: Callable[[], None]
    out: torch.Tensor


def card_at_hand() -> Card:
    """The card of the table that the first device is; else one with its capability."""
    import torch

    from torch_pruner.cards import CARDS

    name = torch.cuda.get_device_name(0).lower().replace(" ", "").replace("-", "")
    capability = torch.cuda.get_device_capability(0)
    same = [c for c in CARDS.values() if c.capability == capability]
    return next((c for c in CARDS.values() if c.name in name), (same or [CARDS["a100"]])[0])


def task_of(shape: tuple[int, int, int], precision: str, card: Card) -> Task:
    from torch_pruner.graph.ir import GraphBuilder
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Task

    m, n, k = shape
    b = GraphBuilder()
    x, w = b.input(0, (m, k), precision), b.input(1, (n, k), precision, static=True)
    product = b.matmul(x, b.permute(w, (1, 0)))
    return Task(f"{m}x{n}x{k}", b.finish([product]), TargetSpec.cuda(card), 1)


def drafts(task: Task, count: int) -> list[tuple[float, Candidate]]:
    """The draft model's best products of each sketch with the seconds that it expects."""
    return [pair for pair in drafted(task, count) if pair[1].sketch in PRODUCTS]


def prepare(
    task: Task, candidate: Candidate, operands: Sequence[torch.Tensor], card: Card
) -> Ready:
    """Build and load one candidate. Raises ``CompileError`` or ``ValueError``."""
    import torch

    from torch_pruner import families
    from torch_pruner.codegen.build.gpu.driver import CudaDriver
    from torch_pruner.codegen.build.gpu.image import load_gpu_program
    from torch_pruner.codegen.build.gpu.program import build_gpu_program
    from torch_pruner.dynamo.run.device_packing import pack_there
    from torch_pruner.graph.memory import KernelCall, Place
    from torch_pruner.task import Scheduled

    takes = families.signature_of(task.spec, candidate)
    places = tuple(Place(i) for i in range(3 + len(takes.scratch)))
    kernels = {task.workload: Scheduled(task.spec, candidate)}
    program = build_gpu_program(kernels, {"main": [KernelCall(task.workload, places)]}, card)
    driver = CudaDriver(lambda: int(torch.cuda.current_stream().cuda_stream))
    (entry,) = load_gpu_program(program.to_bytes(), ["main"], driver)
    x, w = operands
    packed = w if (pack := takes.packs[1]) is None else pack_there(pack, w)
    out = torch.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    scratch = [torch.empty(s.nbytes, dtype=torch.uint8, device=x.device) for s in takes.scratch]
    tensors = (x, packed, out, *scratch)
    table = (ctypes.c_int64 * len(tensors))(*(t.data_ptr() for t in tensors))
    address = ctypes.addressof(table)

    def call(_keep: object = (table, tensors, entry)) -> None:
        entry(address)

    return Ready(candidate, call, out)


def seconds(calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Seconds of each call in turns, by events on the device, the second-level cache emptied."""
    import torch

    flush = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")
    events: list[list[tuple[Any, Any]]] = [[] for _ in calls]
    for call in calls:
        call()
    for _ in range(rounds):
        for timed, call in zip(events, calls, strict=True):
            pair = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            flush.zero_()
            pair[0].record()
            call()
            pair[1].record()
            timed.append(pair)
    torch.cuda.synchronize()
    return [[begin.elapsed_time(end) * 1e-3 for begin, end in timed] for timed in events]


def measure(shape: tuple[int, int, int], options: argparse.Namespace, card: Card) -> dict[str, Any]:
    """The best of our drafts beside the vendor's product."""
    import torch

    from torch_pruner import exc

    m, n, k = shape
    dtype = getattr(torch, options.precision)
    torch.manual_seed(0)
    x = torch.randn(m, k, device="cuda", dtype=dtype)
    w = torch.randn(n, k, device="cuda", dtype=dtype) / k**0.5
    expected = (x.double() @ w.double().t()).float()
    scale = float(expected.abs().max())
    task = task_of(shape, options.precision, card)
    chosen = drafts(task, options.count)

    def attempt(candidate: Candidate) -> Ready | str:
        try:
            return prepare(task, candidate, (x, w), card)
        except (exc.CompileError, ValueError) as err:
            return str(err)[:500]

    with ThreadPoolExecutor(options.builders) as pool:
        made = list(pool.map(attempt, [candidate for _, candidate in chosen]))
    ready = [r for r in made if isinstance(r, Ready)]
    right = []
    for r in ready:
        r.call()
        torch.cuda.synchronize()
        if float((r.out.float() - expected).abs().max()) <= TOLERANCE[options.precision] * scale:
            right.append(r)
    found: dict[str, Any] = {
        "shape": shape, "drafted": len(chosen), "built": len(ready), "right": len(right),
        "errors": [r for r in made if isinstance(r, str)][:3],
    }  # fmt: skip
    if not right:
        return found
    first = seconds([r.call for r in right], options.rounds)
    best = min(zip(first, right, strict=True), key=lambda p: statistics.median(p[0]))[1]
    vendor_out = torch.empty(m, n, device="cuda", dtype=dtype)
    expected_s = {candidate: s for s, candidate in chosen}
    found["drafts"] = [
        {
            "sketch": r.candidate.sketch, "decisions": dict(r.candidate.decisions),
            "expected_s": expected_s[r.candidate], "seconds": statistics.median(times),
        }
        for times, r in zip(first, right, strict=True)
    ]  # fmt: skip
    ours, vendor = seconds(
        [best.call, lambda: torch.matmul(x, w.t(), out=vendor_out)], 4 * options.rounds
    )
    flops = 2.0 * m * n * k
    found |= {
        "ours_s": statistics.median(ours), "vendor_s": statistics.median(vendor),
        "ratio": statistics.median(vendor) / statistics.median(ours),
        "flops_per_s": flops / statistics.median(ours),
        "sketch": best.candidate.sketch, "decisions": dict(best.candidate.decisions),
    }  # fmt: skip
    return found


def render(rows: Sequence[dict[str, Any]]) -> str:
    header = ["rows x columns x depth", "right of drafted", "ours", "vendor", "vendor / ours"]
    lines = []
    for r in rows:
        times = ["", "", ""]
        if "ours_s" in r:
            times = [timing.duration(r["ours_s"]), timing.duration(r["vendor_s"])]
            times.append(f"{r['ratio']:.2f}")
        name = " x ".join(map(str, r["shape"]))
        lines.append([name, f"{r['right']} of {r['drafted']}", *times])
    return tables.markdown(header, lines)


def main(arguments: list[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.products", description=__doc__)
    parser.add_argument("--precision", default="float16", choices=sorted(TOLERANCE))
    parser.add_argument("--count", type=int, default=24, help="drafts of each sketch for a shape")
    parser.add_argument("--builders", type=int, default=8, help="kernels built at once")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", help="write JSON there")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device, or a build of torch without CUDA", file=sys.stderr)
        return 2
    torch.backends.cuda.matmul.allow_tf32 = False
    card, rows = card_at_hand(), []
    for shape in SHAPES:
        rows.append(measure(shape, options, card))
        print(render(rows[-1:]).splitlines()[-1], flush=True)
        write_json(options.out, {"machine": timing.machine(), "card": card.name, "rows": rows})
    print("\n" + render(rows))
    wrong = [r for r in rows if not r["right"] or r["right"] < r["drafted"]]
    for r in wrong:
        print(f"{r['shape']}: {r['right']} right of {r['drafted']}: {r['errors']}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
