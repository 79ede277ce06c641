"""Whole networks on the GPU at hand: eager, inductor, its CUDA graphs, TensorRT, and pruner.

    python -m benchmarks.gpu.networks --networks bert_base,resnet50 --batch 1 --out networks.json

All contestants of a network take turns in one process; a call is timed until the device is done, so
what Python costs counts. Convolution networks run in float32, the others in float16. Rows of an
earlier run with the same code and settings are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import torch
from torch.utils._pytree import tree_map

from benchmarks import accuracy, models, reports, tables, timing
from benchmarks.arguments import add_tuning, backend_options, network_names
from benchmarks.job import answer_with, launch, reason, timed
from benchmarks.rows import finish, refresh

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

DEFAULT = ["bert_base", "gpt2", "llama", "vit", "resnet50", "mobilenet_v2"]
# Of torch.compile: mode, or None for options of ours.
CONTESTANTS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    "inductor-graphs": {"mode": "reduce-overhead"},
    "inductor-max": {"mode": "max-autotune-no-cudagraphs"},
    "inductor-max-graphs": {"mode": "max-autotune"},
    "tensorrt": None,
    "pruner": None,
    "pruner-graphs": None,
}
# A folder, how many meet there, and seconds until those that are prepared go on without the others.
MEETING = "TORCH_PRUNER_BENCHMARK_MEETING"
BESIDE = ("eager", "inductor-max-graphs", "tensorrt")


@dataclass(frozen=True, slots=True)
class Contest:
    """One row. Options are those of both contestants of ours."""

    network: str
    precision: str
    batch: int
    options: dict[str, Any]
    contestants: tuple[str, ...]
    device: str = "cuda"
    rounds: int = 50
    min_seconds: float = 1.0

    @property
    def key(self) -> str:
        return f"{self.network}/{self.precision}/batch{self.batch}"

    @property
    def settings(self) -> dict[str, Any]:
        return json.loads(self.to_json())

    @classmethod
    def from_json(cls, text: str) -> Contest:
        fields = json.loads(text)
        return cls(**fields | {"contestants": tuple(fields["contestants"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


def precision_of(network: str) -> str:
    return "float32" if models.NETWORKS[network].kind == "convolution" else "float16"


def prepare(name: str, module: Any, options: dict[str, Any]) -> Callable[..., object]:
    """The module as a contestant runs it."""
    if name == "eager":
        return module  # type: ignore[no-any-return]
    if name.startswith("pruner"):
        ours = {"target": {"kind": "cuda"}, "cuda_graphs": name == "pruner-graphs", **options}
        return torch.compile(module, backend="pruner", options=ours)
    if name == "tensorrt":
        importlib.import_module("torch_tensorrt")  # registers the backend, where it is installed
        return torch.compile(module, backend="tensorrt", options={"min_block_size": 1})
    return torch.compile(module, backend="inductor", **(CONTESTANTS[name] or {}))


@torch.no_grad()
def run(contest: Contest, answer: Path) -> dict[str, Any]:
    """Times and differences of every contestant, or the reason why there is none."""
    device = torch.device(contest.device)
    precision = models.PRECISIONS[contest.precision]
    module, inputs = models.load(contest.network, precision, contest.batch, None)
    exact = accuracy.exact_outputs(module, inputs, contest.precision)
    module = module.to(device)
    inputs = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, inputs)
    found: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], object]] = {}
    result: dict[str, Any] = {"status": "ok", "contestants": found}
    for name in contest.contestants:
        answer.write_text(json.dumps(result | {"preparing": name}))
        try:
            function = prepare(name, module, contest.options)

            def call(function: Callable[..., object] = function) -> object:
                if device.type == "cuda":
                    torch.compiler.cudagraph_mark_step_begin()
                output = models.call(function, inputs)
                _wait(device)
                return output

            output, seconds = timed(call)
            report = reports.last(name)
            found[name] = {
                "ready_s": seconds,
                "difference": accuracy.difference(tree_map(_on_host, output), exact),
                "report": reports.summary(report) if report else None,
            }
            calls[name] = call
        except Exception as error:  # one that cannot is a cell of the table
            found[name] = {"reason": reason(error)}
    answer.write_text(json.dumps(result | {"preparing": None}))
    rounds, least = contest.rounds, contest.min_seconds
    with _in_turn(contest.key):
        measured = timing.interleave(calls, rounds=rounds, min_seconds=least, warmup=5)
    for name, t in measured.items():
        found[name]["latency"] = t.to_json()
    if device.type == "cuda":
        result["device"] = torch.cuda.get_device_name(device)
        result["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return result


@contextlib.contextmanager
def _in_turn(key: str) -> Iterator[None]:
    """With ``--together``: once all are prepared, and one after another."""
    if not (meeting := os.environ.get(MEETING)):
        yield
        return
    folder, parties, end = meeting.rsplit(":", 2)
    _ready(Path(folder), key)
    while len(list(Path(folder).glob("*.ready"))) < int(parties) and time.time() < float(end):
        time.sleep(0.05)
    with filelock.FileLock(Path(folder) / "turn.lock"):
        yield


def _result(row: Future[dict[str, Any]], _contest: Contest) -> dict[str, Any]:
    return row.result()


def _ready(folder: Path, key: str) -> None:
    (folder / f"{key.replace('/', '-')}.ready").touch()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _on_host(value: object) -> object:
    return value.cpu() if isinstance(value, torch.Tensor) else value


def render(content: dict[str, Any]) -> str:
    """Medians, and how many times faster our better one is than the best of each kind."""
    header = ["network", *CONTESTANTS, *(f"vs {n}" for n in BESIDE), "ours ready after"]
    lines = []
    for key, row in content["rows"].items():
        of = row.get("contestants", {})
        medians = {n: c["latency"]["median_s"] for n, c in of.items() if "latency" in c}
        ours = min((s for n, s in medians.items() if n.startswith("pruner")), default=None)
        ready = of.get("pruner", {}).get("ready_s")
        lines.append(
            [
                key,
                *(timing.duration(medians[n]) if n in medians else "" for n in CONTESTANTS),
                *(f"{medians[n] / ours:.2f}" if ours and n in medians else "" for n in BESIDE),
                timing.duration(ready) if ready else row.get("error", ""),
            ]
        )
    return tables.markdown(header, lines)


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    ours = backend_options(options)
    ours.pop("threads", None)
    plans = [
        Contest(
            name,
            precision_of(name),
            batch,
            ours,
            tuple(options.contestants),
            options.device,
            options.rounds,
        )
        for batch in options.batch
        for name in options.networks
    ]

    def produce(contest: Contest, environment: dict[str, str] | None = None) -> dict[str, Any]:
        limit, module = options.time_limit, "benchmarks.gpu.networks"
        return launch(contest, time_limit_s=limit, environment=environment, module=module)

    if not options.together:
        content = refresh(options.out, plans, produce, force=options.force)
        return finish(content, options.out, render(content))
    with tempfile.TemporaryDirectory(prefix="together-") as temporary:
        folder = Path(options.meeting or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        parties = len(plans) + (options.meeting is not None)
        meeting = {MEETING: f"{folder}:{parties}:{time.time() + options.patience}"}

        def prepared(contest: Contest) -> dict[str, Any]:
            try:
                return produce(contest, meeting)
            finally:
                _ready(folder, contest.key)  # nobody waits for one that is gone

        with ThreadPoolExecutor(len(plans)) as pool:
            rows = {pool.submit(prepared, plan): plan for plan in plans}
            for row in as_completed(rows):  # each is written once it is there
                made = partial(_result, row)
                content = refresh(options.out, [rows[row]], made, force=True)
    return finish(content, options.out, render(content))


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.networks", description=__doc__)
    parser.add_argument("--networks", type=network_names, default=DEFAULT, metavar="NAME,...")
    parser.add_argument("--batch", type=lambda t: [int(b) for b in t.split(",")], default=[1, 4])
    parser.add_argument("--contestants", type=lambda t: t.split(","), default=list(CONTESTANTS))
    parser.add_argument("--device", default="cuda", help="for a try without a GPU: cpu")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="SECONDS")
    parser.add_argument(
        "--together", action="store_true", help="prepare all at once, then time them in turns"
    )
    parser.add_argument(
        "--meeting", help="with --together: time nothing before somebody puts a *.ready there, too"
    )
    parser.add_argument(
        "--patience", type=float, default=600.0, metavar="SECONDS",
        help="with --together: until those that are prepared are timed without the others",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="make rows again that are up to date")
    parser.add_argument("--out", required=True, help="JSON; the table is written beside it")
    add_tuning(parser)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):  # as launch starts a contest
        place = Path(sys.argv[2])
        given = Contest.from_json(sys.argv[1])
        answer_with(lambda: run(given, place), place)
    else:
        sys.exit(main())
