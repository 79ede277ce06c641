"""Our kernels beside stock MetaSchedule's, of whole networks on the GPU at hand.

    python -m benchmarks.gpu.stock --networks bert_base,resnet50 --out stock.json

The network is compiled and tuned by us once. Its costliest kernels then go to MetaSchedule, driven
by its own code with its own rules, builder and runner, for ``--candidates`` of each. A latency is
what the side that found it measured on the device; "search" is what finding took, ours divided
among all kernels that it tuned. Needs the extra ``search``; ``--device cpu`` for a try.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from benchmarks import models, stock_search, tables, timing
from benchmarks.arguments import add_tuning, backend_options, network_names
from benchmarks.gpu.networks import DEFAULT, precision_of
from benchmarks.job import answer_with, launch, reason
from benchmarks.rows import finish, refresh

if TYPE_CHECKING:
    from torch_pruner.report import TaskReport
    from torch_pruner.task import Task

SEARCHING = ("draft", "verify", "build", "measure", "train")


@dataclass(frozen=True, slots=True)
class Comparison:
    """One network: ``count`` kernels of it, ``trials`` of MetaSchedule's each."""

    network: str
    precision: str
    options: dict[str, Any]
    count: int
    trials: int
    builders: int
    device: str = "cuda"

    @property
    def key(self) -> str:
        return f"{self.network}/{self.precision}"

    @property
    def settings(self) -> dict[str, Any]:
        return json.loads(self.to_json())

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def run(comparison: Comparison, answer: Path) -> dict[str, Any]:
    """Every kernel's latency on both sides; what is done stays in ``answer``."""
    ours, seconds = tuned(comparison)
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {"status": "ok", "kernels": rows, "tuning_s": seconds}
    for task, report in costliest(ours, comparison.count):
        row: dict[str, Any] = {
            "name": report.name, "calls": report.weight, "source": report.source,
            "ours_s": report.latency_after_s, "ours_search_s": seconds / max(len(ours), 1),
        }  # fmt: skip
        try:
            found = stock_search.search(
                task, "tune_tir", 0, comparison.trials, _target(comparison), comparison.builders
            )
            best = found["events"][-1]["latency_s"] if found["events"] else math.inf
            row |= {"stock_s": best if math.isfinite(best) else None, "failed": found["failed"]}
            row |= {"stock_search_s": found["seconds"], "trials": found["trials"]}
        except Exception as error:  # a cell of the table
            row["reason"] = reason(error)
        rows.append(row)
        answer.write_text(json.dumps(result))
    return result


def _target(comparison: Comparison) -> Any:
    """What MetaSchedule generates code for: the device as TVM reads it from the driver."""
    from torch_pruner.codegen.tir.builders import tvm

    return tvm.target.Target.from_device("cuda") if comparison.device == "cuda" else None


@torch.no_grad()
def tuned(comparison: Comparison) -> tuple[list[tuple[Task, TaskReport]], float]:
    """The kernels that were timed, as tasks, and how long tuning them took."""
    import torch_pruner
    from torch_pruner.graph.ir import Graph
    from torch_pruner.target import TargetSpec
    from torch_pruner.task import Task

    precision, device = models.PRECISIONS[comparison.precision], torch.device(comparison.device)
    module, inputs = models.load(comparison.network, precision, 1, None)
    inputs = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, inputs)
    with tempfile.TemporaryDirectory(prefix="stock-") as folder:
        options = {**comparison.options, "debug_dir": folder, "cache_dir": f"{folder}/cache"}
        if device.type == "cuda":
            from benchmarks.gpu.products import card_at_hand

            options["target"] = {"kind": "cuda"}
            target, threads = TargetSpec.cuda(card_at_hand()), 1
        else:
            target, threads = TargetSpec.detect(), torch.get_num_threads()
        compiled = torch.compile(module.to(device), backend="pruner", options=options)
        models.call(compiled, inputs)
        files = sorted(Path(folder).glob("*/kernels.json"))
        specs = {k["workload"]: k["spec"] for f in files for k in json.loads(f.read_text())}
    report = torch_pruner.last_report()
    found = [
        (Task(t.name, Graph.from_json(specs[t.workload]), target, threads), t)
        for t in report.tasks
        if t.latency_after_s is not None and t.source != "library"
    ]
    return found, sum(report.seconds.get(phase, 0.0) for phase in SEARCHING)


def costliest(ours: list[tuple[Task, TaskReport]], count: int) -> list[tuple[Task, TaskReport]]:
    """The kernels on which a call of the network spends most."""
    return sorted(ours, key=lambda p: -p[1].weight * (p[1].latency_after_s or 0.0))[:count]


def render(content: dict[str, Any]) -> str:
    """A line for each kernel and, below those of a network, the geometric means."""
    header = ["kernel", "ours", "stock", "stock / ours", "our search", "its search", "failed"]
    lines = []
    for key, row in content["rows"].items():
        faster, sooner = [], []
        for k in row.get("kernels", ()):
            cells = ["none", "", "", "", k.get("reason", "")]
            if k.get("stock_s"):
                faster.append(k["stock_s"] / k["ours_s"])
                sooner.append(k["stock_search_s"] / k["ours_search_s"])
                cells = [timing.duration(k["stock_s"]), f"{faster[-1]:.2f}"]
                cells += [f"{k['ours_search_s']:.1f} s", f"{k['stock_search_s']:.1f} s"]
                cells.append(f"{k['failed']} of {k['trials']}")
            lines.append([f"{key}: {k['name']}", timing.duration(k["ours_s"]), *cells])
        means = [f"{math.exp(sum(map(math.log, v)) / len(v)):.2f}" for v in (faster, sooner) if v]
        ratio, time = means or ("", "")
        lines.append([f"{key}: in the mean", "", "", ratio, "", f"{time} times ours", row["error"]])
    return tables.markdown(header, lines)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    if importlib.util.find_spec("xgboost") is None:
        print("MetaSchedule's cost model is gradient-boosted trees: pip install the extra search")
        return 2
    ours = backend_options(options)
    ours.pop("cache_dir", None)
    plans = [
        Comparison(
            name, precision_of(name), ours, options.count, options.candidates,
            options.builders, options.device,
        )
        for name in options.networks
    ]  # fmt: skip

    def produce(comparison: Comparison) -> dict[str, Any]:
        return launch(comparison, time_limit_s=options.time_limit, module="benchmarks.gpu.stock")

    content = refresh(options.out, plans, produce, force=False)
    return finish(content, options.out, render(content))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.stock", description=__doc__)
    parser.add_argument("--networks", type=network_names, default=DEFAULT, metavar="NAME,...")
    parser.add_argument("--count", type=int, default=4, help="kernels of each network")
    parser.add_argument("--candidates", type=int, default=128, help="MetaSchedule's of a kernel")
    parser.add_argument("--builders", type=int, default=8, help="its kernels built at once")
    parser.add_argument("--device", default="cuda", help="for a try without a GPU: cpu")
    parser.add_argument("--time-limit", type=float, default=1800.0, metavar="SECONDS")
    parser.add_argument("--out", required=True, help="JSON; the table is written beside it")
    add_tuning(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):  # as launch starts a comparison
        place = Path(sys.argv[2])
        given = Comparison(**json.loads(sys.argv[1]))
        answer_with(lambda: run(given, place), place)
    else:
        sys.exit(main())
