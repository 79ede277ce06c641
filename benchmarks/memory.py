"""Peak resident memory of a network in inference: compiled, against eager's and the packed weights.

    python -m benchmarks.memory --networks bert_base,resnet50

A first process fills an empty cache. Then eager and the compiled network run in fresh processes, so
that no tuner or compiler is in memory, and the peak is read while they are called again and again.
``aot_eager`` is eager traced by torch's own machinery, which any backend brings into the process.
``freed`` is ours with ``weights="frozen"`` and what no kernel reads freed, the parameters being
bfloat16 numbers in float32; its peak is that of memory that no file has.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import tables, timing
from benchmarks.arguments import add_tuning, backend_options, network_names, write_json
from benchmarks.job import Job, ProcessJob, answer_with, compiled, launch

FREED = "freed"
BACKENDS = ("eager", "aot_eager", "pruner", FREED)
CALLS = 5
ALLOWED = 1.1


@dataclass(frozen=True, slots=True)
class MemoryJob(ProcessJob):
    """Which network to call, compiled or not."""

    network: str
    backend: str


def run(job: MemoryJob) -> dict[str, Any]:
    """Bytes resident at most during calls; bytes that our backend holds beside the parameters."""
    import torch

    import torch_pruner
    from benchmarks import models

    job.use_threads()
    module, inputs = models.load(job.network)
    freed = 0
    with torch.no_grad():
        if job.backend == FREED:
            module = module.to(torch.bfloat16).float()
        backend = "pruner" if job.backend == FREED else job.backend
        function = compiled(module, backend, job.options)
        for _ in range(2):
            models.call(function, inputs)
        if job.backend == FREED:
            freed = torch_pruner.free_originals(module)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        for _ in range(CALLS):
            models.call(function, inputs)
    return {
        "status": "ok",
        "peak_bytes": _status("VmHWM"),
        "anonymous_bytes": _status("RssAnon"),
        "freed_bytes": freed,
        "packed_bytes": _packed_bytes() if job.backend in ("pruner", FREED) else 0,
        "parameter_bytes": sum(p.nbytes for p in module.parameters()),
    }


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"no {name} in /proc/self/status")


def _packed_bytes() -> int:
    """Of every compiled region alive."""
    from torch_pruner.dynamo.run.packed_inputs import PackedInputs

    return sum(x.nbytes for x in gc.get_objects() if isinstance(x, PackedInputs))


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Both processes' results; ``status`` and ``error`` of the first that failed."""
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        settings = {"cache_dir": folder} | backend_options(options)
        fill = launch(Job(name, options=settings, threads=options.threads, check=False))
        found: dict[str, Any] = {"fill": fill}
        for backend in BACKENDS:
            own = settings | ({"weights": "frozen"} if backend == FREED else {})
            job = MemoryJob(name, backend, options=own, threads=options.threads)
            if backend == FREED:  # the first one builds kernels for narrow weights
                launch(job, module="benchmarks.memory")
            found[backend] = launch(job, module="benchmarks.memory")
    bad = [r for r in found.values() if r["status"] != "ok"]
    first = bad[0] if bad else {"status": "ok", "error": ""}
    return found | {"status": first["status"], "error": first["error"]}


def allowed_bytes(result: dict[str, Any]) -> float:
    """Eager's peak plus the packed weights plus a tenth."""
    return ALLOWED * (result["eager"]["peak_bytes"] + result["pruner"]["packed_bytes"])


def render(results: dict[str, Any]) -> str:
    header = ["network", "eager", "traced eager", "packed weights", "allowed", "pruner"]
    header += ["freed", "eager's own", "own then", ""]
    lines = []
    for name, r in results.items():
        if r["status"] != "ok":
            lines.append([name, r["status"], r["error"][:40], *[""] * 7])
            continue
        peak, most = r["pruner"]["peak_bytes"], allowed_bytes(r)
        sizes = [r["eager"]["peak_bytes"], r["aot_eager"]["peak_bytes"]]
        sizes += [r["pruner"]["packed_bytes"], most, peak]
        cells = [f"{size / 1e6:.0f} MB" for size in sizes]
        own = [r[FREED]["freed_bytes"]] + [r[b]["anonymous_bytes"] for b in ("eager", FREED)]
        verdict = "ok" if peak <= most else "too much"
        lines.append([name, *cells, *[f"{size / 1e6:.0f} MB" for size in own], verdict])
    return tables.plain(header, lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.memory", description=__doc__)
    default = ["bert_base", "resnet50"]
    parser.add_argument("--networks", type=network_names, default=default, metavar="NAME,...")
    add_tuning(parser)
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/memory.json")
    options = parser.parse_args(arguments)
    results = {name: measure(name, options) for name in options.networks}
    print(render(results))
    write_json(options.out, {"machine": timing.machine(), "networks": results})
    return 0 if all(r["status"] == "ok" for r in results.values()) else 1


def _child(text: str, answer: Path) -> None:
    job = MemoryJob.from_json(text)
    answer_with(lambda: run(job), answer)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].startswith("{"):  # started by ``launch``
        _child(sys.argv[1], Path(sys.argv[2]))
    else:
        sys.exit(main())
