"""Every network with every peer, side by side: eager, inductor, ONNX Runtime, OpenVINO and pruner.

Each network runs in a process of its own, so that a crash is a row of the table and not the end of
it; a peer that crashes is left out and the rest runs again. Rows are written as they come, and a
run that was interrupted goes on where it stopped. Peers come with the extra ``peers``.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import machine_peak, models, peer_table, timing
from benchmarks.arguments import add_tuning, backend_options, network_names
from benchmarks.contest import Contest
from benchmarks.contestants import FROM_ONNX, PREPARE
from benchmarks.conversion import Conversion
from benchmarks.job import launch
from benchmarks.rows import refresh


@dataclass(frozen=True, slots=True)
class Plan:
    """One row to produce."""

    contest: Contest
    effort: str
    time_limit_s: float

    @property
    def key(self) -> str:
        c = self.contest
        layers = c.layers or "default"
        return f"{c.network}/{c.precision}/batch{c.batch}/layers{layers}/{self.effort}"

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = json.loads(self.contest.to_json())
        if "metaschedule" not in self.contest.contestants:
            del settings["stock"]
        return settings


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    plans = _plans(options)
    print(machine_peak.describe(machine_peak.measure(_threads(options))) + "\n", flush=True)
    content = refresh(options.data, plans, produce, force=options.force)
    text = peer_table.render(content, options.data)
    if options.out:
        Path(options.out).parent.mkdir(parents=True, exist_ok=True)
        Path(options.out).write_text(text)
    else:
        print("\n" + text)
    rows = [content["rows"][plan.key] for plan in plans]
    return 0 if all(row["status"] == "ok" for row in rows) else 1


def produce(plan: Plan) -> dict[str, Any]:
    """Converts the network for the runtimes that want it, then runs the contest."""
    contest = plan.contest
    network = models.NETWORKS[contest.network]
    with tempfile.TemporaryDirectory(prefix="peers-") as folder:
        files, excluded, exported_s = _convert(contest, Path(folder))
        contest = replace(contest, onnx=files, excluded=excluded)
        row = _compete(contest, plan.time_limit_s, Path(folder))
    for name, seconds in exported_s.items():
        if "prepare_s" in (found := row.get("contestants", {}).get(name, {})):
            found["prepare_s"] += seconds
    return row | {
        "network": contest.network,
        "title": network.title + (f", batch {contest.batch}" if contest.batch > 1 else ""),
        "precision": contest.precision,
        "effort": plan.effort,
        "batch": contest.batch,
        "layers": contest.layers or network.default_layers or network.depth,
    }


def _convert(
    contest: Contest, folder: Path
) -> tuple[dict[str, str], dict[str, str], dict[str, float]]:
    """ONNX files by runtime, reasons where there is none, and how long each took.

    OpenVINO computes in half precision from a float32 file, ONNX Runtime as the file says.
    """
    files: dict[str, str] = {}
    reasons: dict[str, str] = {}
    seconds: dict[str, float] = {}
    written: dict[bool, tuple[str, dict[str, Any]]] = {}
    for name in (n for n in FROM_ONNX if n in contest.contestants):
        widen = name == "openvino" and contest.precision != "float32"
        if widen not in written:
            path = folder / f"{'wide' if widen else 'plain'}.onnx"
            c = contest
            job = Conversion(c.network, c.precision, c.batch, c.layers, str(path), widen)
            limit = c.peer_limit_s
            written[widen] = (
                str(path),
                launch(job, time_limit_s=limit, module="benchmarks.conversion"),
            )
        path_text, outcome = written[widen]
        if outcome["status"] == "ok":
            files[name], seconds[name] = path_text, outcome["export_s"]
        else:
            reasons[name] = f"{outcome['error']} (while exporting to ONNX)"
    return files, reasons, seconds


def _compete(contest: Contest, time_limit_s: float, folder: Path) -> dict[str, Any]:
    """Runs the contest, again without a contestant that took its process down."""
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    # Caches of the row's own where none was asked for: what tuning takes is part of the answer.
    ours = {"cache_dir": str(folder / "pruner")} | contest.options
    quick = contest.quick | {"cache_dir": ours["cache_dir"] + "-quick"}
    drafts = contest.drafts | {"cache_dir": ours["cache_dir"] + "-none"}
    stock = contest.stock | {"cache_dir": ours["cache_dir"] + "-stock"}
    contest = replace(contest, options=ours, quick=quick, drafts=drafts, stock=stock)
    while True:
        row = launch(
            contest, time_limit_s=time_limit_s, environment=caches, module="benchmarks.contest"
        )
        guilty = row.pop("preparing", None)
        if row["status"] in ("ok", "error") or guilty is None or guilty == "eager":
            return row
        why = f"{row['status']}: {row['error']}"
        contest = replace(contest, excluded=contest.excluded | {guilty: why})


def peer_names(text: str) -> tuple[str, ...]:
    """Names of contestants, separated by commas; an unknown one is a usage error."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PREPARE]:
        raise argparse.ArgumentTypeError(f"no peer {unknown[0]!r}; known: {', '.join(PREPARE)}")
    return tuple(name for name in PREPARE if name in {*names, "pruner"})


def _threads(options: argparse.Namespace) -> int:
    import torch

    return options.threads or torch.get_num_threads()


def _contestants(options: argparse.Namespace) -> tuple[str, ...]:
    """An effort takes part once."""
    chosen: tuple[str, ...] = options.peers
    return tuple(name for name in chosen if name != f"pruner-{options.effort}")


def _of_papers() -> list[str]:
    return [network.name for network in models.NETWORKS.values() if network.in_papers]


def _plans(options: argparse.Namespace) -> list[Plan]:
    ours = backend_options(options)
    ours.pop("threads", None)
    plans = []
    for name in options.networks or _of_papers():
        contest = Contest(
            network=name,
            contestants=_contestants(options),
            precision=options.precision,
            batch=options.batch,
            layers=options.layers if models.NETWORKS[name].depth else None,
            options=ours,
            quick={"effort": "quick"},
            drafts={"effort": "none"},
            stock={
                "effort": "full",
                "strategy": "metaschedule",
                "trials": options.stock_trials,
                "library": False,
            },
            threads=_threads(options),
            rounds=options.rounds,
            min_seconds=options.seconds,
            pause_s=options.pause,
            peer_limit_s=options.peer_limit,
        )
        plans.append(Plan(contest, options.effort, options.time_limit))
    return plans


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--networks", type=network_names, metavar="NAME,...", help="default: all")
    parser.add_argument(
        "--peers",
        type=peer_names,
        default=tuple(name for name in PREPARE if name not in ("metaschedule", "pruner-none")),
        metavar="NAME,...",
        help=f"pruner and these of {', '.join(PREPARE)}; pruner-quick has the default effort,"
        " pruner-none drafts alone, with cache directories beside the one given",
    )
    parser.add_argument("--precision", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--layers", type=int, help="build language models with so many layers")
    add_tuning(parser)
    parser.add_argument("--rounds", type=int, default=30, help="samples of each, at least")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each, at least")
    parser.add_argument("--pause", type=float, default=timing.PAUSE_S, metavar="SECONDS")
    parser.add_argument(
        "--stock-trials",
        type=int,
        default=1000,
        help="of MetaSchedule, in all of a network's tasks",
    )
    parser.add_argument(
        "--peer-limit", type=float, default=600.0, metavar="SECONDS", help="to get one peer ready"
    )
    parser.add_argument("--time-limit", type=float, default=3600.0, metavar="SECONDS", help="a row")
    parser.add_argument("--force", action="store_true", help="make rows again that are up to date")
    parser.add_argument("--data", default="docs/data/peers.json")
    parser.add_argument("--out", help="write the Markdown page there, e.g. docs/peers.md")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
