"""The first calls after a rest: requests rarely come back to back.

    python -m benchmarks.rest --networks gmm_1,dep_1 --rest 0.1

Each contestant has a process of its own, since threads of one may be what another waits for. All
rest for so long, then call several times in a row: medians of the first call, the second, and so
on. The processes take turns, ``--turns`` times. Threads that slept have to be woken, and to be
somewhere else than the thread that wakes them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.arguments import network_names, write_json
from benchmarks.job import ProcessJob, answer_with, launch

PEERS = "eager,inductor,onnxruntime,openvino,pruner"
WARM = 20  # calls before the first rest


@dataclass(frozen=True, slots=True, kw_only=True)
class RestJob(ProcessJob):
    """One contestant on one network: ``rounds`` rests of ``rest_s``, ``calls`` after each."""

    network: str
    contestant: str
    batch: int = 1
    rest_s: float = 0.1
    calls: int = 6
    rounds: int = 25


def run(job: RestJob) -> dict[str, Any]:
    """Seconds of each call after each rest."""
    import torch

    from benchmarks import models
    from benchmarks.contestants import FROM_ONNX, PREPARE, Setting
    from benchmarks.conversion import Conversion
    from benchmarks.conversion import run as convert

    threads = job.use_threads()
    module, inputs = models.load(job.network, torch.float32, job.batch, None)
    with tempfile.TemporaryDirectory(prefix="rest-") as folder, torch.no_grad():
        path = str(Path(folder) / "network.onnx")
        if job.contestant in FROM_ONNX:
            convert(Conversion(job.network, "float32", job.batch, None, path))
        options = {"cache_dir": str(Path(folder) / "cache"), **job.options}
        files = dict.fromkeys(FROM_ONNX, path)
        setting = Setting(module, inputs, "float32", threads, options, onnx=files)
        call = PREPARE[job.contestant](setting)
        for _ in range(WARM):
            call()
        times: list[list[float]] = []
        for _ in range(job.rounds):
            time.sleep(job.rest_s)
            row = []
            for _ in range(job.calls):
                begin = time.perf_counter()
                call()
                row.append(time.perf_counter() - begin)
            times.append(row)
    return {"status": "ok", "seconds": times}


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    from benchmarks import timing

    rows: dict[str, dict[str, list[list[float]]]] = {}
    failed = False
    for name in options.networks:
        for _ in range(options.turns):
            for contestant in options.peers.split(","):
                job = RestJob(
                    network=name,
                    contestant=contestant,
                    rest_s=options.rest,
                    rounds=options.rounds,
                    options={"effort": options.effort},
                )
                answer = launch(job, time_limit_s=options.time_limit, module="benchmarks.rest")
                if answer["status"] != "ok":
                    print(f"{name}, {contestant}: {answer.get('error', answer['status'])}")
                    failed = True
                    continue
                rows.setdefault(name, {}).setdefault(contestant, []).extend(answer["seconds"])
        write_json(options.out, {"machine": timing.machine(), "rest_s": options.rest, "rows": rows})
    print("\n" + render(rows))
    return int(failed)


def render(rows: dict[str, dict[str, list[list[float]]]]) -> str:
    """A line for each network and contestant: the median of each call after a rest."""
    from benchmarks.timing import duration

    lines, most = [], 0
    for name, contestants in rows.items():
        for contestant, times in contestants.items():
            medians = [statistics.median(call) for call in zip(*times, strict=True)]
            most = max(most, len(medians))
            lines.append([name, contestant, *map(duration, medians)])
    header = ["network", "", *(f"call {k + 1}" for k in range(most))]
    return tables.markdown(header, [[*line, *[""] * (len(header) - len(line))] for line in lines])


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rest", description=__doc__)
    parser.add_argument(
        "--networks", type=network_names, default=["gmm_1", "dep_1"], metavar="NAME,..."
    )
    parser.add_argument("--peers", default=PEERS, help=f"of {PEERS}")
    parser.add_argument("--effort", default="none", choices=["none", "quick", "full"])
    parser.add_argument("--rest", type=float, default=0.1, metavar="SECONDS")
    parser.add_argument("--rounds", type=int, default=25, help="rests of a process")
    parser.add_argument("--turns", type=int, default=2, help="processes of each contestant")
    parser.add_argument("--time-limit", type=float, default=300.0, help="of a process")
    parser.add_argument("--out", help="write JSON there, e.g. docs/data/rest.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].startswith("{"):
        job = RestJob.from_json(sys.argv[1])
        answer_with(lambda: run(job), Path(sys.argv[2]))
    else:
        sys.exit(main())
